"""Set before anything imports SGLang: the CPU platform, and Triton's interpreter for the oracles."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["SGLANG_PLATFORM"] = "cpu_ref"
# Upstream's Triton kernels are the oracles of our torch ones; without a GPU they are
# interpreted. The model path must not launch any: test_operators.py asserts it.
os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # As many processes as cores, each with one thread: more threads than cores wait for each other, spinning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest

# Kept out of a plain run; what each is for, and who runs it.
_MARKERS = {
    "ci": "servers over and over, many random operations: `make test-ci`, which .ci/run calls after `make test`",
    "slow": "a longer version of a test in the suite: PYTEST='-m slow'",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in _MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # What takes longest begins first, so that no process is left alone with it at the end.
    items.sort(key=lambda item: item.path.parent.name != "server")
    if config.getoption("markexpr"):
        return
    kept_out = [item for item in items if any(item.get_closest_marker(name) for name in _MARKERS)]
    config.hook.pytest_deselected(items=kept_out)
    items[:] = [item for item in items if item not in kept_out]


@pytest.fixture(autouse=True)
def switch_is_left_as_it_was() -> Iterator[None]:
    """Servers of later tests inherit it; stock and off would silently be on."""
    name = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"
    before = os.environ.get(name)
    yield
    left = os.environ.get(name)
    if left != before:
        os.environ.pop(name, None)
    assert left == before, f"the test left {name}={left}"


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The tiny checkpoint, written once per process."""
    from kit.checkpoint import shared_checkpoint

    return shared_checkpoint()
