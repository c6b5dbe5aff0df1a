"""Switch on jaxtyping + beartype for moekit: checked in eager code, plain functions under torch.compile.

``jaxtyping.jaxtyped`` is wrapped before the import hook is installed: the hook decorates every function of
moekit with it, and what it makes cannot be traced.
"""

import functools
import inspect

import jaxtyping

_jaxtyped = jaxtyping.jaxtyped


def _switch(checked, plain):
    import torch  # here: a process that never imports moekit does not pay for torch

    @functools.wraps(plain)
    def call(*args, **kwargs):
        return plain(*args, **kwargs) if torch.compiler.is_compiling() else checked(*args, **kwargs)

    return call


def _jaxtyped_in_eager_code(*, typechecker):
    def wrap(obj):
        if not inspect.isclass(obj):
            return _switch(_jaxtyped(typechecker=typechecker)(obj), obj)
        plain = obj.__init__
        out = _jaxtyped(typechecker=typechecker)(obj)
        if out.__init__ is not plain:
            out.__init__ = _switch(out.__init__, plain)
        return out

    return wrap


jaxtyping.jaxtyped = _jaxtyped_in_eager_code
jaxtyping.install_import_hook("moekit", "beartype.beartype")
