"""What stands in torch's place in the process of a fake rank: a step runs on the meta device as on a GPU."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from moekit._recorder import Recorder
from moekit.kernels import _backend, scaled_mm


@contextmanager
def stand_ins(recorder: Recorder, device: str) -> Iterator[None]:
    """Let the recorder see what does not come to a dispatch mode, and torch accept the meta device.

    Attention, and on ``"cuda"`` RMSNorm, hold what their fused kernels do: on the meta device torch composes
    them of other operations.
    """
    from torch._C._distributed_c10d import FakeWork

    changed: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, new: Callable) -> None:
        changed.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    backend, resize = dist.ProcessGroup._get_backend, torch.UntypedStorage.resize_
    patch(FakeWork, "wait", lambda work, *_, **__: recorder.wait(work) or True)
    patch(FakeWork, "is_completed", lambda work: True)  # else what is sent is held for ever
    patch(dist.ProcessGroup, "_get_backend", lambda group, on: backend(group, _cpu_for_meta(on)))
    patch(torch.UntypedStorage, "resize_", lambda storage, n: recorder.resize(storage, resize, n))
    for name in (x for x in dir(dist.ProcessGroup) if "reduce" in x and not x.startswith("__")):
        patch(dist.ProcessGroup, name, _noting_reduce_op(getattr(dist.ProcessGroup, name), recorder))
    for owner, name in (
        (DeviceMesh, "__init__"),
        (device_mesh, "init_device_mesh"),
        (dist, "init_device_mesh"),
    ):
        patch(owner, name, _outside_modes(getattr(owner, name)))
    patch(F, "scaled_dot_product_attention", _attention)
    if device == "cuda":
        patch(F, "rms_norm", _rms_norm)
        patch(_backend, "on_cuda", lambda x: x.is_meta)  # kernels run, as far as their shapes
        patch(scaled_mm, "why_emulated", lambda *_, **__: None)
    patch(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_, **__: None)
    missing = torch.library.Library("aten", "IMPL", "Meta")
    for op in ("_fused_adamw_", "_fused_adamw_.tensor_lr"):  # which only change values
        missing.impl(op, lambda *_, **__: None, allow_override=True)
    if fsdp := sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group"):
        patch(fsdp.FSDPParamGroup, "_validate_no_meta_params", lambda group: None)
        patch(fsdp.FSDPParam, "reset_sharded_param", _resetting(fsdp.FSDPParam.reset_sharded_param))
    try:
        yield
    finally:
        for owner, name, original in reversed(changed):
            setattr(owner, name, original)
        del missing


def _outside_modes(original: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # a mesh's tensor of ranks is real
            return original(*args, **kwargs)

    return run


def _cpu_for_meta(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def _noting_reduce_op(original: Callable, recorder: Recorder) -> Callable:
    def noted(group: Any, *args: Any, **kwargs: Any) -> Any:
        given = [getattr(x, "reduceOp", x) for x in (*args, *kwargs.values())]
        kinds = dist.ReduceOp.RedOpType.__members__
        ops = [x for x in given if isinstance(x, dist.ReduceOp)]
        recorder.reduce_op = next((kind.lower() for kind, op in kinds.items() if ops and ops[0] == op), None)
        return original(group, *args, **kwargs)

    return noted


def _resetting(original: Callable) -> Callable:
    """Let FSDP take a parameter that was made anew on meta, which it would leave for later."""

    def run(param: Any) -> None:
        original(param)
        held = param.sharded_param._local_tensor
        if held.size() == param.padded_sharded_param_size:
            param._sharded_param_data = held.view(-1)

    return run


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    del enable_gqa  # its kernel takes any number of heads
    if query.ndim == 3:
        query, key, value = (x[None] for x in (query, key, value))
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


def _rms_norm(input, normalized_shape, weight=None, eps=None):
    del eps
    return _RMSNorm.apply(input, weight, len(normalized_shape))


class _RMSNorm(torch.autograd.Function):
    """What CUDA's fused kernel keeps: its input, the gain, and a float32 a row."""

    gives_gradients_together = True  # as torch's own norm, it may stand in a backward that is split

    @staticmethod
    def forward(ctx, x, gain, n_dims):
        ctx.save_for_backward(x, gain, x.new_empty(x.shape[:-n_dims], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, *grads):
        x, gain, _ = ctx.saved_tensors
        return torch.empty_like(x), None if gain is None else torch.empty_like(gain), None
