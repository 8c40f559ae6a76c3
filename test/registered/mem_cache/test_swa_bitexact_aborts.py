"""A request that is aborted at any stage of its life leaves nothing behind, and spoils nothing.

The real scheduler, model, tree and storage run in a process of their own; see kit/abort_oracle.py.
"""

from __future__ import annotations

import sys

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kit.child import child_result

register_cpu_ci(est_time=120, suite="base-a-test-cpu")

# What the next two requests for the same 1,300 tokens reuse. A prompt that is aborted while its first
# chunk is computed has published nothing.
REUSED = {
    "queued": [1280, 1280],
    "prefetching": [1280, 1280],
    "loading": [1280, 1280],
    "restored": [1280, 1280],
    "between chunks": [0, 1280],
    "decoding": [1280, 1280],
}


@pytest.fixture(scope="module", params=["overlap", pytest.param("no-overlap", marks=pytest.mark.ci)])
def found(request):
    return child_result("kit.abort_oracle", request.param)


def test_every_stage_is_aborted_and_what_was_cached_is_reused(found):
    assert found["stages"] == {name: {"aborted": True, "cached": cached} for name, cached in REUSED.items()}


def test_no_later_answer_differs_from_a_cold_one(found):
    assert found["different"] == []
    assert found["compared"] == 5 + 2 * len(REUSED)


def test_nothing_is_left_in_rows_tiles_or_slots(found):
    before, after = found["free"]
    assert before == after
    assert all(before)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
