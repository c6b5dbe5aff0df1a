"""Shapes are checked in eager code, in every process that a test starts, and not under torch.compile."""

import subprocess
import sys

import checked_shapes
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor


def double(x: Float[Tensor, "t d"]) -> Float[Tensor, "t d"]:
    return 2 * x


def test_a_wrong_shape_is_an_error_in_eager_code():
    checked = checked_shapes.jaxtyping.jaxtyped(typechecker=beartype)(double)
    assert checked(torch.ones(2, 3)).sum() == 12
    with pytest.raises(TypeCheckError):
        checked(torch.ones(3))


def test_the_plain_function_is_traced_under_compile():
    checked = checked_shapes.jaxtyping.jaxtyped(typechecker=beartype)(double)
    torch.compiler.reset()  # all checked functions are one frame, and torch compiles one a few times only
    compiled = torch.compile(checked, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 3)), 2 * torch.ones(2, 3))


def test_a_process_started_by_a_test_checks_shapes():
    code = "import sys; print(any(type(f).__module__.startswith('jaxtyping') for f in sys.meta_path))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "True"
