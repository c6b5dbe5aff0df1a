"""Python imports this at start in every process that the tests start: ranks, torchrun, recipes."""

import checked_shapes  # noqa: F401
