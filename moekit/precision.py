"""Low precision: a policy says which numbers each part of a model computes with; weights are rounded for it.

::

    policy = mk.precision.preset("fp8_rowwise")
    print(policy)
    low = mk.precision.round_weights(params, policy)  # once a step
    (loss, stats), grads = grad_fn(params, batch, precision=low)
"""

from moekit._policy import (
    BF16 as BF16,
    FORMATS as FORMATS,
    FP8_ROWWISE as FP8_ROWWISE,
    MXFP8 as MXFP8,
    PRESETS as PRESETS,
    ROLES as ROLES,
    FormatName as FormatName,
    Precision as Precision,
    all_products as all_products,
    preset as preset,
)
from moekit._rounded import (
    Rounded as Rounded,
    hollow as hollow,
    round_matrix as round_matrix,
    round_weights as round_weights,
)
