"""Balancing: losses over a named population of tokens, the next balancing bias, the load that ranks wait for.

Each loss is a *share*: the sum over micro-batches and ranks of what is returned is the loss of the global
batch. All are functions of a :class:`moekit.Routing`, or of the rows that it counts.
"""

from moekit.balance._load import (
    Evenness as Evenness,
    Gap as Gap,
    evenness as evenness,
    gerrymandering_gap as gerrymandering_gap,
    rank_load as rank_load,
    sorted_by_domain as sorted_by_domain,
    wait as wait,
)
from moekit.balance._losses import (
    Population as Population,
    expert_counts as expert_counts,
    load_balancing_loss as load_balancing_loss,
    next_bias as next_bias,
    router_z_loss as router_z_loss,
)
