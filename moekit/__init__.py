"""moekit: composable, functional transforms for Mixture-of-Experts training."""

from moekit import balance as balance
from moekit._dispatch import (
    Dispatched as Dispatched,
    Transport as Transport,
    combine as combine,
    dispatch as dispatch,
)
from moekit._experts import expert_forward as expert_forward
from moekit._generate import generate as generate
from moekit._moe import moe as moe
from moekit._optim import (
    Optimizer as Optimizer,
    adamw as adamw,
    chain as chain,
    clip_by_global_norm as clip_by_global_norm,
    global_norm as global_norm,
    warmup_cosine as warmup_cosine,
    warmup_linear as warmup_linear,
)
from moekit._random import fold_in as fold_in, make_key as make_key
from moekit._route import Routing as Routing, route as route
from moekit._shard_optimizer import shard_optimizer as shard_optimizer
from moekit._transforms import (
    accumulate as accumulate,
    data_parallel as data_parallel,
    remat as remat,
    sum_over_ranks as sum_over_ranks,
    value_and_grad as value_and_grad,
)
from moekit.batch import Batch as Batch, count_tokens as count_tokens, make_batch as make_batch
from moekit.config import ModelConfig as ModelConfig, preset as preset
from moekit.mesh import distribute as distribute, local as local, make_mesh as make_mesh
from moekit.model import next_token_loss as next_token_loss, transformer_block as transformer_block
from moekit.params import describe as describe, init_params as init_params
