"""Which windows leave the device when tiles run short, and that nothing else follows from a shortage."""

from __future__ import annotations

import sys

import pytest
import torch
from sglang.srt.mem_cache.swa_bitexact.evict import evict_tiles
from sglang.srt.mem_cache.swa_bitexact.planner import TileCounters
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import TileCache, server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest, prefill

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

P = PAGE
PAGES = 16


@pytest.fixture(params=["host pools", "device only"])
def cache_of(request, core):
    """Makes a cache with a number of tiles; on the host there is room for each of them."""
    with server_context(hicache_swa_host_tile_fraction=0.9) as args:
        made = []

        def make(tiles):
            cache = TileCache(args, core=core, tiles=tiles, publishes=True, hicache=request.param == "host pools")
            made.append(cache.__enter__())
            return cache

        yield make
        for cache in made:
            cache.__exit__()


def sequence(i, pages=3):
    return tokens_from(1 + 10_000 * i, pages)


def publish(cache, i, *captures, pages=3):
    """A finished request of sequence ``i``."""
    request = TileRequest(cache, sequence(i, pages), seed=i).admit()
    request.extend(pages * P, *captures).finish()
    cache.settle()
    return request


def windows(cache):
    """The FULL pages that are mapped to a tile, as (page, tile); a look that touches no LRU."""
    slots = cache.allocator.full_to_swa_index_mapping[:-1:P] // P
    return {(int(page), int(slots[page])) for page in slots.nonzero().flatten()}


def pages_of(request, *boundaries):
    """The FULL pages before ``boundaries``; ask while the request holds its rows."""
    return [int(request.rows[b - 1]) // P for b in boundaries]


def test_superseded_carriers_go_in_lru_order_and_leaves_last(cache_of):
    cache = cache_of(8)
    carriers = {}
    for name, i in (("a", 0), ("b", 1), ("c", 2)):
        request = TileRequest(cache, sequence(i), seed=i).admit().extend(3 * P, P, 3 * P)
        request.checkpoint()
        inner, leaf = pages_of(request, P, 3 * P)
        carriers |= {inner: f"{name} inner", leaf: f"{name} leaf"}
        request.finish()
        cache.settle()
    # Used again: a's inner carrier is the most recent now.
    assert cache.match(sequence(0)[:P]).device_prefix_len == P

    def left():
        return {carriers[page] for page, _ in windows(cache)}

    gone = []
    for _ in range(6):
        before = left()
        evict_tiles(cache.tree, 1)
        cache.check()
        gone += sorted(before - left())
    # c used its leaf last, b before it; a's leaf is as old as its publish.
    assert gone == ["b inner", "c inner", "a inner", "a leaf", "b leaf", "c leaf"]
    assert cache.free()[0] == 8


def test_leaves_take_their_full_pages_along_and_inner_ones_do_not(cache_of):
    cache = cache_of(8)
    publish(cache, 0, P, 2 * P, 3 * P)
    publish(cache, 1, 3 * P)
    assert cache.free() == (4, 10)
    evict_tiles(cache.tree, 3)
    cache.check()
    # The two inner ones, and the older leaf with its page.
    assert cache.free() == (7, 11)
    assert cache.match(sequence(0)).device_prefix_len == 0
    assert cache.match(sequence(1)).device_prefix_len == 3 * P


def test_the_host_loses_superseded_carriers_first(core):
    """They left the device first, so they are the oldest that the host alone has."""
    with (
        server_context(hicache_swa_host_tile_fraction=0.9) as args,
        TileCache(args, core=core, tiles=8, publishes=True, hicache=True) as cache,
    ):
        for i in range(2):
            publish(cache, i, P, 3 * P)
        # Tiles run short, then rows; the older conversation is not the one that loses its end.
        evict_tiles(cache.tree, 6)
        cache.evict_device()
        assert cache.tree.evict_host(2 * P, ComponentType.SWA) == 2 * P
        cache.check()
        for i in range(2):
            inner = cache.match(sequence(i)[: 2 * P])
            assert (inner.device_prefix_len, inner.host_hit_length) == (0, 0)
            assert cache.load_back(sequence(i)).device_prefix_len == 3 * P
        cache.check()


def test_locked_carriers_stay(cache_of):
    cache = cache_of(4)
    a = TileRequest(cache, sequence(0), seed=1).admit().extend(3 * P, P, 3 * P).checkpoint()
    publish(cache, 1, P, 3 * P)
    b = TileRequest(cache, sequence(1)[:P] + sequence(7, 1), seed=2).admit()
    assert b.req.prefix_len == P
    evict_tiles(cache.tree, 4)
    # a holds its last carrier, b the inner one of sequence 1.
    cache.check(a, b)
    assert cache.free()[0] == 2
    assert cache.holds(cache.match(sequence(0)), a.captured[3 * P])
    assert cache.match(sequence(1)).device_prefix_len == P
    cache.tree.unlock(b.req.lock)
    b.req.lock = None
    evict_tiles(cache.tree, 3)
    cache.check(a)
    assert cache.free()[0] == 3
    evict_tiles(cache.tree, 4)
    assert cache.free()[0] == 3
    a.finish()
    evict_tiles(cache.tree, 4)
    cache.check()
    assert cache.free()[0] == 4


def test_a_sixteenth_of_the_pool_goes_at_once_while_there_are_inner_ones(cache_of):
    cache = cache_of(48)
    held = cache.allocator.alloc_tiles(40)
    for i in range(4):
        publish(cache, i, P, 3 * P)
    assert cache.free()[0] == 0
    evict_tiles(cache.tree, 1)
    assert cache.free()[0] == 3
    evict_tiles(cache.tree, 1)
    # The fourth inner one; leaves do not go to fill the share.
    assert cache.free()[0] == 4
    evict_tiles(cache.tree, 1)
    assert cache.free()[0] == 5
    cache.allocator.free_tiles(held)
    cache.check()


def test_nothing_to_evict_changes_nothing(cache_of):
    cache = cache_of(4)
    evict_tiles(cache.tree, 2)
    cache.check()
    assert cache.free() == (4, PAGES)


def test_a_host_without_room_does_not_keep_a_leaf(core):
    """Its backup had no room on the host: it is dropped, rows and window, and nothing is half there."""
    with (
        server_context(hicache_swa_host_tile_fraction=0.9) as args,
        TileCache(args, core=core, tiles=2, publishes=True) as cache,
    ):
        cache.controller.write = lambda *_, **__: None
        publish(cache, 0, 3 * P)
        evict_tiles(cache.tree, 1)
        cache.check()
        assert cache.free()[0] == 2
        match = cache.match(sequence(0))
        assert (match.device_prefix_len, match.host_hit_length) == (0, 0)


# The planner -------------------------------------------------------------------


def test_a_full_pool_goes_on_capturing(cache_of):
    """Five prompts of three pages through eight tiles: each keeps its last boundary, none is dropped."""
    cache = cache_of(8)
    planner, requests = cache.allocator.capture_planner, []
    planner.stride = 1
    for i in range(5):
        request = TileRequest(cache, sequence(i), seed=i).admit()
        plan = prefill(cache, (request, 3 * P))
        planner.finish(plan)
        assert sorted(request.req.swa_tiles.tiles) == [P, 2 * P, 3 * P]
        request.finish()
        cache.check()
        requests.append(request)
    assert planner.counters == TileCounters(captured=15, dropped=0, returned=0)
    assert cache.free()[0] == 0
    found = [cache.match(sequence(i)).device_prefix_len for i in range(5)]
    assert found == [3 * P] * 5
    for i, request in enumerate(requests):
        assert cache.holds(cache.match(sequence(i)), request.captured[3 * P])


def test_without_anything_to_evict_tiles_are_dropped_and_counted(cache_of):
    cache = cache_of(3)
    planner = cache.allocator.capture_planner
    planner.stride = 1
    a, b = (TileRequest(cache, sequence(i), seed=i).admit() for i in (0, 1))
    plan = prefill(cache, (a, 3 * P), (b, 2 * P + 5))
    # Each request's last boundary first, then the deepest others.
    assert [(c.owner is a.req.swa_tiles, c.boundary) for c in plan.captures] == [
        (True, 3 * P),
        (False, 2 * P),
        (True, 2 * P),
    ]
    assert planner.counters == TileCounters(captured=3, dropped=2, returned=0)
    planner.finish(plan)
    a.checkpoint()
    b.checkpoint()
    cache.check(a, b)
    # All three are carriers now; a's inner one is free to go, the other two are locked.
    c = TileRequest(cache, sequence(2), seed=3).admit()
    cache.settle()
    plan = prefill(cache, (c, 3 * P))
    assert [capture.boundary for capture in plan.captures] == [3 * P]
    assert planner.counters == TileCounters(captured=4, dropped=4, returned=0)
    planner.finish(plan)
    for request in (a, b, c):
        request.finish()
    cache.check()
    assert [cache.match(sequence(i)).device_prefix_len for i in range(3)] == [3 * P, 2 * P, 3 * P]


def test_a_shortage_without_a_tile_at_all_plans_nothing(cache_of):
    cache = cache_of(1)
    planner = cache.allocator.capture_planner
    planner.stride = 1
    a = TileRequest(cache, sequence(0), seed=0).admit()
    planner.finish(prefill(cache, (a, P)))
    a.checkpoint()
    b = TileRequest(cache, sequence(1), seed=1).admit()
    assert prefill(cache, (b, 3 * P)) is None
    assert planner.counters == TileCounters(captured=1, dropped=3, returned=0)
    b.checkpoint()
    cache.check(a, b)
    b.finish()
    a.finish()
    cache.check()
    assert cache.match(sequence(1)).device_prefix_len == 0
    assert cache.match(sequence(1)).full_kv_hit_length == 3 * P


def test_the_boundary_a_request_reuses_is_not_evicted_for_its_own_captures(cache_of):
    cache = cache_of(3)
    first = publish(cache, 0, P, 2 * P)
    longer = sequence(0, 5)
    b = TileRequest(cache, longer, seed=1).admit()
    assert b.req.prefix_len == 2 * P
    planner = cache.allocator.capture_planner
    planner.stride = 1
    plan = prefill(cache, (b, 5 * P))
    assert [capture.boundary for capture in plan.captures] == [5 * P, 4 * P]
    assert planner.counters == TileCounters(captured=2, dropped=1, returned=0)
    restores = b.take_restores()
    found = cache.tile(int(restores.tile_ids))
    assert all(torch.equal(found[name], rows) for name, rows in first.captured[2 * P].items())
    planner.finish(plan)
    b.finish()
    cache.check()
    assert cache.match(longer).device_prefix_len == 5 * P


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
