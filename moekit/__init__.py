"""moekit: composable, functional transforms for Mixture-of-Experts training.

The functions everyone comes for are here; the rest is in the submodules.
"""

from moekit import (
    balance as balance,
    batch as batch,
    context as context,
    mesh as mesh,
    model as model,
    optim as optim,
    overlap as overlap,
    precision as precision,
    random as random,
    schedules as schedules,
    tree as tree,
)
from moekit._deepep import deepep as deepep
from moekit._dispatch import (
    Dispatched as Dispatched,
    Transport as Transport,
    combine as combine,
    dispatch as dispatch,
)
from moekit._experts import expert_forward as expert_forward
from moekit._moe import moe as moe
from moekit._pipeline import pipeline as pipeline
from moekit._route import Routing as Routing, route as route
from moekit._rowwise import rowwise as rowwise
from moekit._shard_optimizer import shard_optimizer as shard_optimizer
from moekit.batch import count_tokens as count_tokens
from moekit.config import ModelConfig as ModelConfig, preset as preset
from moekit.mesh import local as local, make_mesh as make_mesh
from moekit.model import next_token_loss as next_token_loss
from moekit.optim import adamw as adamw, chain as chain, clip_by_global_norm as clip_by_global_norm
from moekit.params import describe as describe, init_params as init_params
from moekit.sampling import generate as generate
from moekit.transforms import (
    accumulate as accumulate,
    data_parallel as data_parallel,
    remat as remat,
    value_and_grad as value_and_grad,
)
