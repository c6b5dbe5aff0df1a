"""Run a script as the main program of a process that has imported torch and moekit already."""

import contextlib
import io
import os
import runpy
import socket
import sys
from unittest import mock

import jaxtyping
import torch.distributed as dist

from moekit.testing import ranks


def as_main(script, *options):
    """Run a script with these options in this process, and return what it printed."""
    out = io.StringIO()
    with mock.patch.object(sys, "argv", [str(script), *map(str, options)]), contextlib.redirect_stdout(out):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return out.getvalue()


def on_ranks(n, script, *options, plain=False, timeout=560):
    """Run a script on ``n`` ranks as torchrun does, or alone, and return what the first one printed.

    With ``plain``, shapes are not checked.
    """
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    return ranks(n, timeout=timeout)(_rank, port, script, options, plain)[0]


def _rank(port, script, options, plain):
    rank, n = str(dist.get_rank()), str(dist.get_world_size())
    dist.barrier()  # else one may leave before all have met
    dist.destroy_process_group()
    if n != "1":
        os.environ |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=n)
        os.environ |= dict(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    os.environ["WANDB_MODE"] = "disabled"
    jaxtyping.config.update("jaxtyping_disable", plain)
    return as_main(script, *options)
