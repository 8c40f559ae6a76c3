"""Upstream's unified pools (full attention, window and state in one buffer) below the tree."""

# SGLang is untyped.
# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

from array import array

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test import unified_allocator_fixtures as unified
from sglang.test.test_utils import CustomTestCase

from upstream.scenarios import observe
from upstream.scenarios.recording import Recording


class UnifiedPools(Recording, CustomTestCase):
    def setUp(self) -> None:
        unified.setup_allocator_context()

    def test_full_and_window(self) -> None:
        for page, lazy in ((1, False), (1, True), (4, False)):
            allocator, cache = unified.build_swa_cache(occupancy=24, lazy=lazy, page_size=page)
            self.note("filled", observe.free_rows(allocator))
            for number in (0, 7, 23):
                tokens = list(range(number * 1000, number * 1000 + page))
                self.note_match(f"{number}", cache, tokens)
            for amounts in ({"num_tokens": 3 * page}, {"swa_num_tokens": 2 * page}):
                self.note("evict", observe.evict(cache.evict(EvictParams(**amounts))))
                self.note("left", observe.free_rows(allocator))
            self.note_state("end", cache)

    def test_full_window_and_state(self) -> None:
        for sessions in (False, True):
            _, allocator, cache = unified.build_tri_cache(sessions=sessions, state_cache=False)
            rows = allocator.alloc(6)
            for length in (2, 4, 6):
                key = RadixKey(array("q", range(length)))
                self.note("insert", observe.insert(cache.insert(InsertParams(key=key, value=rows[:length].clone()))))
            self.note_match("match", cache, list(range(6)))
            self.note("sizes", observe.free_rows(allocator))
