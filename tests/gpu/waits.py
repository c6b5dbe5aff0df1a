"""What must not wait for the device, for the tests of this folder."""

import contextlib

import torch


@contextlib.contextmanager
def no_sync():
    """Raise where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
