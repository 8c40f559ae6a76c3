"""Why a request reuses less than compressed rows alone would have given it: the decision itself."""

from __future__ import annotations

import sys

import pytest
from sglang.srt.mem_cache.swa_bitexact.receipt import MatchedForReuse, cut_reason
from sglang.srt.mem_cache.swa_bitexact.reuse_points import KnownPoint
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

UNKNOWN = KnownPoint(0, dropped=False)


@pytest.mark.parametrize(
    ("effective", "stride", "reason"),
    [
        (1024, 4, "off_grid"),
        (512, 4, "tile_evicted"),
        (768, 4, "tile_evicted"),
        (1024, 1, "tile_evicted"),
        (1536, 1, "tile_evicted"),
        (0, 8, "off_grid"),
        (0, 7, "tile_evicted"),
        (0, 0, "off_grid"),
    ],
)
def test_what_the_stride_says_about_a_cut(effective, stride, reason):
    """Rows up to page 7, nothing to load, nothing known."""
    match = MatchedForReuse(nominal=7 * 256, on_device=effective, loads=False, tile_on_host=False)
    assert cut_reason(match, effective, host_changed=False, step=stride * 256, known=UNKNOWN) == reason


@pytest.mark.parametrize(
    ("known", "stride", "reason"),
    [
        # The grid's 1,024 is the longest, a longer or the same prefix is known, or a shorter one.
        (KnownPoint(1024, dropped=True), 4, "pool_full"),
        (KnownPoint(1536, dropped=True), 4, "pool_full"),
        (KnownPoint(1536, dropped=False), 4, "tile_evicted"),
        (KnownPoint(768, dropped=True), 4, "tile_evicted"),
        # No grid at all, or none that reaches in here.
        (KnownPoint(768, dropped=True), 0, "pool_full"),
        (KnownPoint(768, dropped=False), 0, "tile_evicted"),
        (KnownPoint(768, dropped=True), 8, "pool_full"),
    ],
)
def test_what_is_known_of_a_cut(known, stride, reason):
    """512 of 1,792 tokens are reused."""
    match = MatchedForReuse(nominal=7 * 256, on_device=512, loads=False, tile_on_host=False)
    assert cut_reason(match, 512, host_changed=False, step=stride * 256, known=known) == reason


def test_what_was_not_loaded_comes_first_and_storage_second():
    match = MatchedForReuse(nominal=1792, on_device=256, loads=True, tile_on_host=True, storage_end=1792)
    arguments = {"step": 256, "known": UNKNOWN}
    assert cut_reason(match, 256, host_changed=False, **arguments) == "load_rejected"
    assert cut_reason(match, 256, host_changed=True, **arguments) == "digest_failed"
    assert cut_reason(match, 1024, host_changed=False, **arguments) == "storage_incomplete"
    assert cut_reason(match._replace(storage_end=1024), 1024, host_changed=False, **arguments) == "tile_evicted"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
