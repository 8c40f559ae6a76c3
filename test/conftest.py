"""Set before anything imports SGLang: the CPU platform, and Triton's interpreter for the oracles."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["SGLANG_PLATFORM"] = "cpu_ref"
# Upstream's Triton kernels are the oracles of our torch ones; without a GPU they are
# interpreted. The model path must not launch any: test_operators.py asserts it.
os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The tiny checkpoint, written once per process."""
    from kit.checkpoint import shared_checkpoint

    return shared_checkpoint()
