import pytest
import torch
from hypothesis import given, strategies as st

import moekit as mk
from moekit.random import uniform

INTEGERS = st.integers(-(2**70), 2**70)
INT64 = st.integers(-(2**63), 2**63 - 1)


def test_keys_are_the_published_splitmix64_sequence():
    key = mk.random.make_key(0)
    got = [int(mk.random.fold_in(key, i)) % 2**64 for i in range(5)]
    sequence = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert got == [*sequence, 0x1B39896A51A8749B]


@given(INTEGERS, INT64)
def test_a_key_is_an_int64_scalar_for_any_integers(seed, data):
    key = mk.random.fold_in(mk.random.make_key(seed), data)
    assert key.dtype == torch.int64 and key.shape == ()
    assert torch.equal(key, mk.random.fold_in(mk.random.make_key(seed), torch.tensor(data)))


def test_keys_of_seeds_steps_and_layers_differ():
    keys = {
        int(mk.random.fold_in(mk.random.make_key(seed), data)) for seed in range(50) for data in range(50)
    }
    assert len(keys) == 2500


@given(INT64, st.lists(INT64, min_size=1, max_size=8))
def test_a_number_depends_on_its_key_and_index_alone(key, indices):
    key, indices = torch.tensor(key), torch.tensor(indices)
    together = uniform(key, indices)
    assert torch.equal(together, torch.stack([uniform(key, i) for i in indices]))
    assert together.dtype == torch.float32 and bool((together >= 0).all() and (together < 1).all())


@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_uniform_and_independent_of_neighbours_and_of_other_keys(seed):
    n, key = 2**16, mk.random.make_key(seed)
    index = torch.arange(n)
    x = uniform(key, index)
    counts = torch.histc(x, 64, 0, 1)
    assert (counts - n / 64).square().sum() / (n / 64) < 63 + 4 * (2 * 63) ** 0.5
    for other in (x.roll(1), uniform(key, index + n), uniform(mk.random.fold_in(key, 0), index)):
        assert torch.corrcoef(torch.stack([x, other]))[0, 1].abs() < 4 / n**0.5
