"""Sample from a model."""

from typing import Any

import torch
from jaxtyping import Int
from tensordict import TensorDict
from torch import Tensor

from moekit.config import ModelConfig
from moekit.model import logits
from moekit.random import fold_in, uniform

_OF_ROWS = ("context", "documents", "expert_ids", "x", "stage")


@torch.no_grad()
def generate(
    params: TensorDict,
    prompt: Int[Tensor, "b s"],
    n_tokens: int,
    *,
    config: ModelConfig,
    key: Int[Tensor, ""],
    temperature: float = 1.0,
    window: int | None = None,
    **options: Any,
) -> Int[Tensor, "b n"]:
    """Continue each prompt by ``n_tokens`` tokens, drawn from the model's distribution.

    The whole window is computed anew for each token (no cache): for samples of a run, not for serving.
    Collective over the mesh as :func:`moekit.model.forward` is; with the same prompts and key, ranks draw the
    same tokens.

    Parameters
    ----------
    params : TensorDict
        From :func:`moekit.init_params`.
    prompt : Int[Tensor, "b s"]
        At least one token each.
    n_tokens : int
        To draw.
    config : ModelConfig
        The model.
    key : Int[Tensor, ""]
        See :func:`moekit.random.make_key`.
    temperature : float
        0 takes the most likely token.
    window : int, optional
        Positions the model sees; by default ``config.max_seq_len``.
    **options
        As for :func:`moekit.model.forward`, but what is of rows of one length, or of a part of them.

    Returns
    -------
    Int[Tensor, "b n"]
        The new tokens, without the prompt.

    Raises
    ------
    ValueError
        When a prompt is empty, the temperature or ``n_tokens`` negative, the window out of range, or an
        option is of rows of one length.
    """
    if wrong := [name for name in _OF_ROWS if options.get(name) is not None]:
        raise ValueError(
            f"generate needs no options that are of rows of one length or a part of them, got "
            f"{', '.join(wrong)}; leave them out: a model does not depend on the context it was trained with"
        )
    if not prompt.shape[1] or not temperature >= 0:
        raise ValueError(
            "generate needs prompts of a token or more and temperature >= 0, "
            f"got {tuple(prompt.shape)}, {temperature=}"
        )
    window = config.max_seq_len if window is None else window
    if not 1 <= window <= config.max_seq_len or n_tokens < 0:
        raise ValueError(
            f"generate needs 1 <= window <= max_seq_len={config.max_seq_len} and n_tokens >= 0, "
            f"got {window=}, {n_tokens=}"
        )
    tokens = prompt
    for i in range(n_tokens):
        last = logits(params, tokens[:, -window:], config=config, **options)[:, -1]
        if temperature > 0:
            # The largest of logits plus Gumbel noise is a draw from their softmax.
            index = torch.arange(last.numel(), device=last.device).view(last.shape)
            noise = uniform(fold_in(key, i), index).clamp_min(2.0**-25)
            last = last / temperature - (-noise.log()).log()
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], 1)
    return tokens[:, prompt.shape[1] :]
