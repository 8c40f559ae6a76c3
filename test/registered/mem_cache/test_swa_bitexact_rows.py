"""Rows that a running request owns, beside tiles that the tree owns; and the re-prefill cap."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.common import free_swa_out_of_window_slots
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import TileCache, server_context, tokens_from
from kit.tile_pools import PAGE, WINDOW

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

SLOT = 1


@pytest.fixture
def cache():
    with server_context() as args, TileCache(args) as cache:
        yield cache


class Running:
    """A request that reuses two published pages, whose second carries a tile, and owns more."""

    def __init__(self, cache, own_pages):
        tokens = tokens_from(1, 2)
        self.tile_id = cache.publish(tokens, 2 * PAGE, lambda _: None)
        match = cache.match(tokens)
        self.shared = cache.tree.path_device_indices(match.last_device_node)[: 2 * PAGE]
        self.own = cache.allocator.full_attn_allocator.alloc(own_pages * PAGE)
        row = torch.cat((self.shared, self.own)).to(torch.int32)
        cache.req_to_token_pool.req_to_token[SLOT, : len(row)] = row
        self.kv = ReqKvInfo(
            req_pool_idx=SLOT,
            cache_protected_len=2 * PAGE,
            kv_committed_len=len(row),
            kv_allocated_len=len(row),
        )

    def slide(self, cache, length):
        """What stock frees of the row when the sequence is ``length`` long."""
        free_swa_out_of_window_slots(
            SimpleNamespace(kv=self.kv),
            length,
            sliding_window_size=WINDOW,
            page_size=PAGE,
            req_to_token_pool=cache.req_to_token_pool,
            token_to_kv_pool_allocator=cache.allocator,
        )


def test_the_window_slides_past_own_rows_and_takes_no_tile(cache):
    running = Running(cache, own_pages=6)
    before = cache.allocator.tiles_available
    running.slide(cache, 7 * PAGE)
    assert running.kv.get_evicted_seqlen(ComponentType.SWA) == 6 * PAGE
    assert cache.allocator.tiles_available == before
    # The tree's tile is the tree's: it is still mapped, below the protected length.
    mapped = cache.allocator.full_to_swa_index_mapping[running.shared[PAGE:]]
    assert (mapped // PAGE == running.tile_id).all()
    cache.allocator.check_tiles([])


def test_a_release_of_the_row_gives_back_the_rows_and_no_tile(cache):
    running = Running(cache, own_pages=6)
    running.slide(cache, 7 * PAGE)
    rows, tiles = cache.allocator.full_available_size(), cache.allocator.tiles_available
    cache.tree.free_kv_row(running.kv, [(2 * PAGE, 8 * PAGE)])
    assert cache.allocator.full_available_size() == rows + 6 * PAGE
    assert cache.allocator.tiles_available == tiles
    cache.allocator.check_tiles([])


def test_an_evicted_carrier_gives_its_tile_back(cache):
    running = Running(cache, own_pages=1)
    before = cache.allocator.tiles_available
    # Its backup is under way, and holds it.
    assert cache.allocator.tiles_evictable(cache.tree) == 0
    cache.settle()
    assert cache.allocator.tiles_evictable(cache.tree) == 1
    cache.evict_device()
    assert cache.allocator.tiles_available == before + 1
    assert cache.allocator.tiles_evictable(cache.tree) == 0
    assert not cache.allocator.full_to_swa_index_mapping[running.shared].any()
    cache.allocator.check_tiles([])


def test_a_second_publish_of_the_same_tokens_returns_its_rows_and_its_tile(cache):
    tokens = tokens_from(1, 2)
    first = cache.publish(tokens, 2 * PAGE, lambda _: None)
    rows, tiles = cache.allocator.full_available_size(), cache.allocator.tiles_available
    second = cache.publish(tokens, 2 * PAGE, lambda _: None)
    assert first != second
    assert (cache.allocator.full_available_size(), cache.allocator.tiles_available) == (rows, tiles)
    cache.allocator.check_tiles([])


def test_the_prefill_budget_counts_request_slots(cache):
    budget = cache.allocator.create_prefill_budget(cache.tree)
    assert budget.remaining_swa == 4 * PAGE
    Running(cache, own_pages=1)
    cache.allocator.alloc_tiles(3)
    assert budget.remaining_swa == 4 * PAGE


@pytest.mark.parametrize(("gates", "tail"), [(True, 0), (False, WINDOW)])
def test_without_hicache_the_re_prefill_cap_follows_the_gate(cache, gates, tail):
    """Stock asks for a host pool; a gate that wants windows makes the device enough."""
    params = dataclasses.replace(cache.params, swa_gates_prefix_match=gates)
    assert UnifiedRadixCache(params=params).swa_reprefill_tail_tokens() == tail


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
