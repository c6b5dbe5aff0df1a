"""Shape checks in every process, GPU tests skipped without a GPU, one profile for hypothesis."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent
STARTUP = str(TESTS / "startup")

# The ranks of moekit.testing and the recipes run in processes of their own, which see neither this file nor
# pytest's options. They do import the sitecustomize module found on PYTHONPATH, before they import moekit.
sys.path.insert(0, STARTUP)
# Without bytecode each of these processes would decorate all of moekit's source and compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (STARTUP, os.environ.get("PYTHONPATH")) if p)
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; read when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
import checked_shapes  # noqa: F401
import hypothesis
import jaxtyping
import pytest
import torch

if not torch.cuda.is_available():  # read when a kernel is defined, so before moekit is imported
    os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile("suite", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Mark what lies in tests/gpu with ``gpu``, and skip it where there is no CUDA device."""
    no_cuda = pytest.mark.skip(reason="no CUDA device here: torch.cuda.is_available() is False")
    for item in items:
        if TESTS / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_cuda)


@pytest.fixture
def unchecked(monkeypatch):
    """Run moekit as a user does, without shape checks, so that its own errors are seen."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
