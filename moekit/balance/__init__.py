"""Balancing: losses over a named population of tokens, the next balancing bias, the load that ranks wait for.

Each loss is a *share*: the sum over micro-batches and ranks of what is returned is the loss of the global
batch. All are functions of a :class:`moekit.Routing`, or of the rows that it counts. Routing can be data:
recorded in a run and taken again, or drawn with a given skew.
"""

from moekit.balance._load import (
    Evenness as Evenness,
    Gap as Gap,
    StepWait as StepWait,
    evenness as evenness,
    fullest as fullest,
    gerrymandering_gap as gerrymandering_gap,
    rank_load as rank_load,
    sorted_by_domain as sorted_by_domain,
    step_wait as step_wait,
    wait as wait,
    wait_of_sums as wait_of_sums,
)
from moekit.balance._losses import (
    Population as Population,
    expert_counts as expert_counts,
    load_balancing_loss as load_balancing_loss,
    next_bias as next_bias,
    router_entropy as router_entropy,
    router_z_loss as router_z_loss,
)
from moekit.balance._recorded import (
    Recording as Recording,
    keep_routing as keep_routing,
    read_recording as read_recording,
    record_step as record_step,
    recorded_rows as recorded_rows,
    replay as replay,
    write_recording as write_recording,
)
from moekit.balance._skew import dirichlet_shares as dirichlet_shares, draw_experts as draw_experts
