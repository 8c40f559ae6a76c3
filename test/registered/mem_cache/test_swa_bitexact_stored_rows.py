"""A request that reuses a prefix leaves the rows in the tree that a cold run leaves; stock does not.

Answers show a wrong index key only in long contexts, and a wrong row is reused by others: so the
compressed rows and index keys are compared themselves. See kit/reuse_oracle.py.
"""

from __future__ import annotations

import sys

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kit.child import child_result

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

_ROWS = {
    "700": {"c4.1": 128, "index_key.1": 128, "c128.2": 4, "c4.3": 128, "index_key.3": 128},
    "800": {"c4.1": 192, "index_key.1": 192, "c128.2": 6, "c4.3": 192, "index_key.3": 192},
    "1300": {"c4.1": 320, "index_key.1": 320, "c128.2": 10, "c4.3": 320, "index_key.3": 320},
    "2700": {"c4.1": 640, "index_key.1": 640, "c128.2": 20, "c4.3": 640, "index_key.3": 640},
}


def oracle(*arguments):
    found = child_result("kit.reuse_oracle", *arguments)
    assert {length: case["rows"] for length, case in found.items()} == {length: _ROWS[length] for length in found}
    return found


def cached(found):
    return [case["cached"] for case in found.values()]


def test_hits_on_the_device_and_on_the_host_and_no_hit_without_a_tile():
    found = oracle("on", "short")
    # One page of 400 tokens; of 600 shared ones none, since the other prompt has its tile behind them.
    assert cached(found) == [[256, 512], [0, 768]]
    # What is restored is on the device, or on its way there.
    assert [case["loads"] for case in found.values()] == [[False, True], [True]]
    for case in found.values():
        assert set(case["wrong"].values()) == set(case["wrong_from_host"].values()) == {0}
        assert case["same_answer"]


# Reuse in the following: whole pages of what was primed.


@pytest.mark.ci
def test_on_every_stored_row_is_the_cold_run_s():
    found = oracle("on")
    assert cached(found) == [[256], [1_024], [2_048]]
    for case in found.values():
        assert set(case["wrong"].values()) == {0}
        assert case["same_answer"]


@pytest.mark.ci
def test_off_the_fault_is_stored():
    """Stock's re-prefill reads stale windows: what it computes enters the tree, in every layer."""
    found = oracle("off")
    assert cached(found) == [[256], [1_024], [2_048]]
    for case in found.values():
        assert all(count > 0 for count in case["wrong"].values())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v", "-m", "ci or not ci"]))
