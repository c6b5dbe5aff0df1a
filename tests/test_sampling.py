import math

import pytest
import torch

import moekit as mk
from moekit.model import logits

CONFIG = mk.ModelConfig(
    vocab_size=11,
    d_model=16,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    d_head=8,
    n_experts=4,
    top_k=2,
    d_expert=8,
    max_seq_len=6,
    init_std=0.5,
)
PARAMS = mk.init_params(CONFIG)
KEY = mk.random.make_key(0)


def test_temperature_zero_takes_the_most_likely_token_of_the_window():
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    tokens = prompt
    for _ in range(8):  # longer than the window
        last = logits(PARAMS, tokens[:, -CONFIG.max_seq_len :], config=CONFIG)[:, -1]
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], 1)
    got = mk.generate(PARAMS, prompt, 8, config=CONFIG, key=KEY, temperature=0.0)
    assert torch.equal(got, tokens[:, 3:])


def test_tokens_are_drawn_as_often_as_the_model_says():
    n = 8000
    got = mk.generate(PARAMS, torch.tensor([[1, 2]]).expand(n, 2), 1, config=CONFIG, key=KEY)
    p = logits(PARAMS, torch.tensor([[1, 2]]), config=CONFIG)[0, -1].softmax(-1)
    often = torch.bincount(got[:, 0], minlength=11) / n
    assert ((often - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-3).all()


def test_the_same_key_draws_the_same_tokens_and_another_key_others():
    draw = lambda seed: mk.generate(  # noqa: E731
        PARAMS, torch.tensor([[1]]), 20, config=CONFIG, key=mk.random.make_key(seed)
    )
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize(
    "prompt, options",
    [
        (torch.zeros(1, 0, dtype=torch.int64), {}),
        (torch.tensor([[1]]), {"temperature": -1.0}),
        (torch.tensor([[1]]), {"temperature": math.nan}),
        (torch.tensor([[1]]), {"window": 0}),
        (torch.tensor([[1]]), {"window": 7}),
    ],
)
def test_bad_input_is_refused(prompt, options):
    with pytest.raises(ValueError, match=r"generate needs (prompts of a token|1 <= window <= max_seq_len=6)"):
        mk.generate(PARAMS, prompt, 1, config=CONFIG, key=KEY, **options)


@pytest.mark.parametrize("name", ["context", "documents", "expert_ids", "x", "stage"])
def test_options_of_rows_of_one_length_are_refused(name):
    with pytest.raises(ValueError, match=f"of rows of one length or a part of them, got {name};"):
        mk.generate(PARAMS, torch.tensor([[1, 2]]), 1, config=CONFIG, key=KEY, **{name: object()})
