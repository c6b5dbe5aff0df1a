"""Operations on tensors of the meta device, which have shapes and no values, as a GPU would execute them.

What torch's meta kernels work out is kept: an operation on arguments of the same kind takes a look-up. (On
fake tensors the same step takes five times as long.)
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

META = torch.device("meta")


class MetaOps:
    """Executes operations of torch on meta tensors, whichever device they ask for."""

    def __init__(self):
        self._rules: dict[Any, str] = {}
        self._results: dict[Any, tuple[bool, list[tuple]]] = {}

    def __call__(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": META}
            kwargs.pop("pin_memory", None)
        rule = self._rules.get(func) or self._rules.setdefault(func, _rule(func))
        if rule == "views":
            return func(*args, **kwargs)
        if rule == "nothing":
            return None
        if rule == "to meta":
            return torch.empty_like(args[0], device=META)
        if rule == "communicates":
            return _on_stubs(func, args, kwargs)
        key = func, _kind(args), tuple((name, _kind(x)) for name, x in kwargs.items()) if kwargs else None
        try:
            known = self._results.get(key)
        except TypeError:  # an argument that has no hash
            return func(*args, **kwargs)
        if known is None:
            _check_dtypes(func, args)
            out = _grouped_mm(func, args, kwargs) if rule == "grouped" else func(*args, **kwargs)
            made = [out] if isinstance(out, Tensor) else list(out)
            if all(isinstance(x, Tensor) and x.is_meta for x in made):
                kinds = [(x.shape, x.stride(), x.dtype) for x in made]
                self._results[key] = isinstance(out, Tensor), kinds
            return out
        if rule == "in place":
            return args[0]
        one, kinds = known
        made = [torch.empty_strided(n, stride, dtype=dtype, device=META) for n, stride, dtype in kinds]
        return made[0] if one else tuple(made)


def _rule(func: Any) -> str:
    """Return how an operation is executed."""
    schema = func._schema
    aliases = [x.alias_info for x in schema.returns]
    writes = [x.alias_info is not None and x.alias_info.is_write for x in schema.arguments]
    if schema.name.startswith("c10d::"):
        return "communicates"
    if not schema.returns:
        return "nothing"  # only changes values
    if schema.name == "aten::lift_fresh":
        return "to meta"
    if schema.name == "aten::_grouped_mm":
        return "grouped"
    if any(str(x.type) != "Tensor" for x in schema.returns) or torch.Tag.inplace_view in func.tags:
        return "views"
    if any(aliases) or any(writes):
        same = len(aliases) == 1 and writes[0] and aliases[0] and aliases[0].is_write
        return "in place" if same else "views"
    return "makes"


# Products, of whose operands torch's meta kernels do not compare the dtypes.
_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu"),
    "moekit::causal_attention",
)


def _check_dtypes(func: Any, args: tuple) -> None:
    if func._schema.name.removeprefix("aten::") in _PRODUCTS:
        dtypes = [x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        if len(set(dtypes)) > 1:
            raise RuntimeError(f"{func.name()} needs tensors of one dtype, got {', '.join(map(str, dtypes))}")


def _kind(x: Any) -> Any:
    """Return what an operation's result depends on, of an argument."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.is_meta
    if isinstance(x, list | tuple):
        return tuple([_kind(y) for y in x])
    return type(x), x


def _on_stubs(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a fake process group, which takes no meta tensors: with empty ones, and without their splits."""
    stubs: list[tuple[Tensor, Tensor]] = []
    splits = func._schema.name == "c10d::alltoall_base_"

    def stub(x: Any) -> Any:
        if isinstance(x, Tensor):
            stubs.append((torch.empty(0, dtype=x.dtype, device="cpu"), x))
            return stubs[-1][0]
        if isinstance(x, list):
            return [stub(y) for y in x if not (splits and isinstance(y, int))]
        return x

    out = func(*map(stub, args), **{name: stub(x) for name, x in kwargs.items()})
    out = tree_map(lambda y: next((x for s, x in stubs if s is y), y), out)
    stubs.clear()  # `stub`, which refers to itself and to them, is only freed by the garbage collector
    return out


def _grouped_mm(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Call torch's meta kernel, which knows bfloat16 alone, for any dtype."""
    dtype = args[0].dtype
    narrow = [torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device=META) for x in args[:2]]
    out = func(*narrow, *args[2:], **kwargs)
    return torch.empty_strided(out.shape, out.stride(), dtype=dtype, device=META)
