"""A request that reuses a prefix leaves the rows in the tree that a cold run leaves; stock does not.

Answers show a wrong index key only in long contexts, and a wrong row is reused by others: so the
compressed rows and index keys are compared themselves. See kit/reuse_oracle.py.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kit.child import child_environment

register_cpu_ci(est_time=100, suite="base-a-test-cpu")

pytestmark = pytest.mark.ci

_ROWS = {
    "700": {"c4.1": 128, "index_key.1": 128, "c128.2": 4, "c4.3": 128, "index_key.3": 128},
    "1300": {"c4.1": 320, "index_key.1": 320, "c128.2": 10, "c4.3": 320, "index_key.3": 320},
    "2700": {"c4.1": 640, "index_key.1": 640, "c128.2": 20, "c4.3": 640, "index_key.3": 640},
}


def oracle(switch):
    """A process of its own: SGLang's globals take one model per process."""
    environment = child_environment(SGLANG_PLATFORM="cpu_ref")
    command = [sys.executable, "-m", "kit.reuse_oracle", switch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {length: case["rows"] for length, case in found.items()} == _ROWS
    # Reuse happened: whole pages of what was primed.
    assert [case["cached"] for case in found.values()] == [256, 1_024, 2_048]
    return found


def test_on_every_stored_row_is_the_cold_run_s():
    for case in oracle("on").values():
        assert set(case["wrong"].values()) == {0}
        assert case["same_answer"]


def test_off_the_fault_is_stored():
    """Stock's re-prefill reads stale windows: what it computes enters the tree, in every layer."""
    for case in oracle("off").values():
        assert all(count > 0 for count in case["wrong"].values())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v", "-m", "ci"]))
