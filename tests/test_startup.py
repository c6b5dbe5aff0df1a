"""Shapes are checked in eager code, in every process that a test starts, and not under torch.compile."""

import subprocess
import sys
import weakref
from dataclasses import dataclass

import checked_shapes
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor


def double(x: Float[Tensor, "t d"]) -> Float[Tensor, "t d"]:
    return 2 * x


check = checked_shapes.jaxtyping.jaxtyped(typechecker=beartype)


def test_a_wrong_shape_is_an_error_in_eager_code():
    checked = check(double)
    assert checked(torch.ones(2, 3)).sum() == 12
    with pytest.raises(TypeCheckError):
        checked(torch.ones(3))


def test_a_wrong_shape_is_an_error_as_result_and_in_a_list_and_a_dataclass():
    @check
    def flat(xs: list[Float[Tensor, "t d"]] | None) -> Float[Tensor, " t"] | None:
        return xs and xs[0]

    @check
    @dataclass
    class Rows:
        x: Float[Tensor, "t d"]
        y: Float[Tensor, "t h"]

    assert flat(None) is None and Rows(torch.ones(2, 3), torch.ones(2, 4)).y.shape == (2, 4)
    for call in (
        lambda: flat([torch.ones(2)]),
        lambda: flat([torch.ones(2, 3)]),
        lambda: Rows(torch.ones(2, 3), torch.ones(3, 3)),
    ):
        with pytest.raises(TypeCheckError):
            call()


def test_closures_of_one_definition_each_call_their_own_function_and_are_checked():
    def adder(n):
        @check
        def add(x: int, *, of=None) -> int:
            return n + (x if of is None else of(x))

        return add

    one, half = adder(1), adder(0.5)
    assert one(1) == 2 and one(1, of=adder(10)) == 12 and one(3) == 4
    for call in (lambda: one("1"), lambda: half(1), lambda: one(1, of=half)):
        with pytest.raises(TypeCheckError):
            call()
    assert one(1) == 2


def test_the_first_closure_of_a_definition_ends_with_what_it_holds():
    def of(held):
        @check
        def add(x: int) -> int:
            return held + x

        return add

    held = torch.ones(1)
    first, end = of(held), weakref.ref(held)
    del first, held
    assert end() is None


def test_checks_are_off_where_a_test_asks_for_what_users_see(unchecked):
    @check
    def name(x: int) -> int:
        return x

    assert check(double)(torch.ones(3)).sum() == 6 and name("1") == "1"


def test_the_plain_function_is_traced_under_compile():
    checked = check(double)
    torch.compiler.reset()  # all checked functions are one frame, and torch compiles one a few times only
    compiled = torch.compile(checked, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 3)), 2 * torch.ones(2, 3))


def test_a_process_started_by_a_test_checks_shapes():
    code = "import sys; print(any(type(f).__module__.startswith('jaxtyping') for f in sys.meta_path))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "True"
