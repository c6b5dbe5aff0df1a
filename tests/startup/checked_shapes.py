"""Switch on jaxtyping + beartype for moekit: checked in eager code, plain functions under torch.compile.

``jaxtyping.jaxtyped`` is replaced before the import hook is installed: the hook decorates every function of
moekit with it, what it makes cannot be traced, and making and calling it takes longer than a small test does.
So it checks annotations with shapes, and beartype alone the others.
"""

import dataclasses
import functools
import inspect
from typing import get_args

import jaxtyping

_jaxtyped = jaxtyping.jaxtyped
_checks = {}  # by code: closures of one definition share theirs


def _has_shapes(annotation):
    if isinstance(annotation, str):
        return True  # it may; and jaxtyping lets pass what is imported for type checkers alone
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shapes, get_args(annotation)))


def _checks_of(plain, typechecker):
    """Return what checks arguments and what checks a result; neither calls ``plain``."""

    @functools.wraps(plain)
    def arguments(*args, **kwargs):
        pass

    def result(out):
        pass

    arguments.__annotations__ = dict(plain.__annotations__)
    result.__annotations__ = {"out": arguments.__annotations__.pop("return", object)}
    checks = typechecker(arguments), typechecker(result)
    del arguments.__wrapped__  # else the first closure would live as long as its check
    return checks


def _in_eager_code(plain, typechecker):
    import torch  # here: a process that never imports moekit does not pay for torch

    if not plain.__annotations__:
        return plain
    if any(map(_has_shapes, plain.__annotations__.values())):
        checked = _jaxtyped(typechecker=typechecker)(plain)
    else:
        if plain.__code__ not in _checks:
            _checks[plain.__code__] = _checks_of(plain, typechecker)
        arguments, result = _checks[plain.__code__]

        def checked(*args, **kwargs):
            arguments(*args, **kwargs)
            out = plain(*args, **kwargs)
            result(out)
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
