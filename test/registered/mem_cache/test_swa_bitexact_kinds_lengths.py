"""Kinds of faults that others met at certain lengths, and in rings that requests take over from each other."""

from __future__ import annotations

import sys

import pytest
import torch
from sglang.srt.mem_cache.swa_bitexact.capture import _ring_buffers, ring_addresses
from sglang.srt.mem_cache.swa_bitexact.coupling import state_couplings
from sglang.test.ci.ci_register import register_cpu_ci

from kit.child import child_result
from kit.existing_tests import missing_tests
from kit.tile_cache import server_context
from kit.tile_pools import PAGE, tile_pools

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

P = PAGE

_REPEATED = "test_no_repeated_request_answers_differently"
# By kind, the tests.
KINDS = {
    "the same request again ends, or answers differently": (_REPEATED,),
    "a radix hit decodes from another request's ring": (
        _REPEATED,
        "test_swa_bitexact_stored_rows.py::test_on_every_stored_row_is_the_cold_run_s",
        "test_swa_bitexact_stored_rows.py::test_off_the_fault_is_stored",
    ),
    "equal at the window's length, different beyond it": (
        _REPEATED,
        "test_swa_bitexact_capture.py::test_tiles_equal_an_uninterrupted_run",
        "test_hits_equal_cold_runs.py::test_no_hit_differs",
    ),
    "a prompt shorter than the window is not extended": (_REPEATED,),
    "prefixes of exactly k pages, several at once": (_REPEATED,),
    "a prompt of whole pages is not found in storage": (
        _REPEATED,
        "test_swa_bitexact_kinds_storage.py::test_a_prompt_of_whole_pages_is_found_in_storage",
    ),
    "a ring is sized by one unit and addressed by another": (
        "test_every_ring_row_is_reached_and_none_beyond",
        "test_every_row_of_the_tiles_is_coupled_with_one_slot",
    ),
}


def test_the_tests_of_the_table_are_there():
    assert missing_tests(KINDS, __file__) == []


def test_no_repeated_request_answers_differently():
    """See kit/repeat_oracle.py."""
    found = child_result("kit.repeat_oracle", timeout_s=600)
    assert found["different"] == []
    assert found["refused"] == 0
    # 257, 383 to 385 and 511 to 513 tokens: whole pages, without the last token. The six shorter have none.
    pages = [P] * 6 + [2 * P]
    assert found["cached"] == {
        "device": [0] * 6 + pages,
        "host": pages,
        "storage": pages,
        "repeated": [2 * P] * 3,
        "another tail": [2 * P],
        "again after it": [2 * P],
        # 100, 200, 300 and 600 tokens of one prompt.
        "extended": [0, 0, 0, P],
        **{f"behind {k} pages": [k * P] * 3 for k in (1, 2)},
    }


# Rings -------------------------------------------------------------------------


def test_every_ring_row_is_reached_and_none_beyond():
    """Over all request slots and boundaries, what a tile is captured from and restored to."""
    with server_context():
        kvcache = tile_pools().get_kvcache()
    slots, layout = list(range(kvcache.num_req_slots)), kvcache.capture_pool.layout
    for name, stream in layout.streams.items():
        reached = torch.cat(
            [ring_addresses(slots, [b] * len(slots), stream.rows, stream.ring_rows) for b in (0, P, 2 * P)]
        )
        allocated = len(slots) * stream.ring_rows
        assert (int(reached.min()), int(reached.max())) == (stream.ring_rows - stream.rows, allocated - 1), name
        for buffer in _ring_buffers(kvcache)[name].values():
            assert len(buffer) >= allocated
    # Behind the last ring row the compressed rows begin.
    assert kvcache.unified_swa_pages == len(slots) * layout.window.ring_rows


def test_every_row_of_the_tiles_is_coupled_with_one_slot():
    """Slots are addressed by page, rows by ring: together they reach each row of the buffer once."""
    with server_context():
        pool = tile_pools().get_kvcache().capture_pool
    last_slots = [tile * P + slot for tile in range(pool.num_tiles + 1) for slot in range(P - 4, P)]
    couplings = state_couplings(pool)
    assert couplings
    for coupling in couplings:
        assert sorted(coupling.row(slot) for slot in last_slots) == list(range(len(coupling.buffer)))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
