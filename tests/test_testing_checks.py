"""The public checks find planted faults, and say what they need."""

import functools

import pytest
import torch
from tensordict import TensorDict

import moekit as mk
from moekit.testing import check_gradients, check_kernel

LOOP = functools.partial(mk.expert_forward, kernels="loop")


# --- check_kernel ----------------------------------------------------------------------


def test_the_table_has_a_row_per_case_and_a_column_per_gradient():
    table = check_kernel(LOOP, dtype=torch.float64)
    assert [line[:28].strip() for line in table.splitlines()] == [
        *("equal", "ragged", "an expert without rows", "one expert takes all", "no rows", "one row"),
        *("garbage after the end", "seven rows", "65,537 rows", "transposed weights"),
        *("weights of a larger tensor", "strided offsets"),
    ]
    assert all(word in line for line in table.splitlines() for word in ("output", "rows", "gate_up", "down"))


def reads_past_the_end(experts, rows, offsets):
    offsets = torch.cat([offsets[:-1], offsets.new_tensor([len(rows)])])
    return LOOP(experts, rows, offsets)


def gradient_past_the_end(experts, rows, offsets):
    out = LOOP(experts, rows, offsets)
    return out + 0 * out.sum() * experts["down"].mean()  # the gradients of rows past the end are NaN


def gate_without_gradient(experts, rows, offsets):
    return LOOP(
        dict(experts, gate_up=experts["gate_up"].detach() * 1 + 0 * experts["gate_up"]), rows, offsets
    )


def gate_without_a_graph(experts, rows, offsets):
    return LOOP(dict(experts, gate_up=experts["gate_up"].detach()), rows, offsets)


def without_a_graph(experts, rows, offsets):
    return LOOP(experts, rows, offsets).detach()


def expert_2_twice(experts, rows, offsets):
    scale = torch.tensor([1.0, 1, 2, 1])[:, None, None]
    down = experts["down"]
    return LOOP(dict(experts, down=down.detach() * (1 - scale) + down * scale), rows, offsets)


def gradient_of_rows_times_two(experts, rows, offsets):
    return LOOP(experts, 2 * rows - rows.detach(), offsets)


def first_expert_for_all(experts, rows, offsets):
    return LOOP({name: w[:1].expand_as(w) for name, w in experts.items()}, rows, offsets)


def noisy(experts, rows, offsets):
    return LOOP(experts, rows, offsets) * (1 + 1e-6 * torch.rand(len(rows), 1))


def halves_swapped(experts, rows, offsets):
    return LOOP(dict(experts, gate_up=experts["gate_up"].roll(48, -1)), rows, offsets)


def in_float64(experts, rows, offsets):
    return LOOP(experts, rows, offsets).double()


def skips_ragged_ends(experts, rows, offsets):
    whole = offsets // 32 * 32 if len(rows) == 203 else offsets
    return LOOP(experts, rows, whole)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (reads_past_the_end, r"(gate_up|down) \(garbage after the end, .*relative error inf"),
        (gradient_past_the_end, r"rows \(garbage after the end, .*relative error inf"),
        (gate_without_gradient, r"gate_up \(equal, .*relative error 1.0e\+00"),
        (gate_without_a_graph, r"gate_up \(equal, torch.float32\): no gradient"),
        (without_a_graph, r"rows \(equal, torch.float32\): no gradient"),
        (expert_2_twice, r"down \(equal, .*, may be 5e-06; most in expert 2$"),
        (gradient_of_rows_times_two, r"rows \(equal, .*relative error 1.0e\+00"),
        (first_expert_for_all, r"output \(equal"),
        (noisy, r"output differs the second time \(equal"),
        (halves_swapped, r"output \(equal"),
        (in_float64, r"output \(equal, torch.float32\): torch.float64, wanted torch.float32"),
        (skips_ragged_ends, r"output \(ragged"),
    ],
)
def test_check_kernel_names_what_a_kernel_gets_wrong(op, message):
    with pytest.raises(AssertionError, match=message):
        check_kernel(op)


def wraps_at_16_bits(experts, rows, offsets):
    out = LOOP(experts, rows, offsets)
    return torch.cat([out[: 2**16], 0 * out[2**16 :]])


def test_check_kernel_sees_a_single_wrong_row_among_many_in_bfloat16():
    message = r"output \(65,537 rows, .*error 1.0e\+00, may be 1e-02; most in row 65536$"
    with pytest.raises(AssertionError, match=message):
        check_kernel(wraps_at_16_bits, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32])
def test_check_kernel_says_which_dtypes_it_has_tolerances_for(dtype):
    dtypes = r"\['torch.float64', 'torch.float32', 'torch.bfloat16'\]"
    with pytest.raises(ValueError, match=f"check_kernel needs a dtype of {dtypes}, got {dtype}"):
        check_kernel(mk.expert_forward, dtype=dtype)


# --- check_gradients -------------------------------------------------------------------

PARAMS = TensorDict({"w": torch.tensor([1.0, 2.0]), "part": TensorDict({"bias": torch.tensor(0.5)})}).double()
ROWS = torch.arange(8.0, dtype=torch.float64).view(4, 2)


def loss(params, rows, *, mesh, power=2):
    return ((rows @ mk.local(params["w"]) + mk.local(params["part", "bias"])) ** power).sum()


def of_equal_parts(params, rows, *, mesh):
    """Return a mean over this call's rows, which is no share."""
    return loss(params, rows, mesh=mesh) / len(rows)


def test_the_table_has_a_row_per_parameter_and_a_column_per_layout():
    table = check_gradients(loss, PARAMS, ROWS, [{}, dict(edp=2), dict(ep=2, accumulate=2, power=2)])
    head, *lines = table.splitlines()
    assert head.split() == ["one", "rank", "edp=2", "ep=2,accumulate=2,power=2"]
    assert [line.split()[0] for line in lines] == ["loss", "w", "part.bias"]
    assert all(len(line.split()) == 4 and float(line.split()[1]) == 0 for line in lines)
    assert all(float(x) < 1e-10 for line in lines for x in line.split()[1:])


def test_what_differs_is_named_with_its_layout_and_the_table():
    with pytest.raises(AssertionError) as error:
        check_gradients(of_equal_parts, PARAMS, ROWS, [dict(edp=1), dict(edp=2), dict(accumulate=2)])
    first, *table = str(error.value).splitlines()
    assert first.startswith(
        "gradients differ by more than 1e-10: loss on edp=2; w on edp=2; part.bias on edp=2; "
    )
    assert "w on accumulate=2" in first and "edp=1" not in first
    assert len(table) == 4 and float(table[1].split()[2]) > 0.1


def test_a_parameter_named_loss_does_not_hide_the_loss():
    params = TensorDict({"loss": PARAMS["w"], "part": TensorDict({"loss": PARAMS["part", "bias"]})})

    def fault(params, rows, *, mesh):
        shared = ((rows @ mk.local(params["loss"])) ** 2).sum() + mk.local(params["part", "loss"])
        return shared + (0 if mesh is None else 1)  # in the loss, in no gradient

    with pytest.raises(AssertionError, match=r"more than 1e-10: loss on edp=1\n") as error:
        check_gradients(fault, params, ROWS, [dict(edp=1)])
    rows = [line.split()[0] for line in str(error.value).splitlines()[2:]]
    assert rows == ["loss", "params.loss", "part.loss"]


def test_the_tolerance_follows_the_dtype_or_is_given():
    def nearly(params, rows, *, mesh):
        return loss(params, rows, mesh=mesh) * (1 if mesh is None else 1 + 1e-6)

    check_gradients(nearly, PARAMS.float(), ROWS.float(), dict(edp=1))
    check_gradients(nearly, PARAMS, ROWS, [dict(edp=1)], rtol=1e-5)
    with pytest.raises(AssertionError, match="more than 1e-10: loss on edp=1; w on edp=1"):
        check_gradients(nearly, PARAMS, ROWS, [dict(edp=1)])


def test_a_gradient_that_is_not_a_number_differs():
    def nan(params, rows, *, mesh):
        return loss(params, rows, mesh=mesh) * (1 if mesh is None else torch.nan)

    with pytest.raises(AssertionError, match=r"loss on edp=1; w on edp=1; part.bias on edp=1"):
        check_gradients(nan, PARAMS, ROWS, [dict(edp=1)], rtol=1e30)


def test_a_transform_of_ones_own_is_checked_through_compose():
    def doubled(share, n_microbatches, mesh):
        step = mk.data_parallel(mk.accumulate(mk.value_and_grad(share), n_microbatches), mesh=mesh)

        def run(*args):
            value, grads = step(*args)
            return value, grads.apply(lambda g: g * (2 if mesh is None else 2 + 1e-3))

        return run

    with pytest.raises(AssertionError, match=r"more than 1e-10: w on edp=2; part.bias on edp=2"):
        check_gradients(loss, PARAMS, ROWS, [dict(edp=2)], compose=doubled)
    check_gradients(loss, PARAMS, ROWS, [dict(edp=2)], compose=doubled, rtol=1e-3)


@pytest.mark.parametrize(
    "layout",
    [
        *(dict(edp=3), dict(accumulate=3), dict(edp=2, accumulate=4), dict(edp=2, rows=[3, 0])),
        *(dict(edp=2, rows=[4]), dict(rows=[]), dict(edp=2, rows=[3, 1], accumulate=2)),
        *(dict(edp=0), dict(accumulate=0)),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_the_batch_is_refused(layout):
    n = layout.get("edp", 1)
    with pytest.raises(ValueError, match=rf"check_gradients needs .*among {n} ranks.*got \[4\], divided \["):
        check_gradients(loss, PARAMS, ROWS, [dict(edp=2), layout])


def test_a_batch_of_unequal_leading_dims_is_refused():
    with pytest.raises(ValueError, match=r"one leading dim .*got \[2, 4\]"):
        check_gradients(loss, PARAMS, {"a": ROWS, "b": ROWS[:2]}, [dict(edp=2)])


def test_an_unknown_option_is_the_losss_own_error():
    with pytest.raises(RuntimeError, match="unexpected keyword argument 'eddp'"):
        check_gradients(loss, PARAMS, ROWS, [dict(eddp=2)])
