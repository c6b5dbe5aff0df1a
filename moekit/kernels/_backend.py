"""Which implementation runs, and Triton where it is installed."""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._autograd import (  # pyright: ignore[reportMissingImports]
    _get_current_graph_task_keep_graph as get_keep_graph,
)

from moekit.tree import has_values

if TYPE_CHECKING:  # what Triton declares does not fit the use of its language

    class _Untyped(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Untyped):
        constexpr = Any

    triton: Any = None
    TensorDescriptor: Any = None
else:
    try:
        import triton
        import triton.language as tl
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:  # kernels can still be defined, never launched
        triton = TensorDescriptor = None
        tl = SimpleNamespace(constexpr=lambda value: value)


INTERPRETED = triton is not None and triton.knobs.runtime.interpret  # as kernels are when they are defined


def jit(fn: Any) -> Any:
    """Compile a kernel where Triton is installed, without the shape checks that tests put around it."""
    fn = inspect.unwrap(fn)
    return fn if triton is None else triton.jit(fn)


def operator(name: str, *, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable], Any]:
    """Make a function a custom operator of torch that runs on its first tensor's device.

    Triton launches on the current device, which need not be the tensors'.
    """

    def wrap(fn: Callable) -> Any:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            with torch.cuda.device_of(first):
                return fn(*args, **kwargs)

        return torch.library.custom_op(name, run, mutates_args=mutates_args)

    return wrap


@functools.cache
def finds(module: str) -> bool:
    """Say whether an optional package is installed, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package it would be part of
        return False


def is_hopper(x: Tensor) -> bool:
    """Say whether a tensor is on a CUDA device of compute capability 9 or later."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


@functools.cache
def n_processors(device: torch.device) -> int:
    """Return the multiprocessors of a CUDA device; of others, a number for the interpreter's programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def use_triton(who: str, kernels: str, x: Tensor, *, multiplies: bool = False) -> bool:
    """Say whether a function runs its Triton kernel on ``x``.

    ``"auto"`` takes it on CUDA devices, but for float64. ``"triton"`` insists; on a CPU it needs Triton's
    interpreter (``TRITON_INTERPRET=1``), which tests use, and which has no product of bfloat16 for a kernel
    that ``multiplies`` matrices.

    Raises
    ------
    ValueError
        For an unknown name, and where ``"triton"`` cannot run.
    """
    if kernels not in ("auto", "torch", "triton"):
        raise ValueError(f"{who} needs kernels 'auto', 'torch' or 'triton', got {kernels!r}")
    if kernels == "torch":
        return False
    no_product = multiplies and x.dtype == torch.bfloat16 and INTERPRETED and has_values(x)
    if kernels == "auto":
        return on_cuda(x) and x.dtype != torch.float64 and not no_product
    if not (on_cuda(x) or INTERPRETED):
        has = "no Triton" if triton is None else f"a tensor on {x.device}"
        raise ValueError(
            f"{who} needs Triton and a CUDA device, or its interpreter, for kernels='triton', got {has}; "
            "take 'auto' or 'torch', or set TRITON_INTERPRET=1 before moekit is imported"
        )
    if x.dtype == torch.float64:
        raise ValueError(f"{who} needs kernels='torch' for float64, got 'triton'")
    if no_product:  # it would multiply bit patterns
        raise ValueError(
            f"{who} needs compiled kernels for kernels='triton' and bfloat16, of which Triton's interpreter "
            "has no product; take kernels='torch' or float32, or leave out TRITON_INTERPRET on a CUDA device"
        )
    return True


def check_shapes(who: str, **needs: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise ``ValueError`` for a tensor of another shape than the one beside it; None passes.

    A kernel would read past the end of it.
    """
    for name, (x, shape) in needs.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{who} needs {name} {tuple(shape)}, got {tuple(x.shape)}")


def aligned(x: Tensor) -> Tensor:
    """Return a tensor that begins at a multiple of 16 bytes, as grouped products need: mostly ``x``."""
    if torch.compiler.is_compiling() or not has_values(x):  # there is no address; operators look again
        return x
    return x.clone() if x.data_ptr() % 16 else x


def on_cuda(x: Tensor) -> bool:
    """Say whether Triton runs where ``x`` is; a dry run puts what it stands for in this function's place."""
    return triton is not None and x.is_cuda


def _loop_bound(x):
    return x


def _interpreted_loop_bound(x):
    return int(x.handle.data.item()) if hasattr(x, "handle") else int(x)


# A loop's bound that is known when the kernel runs. The interpreter of Triton 3.6, which torch 2.11 needs,
# takes none from numpy 2.4 on; this goes with that version.
if INTERPRETED:
    loop_bound = _interpreted_loop_bound
else:
    loop_bound = jit(_loop_bound)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least ``n``, as block sizes are."""
    return 1 << max(n - 1, 0).bit_length()


KERNELS = ("auto", "torch", "triton", "quack", "loop")


def check_kernels(who: str, kernels: str) -> None:
    """Raise ``ValueError`` for a name that a layer of experts does not know."""
    if kernels not in KERNELS:
        own = "; one of your own goes between dispatch and combine (docs/kernels.md, One's own)"
        raise ValueError(
            f"{who} needs kernels 'auto', 'torch', 'triton', 'quack' or 'loop', got {kernels!r}"
            f"{own if callable(kernels) else ''}"
        )


def elementwise(kernels: str) -> str:
    """Return what operations beside the grouped GEMMs use, given what a model is told for those."""
    return {"quack": "auto", "loop": "torch"}.get(kernels, kernels)


def forget_saved(ctx: Any) -> bool:
    """Let go of what a function has saved, so that each tensor goes with its last use in the backward.

    Returns whether it may be overwritten: not where the graph is retained for another backward. A hook that
    packs saved tensors and keeps them itself sees them overwritten.
    """
    if torch.compiler.is_compiling():
        return False
    ctx.maybe_clear_saved_tensors()
    return not get_keep_graph()


def is_asked_for(ctx: Any, i: int) -> bool:
    """Say whether the backward that is running goes on to the tensor argument ``i``, which is no leaf."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._will_engine_execute_node(ctx.next_functions[i][0])
