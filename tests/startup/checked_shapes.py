"""Switch on jaxtyping + beartype for moekit: checked in eager code, plain functions under torch.compile.

``jaxtyping.jaxtyped`` is replaced before the import hook is installed: the hook decorates every function of
moekit with it, what it makes cannot be traced, and making and calling it takes longer than a small test does.
Here closures of one definition share their checks, and each argument is checked once.
"""

import dataclasses
import functools
import inspect
from contextlib import nullcontext
from typing import get_args

import jaxtyping

_jaxtyped = jaxtyping.jaxtyped
_checks = {}  # by code


def _has_shapes(annotation):
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shapes, get_args(annotation)))


def _checks_of(plain, typechecker):
    """Return what checks arguments, what checks a result, and what letters of shapes are bound in."""

    @functools.wraps(plain)
    def arguments(*args, **kwargs):
        pass

    def result(out):
        pass

    hints = {name: hint for name, hint in plain.__annotations__.items() if not isinstance(hint, str)}
    letters = any(map(_has_shapes, hints.values()))
    result.__annotations__ = {"out": hints.pop("return", object)}
    arguments.__annotations__ = hints
    checks = typechecker(arguments), typechecker(result)
    del arguments.__wrapped__  # else the first closure would live as long as its checks
    return *checks, functools.partial(_jaxtyped, "context") if letters else nullcontext


def _explain(plain, typechecker, args, kwargs, out=None):
    """Raise jaxtyping's error for what was found wrong: it says what each letter stands for."""

    @functools.wraps(plain)
    def call(*args, **kwargs):
        return out

    _jaxtyped(typechecker=typechecker)(call)(*args, **kwargs)


def _in_eager_code(plain, typechecker):
    import torch  # here: a process that never imports moekit does not pay for torch

    if torch.compiler.is_compiling() or not plain.__annotations__:  # while tracing a closure may be made
        return plain
    if plain.__code__ not in _checks:
        _checks[plain.__code__] = _checks_of(plain, typechecker)
    arguments, result, letters = _checks[plain.__code__]

    def checked(*args, **kwargs):
        with letters():
            try:
                arguments(*args, **kwargs)
            except Exception:
                _explain(plain, typechecker, args, kwargs)
                raise
            out = plain(*args, **kwargs)
            try:
                result(out)
            except Exception:
                _explain(plain, typechecker, args, kwargs, out)
                raise
            return out

    @functools.wraps(plain)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling() or jaxtyping.config.jaxtyping_disable:
            return plain(*args, **kwargs)
        return checked(*args, **kwargs)

    return call


def _jaxtyped_in_eager_code(*, typechecker):
    def wrap(obj):
        if not inspect.isclass(obj):
            return _in_eager_code(obj, typechecker)
        if dataclasses.is_dataclass(obj) and "__init__" in vars(obj):
            obj.__init__ = _in_eager_code(obj.__init__, typechecker)
        return obj

    return wrap


jaxtyping.jaxtyped = _jaxtyped_in_eager_code
jaxtyping.install_import_hook("moekit", "beartype.beartype")
