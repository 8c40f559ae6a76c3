"""Padded steps, decode steps computed as extends, and idle ranks: as under DP attention."""

from __future__ import annotations

import sys

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kit.child import child_result

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

_AT_END, _PER_LAYER = ["states_at_end", "windows_at_end"], ["state_rows", "window_rows"]


def test_tiles_of_padded_steps_equal_those_of_plain_steps():
    found = child_result("kit.padded_steps", timeout_s=600)
    assert found["boundaries"] == [256, 512]
    assert found["plain_decode_hooks"] == _AT_END
    # The step to 512 ran as an extend of one row, and filled its tile at its end all the same.
    for padded in ("extend", "decode", "both"):
        assert found[padded] == {"equal": True, "decode_hooks": sorted(_AT_END + _PER_LAYER)}
    # The made-up request of an idle rank is an extend as well, and no hook ran for it.
    assert found["idle_hooks"] == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
