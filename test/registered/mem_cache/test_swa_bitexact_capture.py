"""Tiles hold exactly what an uninterrupted run has at their boundary, however they were captured.

The real scheduler, model and backend serve; see kit/capture_oracle.py for what is compared.
"""

from __future__ import annotations

import sys

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kit.child import child_result

register_cpu_ci(est_time=240, suite="base-a-test-cpu")

_BOTH, _WINDOW = "window and state on both sides of the cut", "window on both sides of the cut"


@pytest.mark.parametrize("scenario", ["whole", "odd_chunks", "chunk_ends", "mixed", "mixed_overlap", "retract"])
def test_tiles_equal_an_uninterrupted_run(scenario):
    found = child_result("kit.capture_oracle", scenario)
    assert found["wrong"] == []
    assert found["tiles_left"] == found["tiles"] == 46
    assert found["counters"]["dropped"] == 0
    # What was not published came back.
    assert found["counters"]["captured"] == found["counters"]["returned"] + found["published"]
    assert found["compared"] + found["zombies"] == found["counters"]["captured"]
    # Both compressors of the two ratio-4 layers, once per step.
    assert found["state_calls"] == dict.fromkeys(("(1, False)", "(1, True)", "(3, False)", "(3, True)"), 1)
    kinds = found["kinds"]
    # A stop token found while the step to a boundary runs; a prompt aborted between its chunks.
    assert found["zombies"] == {"whole": 1, "retract": 2}.get(scenario, 0)
    if scenario == "whole":
        # Prompts of 1,023, 2,049 and 1,024 tokens: 3 + 8 + 4. Decode: from 1,023 over 1,024,
        # from 250 over 256, 512 and 768, from 128 and from 255 over 256. The last 256 tokens of
        # 1,024 are a chunk of their own.
        assert kinds == {"prefill": 14, "prefill at the end": 1, "decode": 6}
    elif scenario == "odd_chunks":
        assert kinds == {"prefill": 16, f"prefill, {_BOTH}": 1, f"prefill, {_WINDOW}": 3}
    elif scenario == "chunk_ends":
        # Ends on the grid: 3 of 2,048, 2 of 1,400, 5 of 3,000. Last boundaries 1,280 and 2,816,
        # and 1,792 and 2,048 of one chunk: a prompt of whole pages has two.
        assert kinds == {"prefill at the end": 10, "prefill": 4}
    elif scenario.startswith("mixed"):
        straddling = 6 if scenario == "mixed" else 4
        assert kinds == {
            "prefill": 1,
            "mixed prefill": 20 - straddling,
            f"mixed prefill, {_WINDOW}": straddling,
            f"mixed decode, {_BOTH}": 3,
        }
    else:
        assert found["retractions"] == 6
        assert found["aborted"] == ["cut", "gone"]
        assert kinds == {"prefill": 23, "prefill at the end": 2, "decode": 4}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
