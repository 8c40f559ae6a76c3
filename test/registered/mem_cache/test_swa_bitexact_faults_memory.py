"""Memory that runs out, on the device and on the host: what is right then, and nothing is half used.

A state pool cannot refuse what its window has: it has no slots of its own, but the window's.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.swa_bitexact.evict import evict_tiles
from sglang.srt.mem_cache.swa_bitexact.planner import TileCounters
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import TileCache, server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest, prefill
from kit.tile_storage import computed, emptied, host_free, host_size

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

P = PAGE
TILES, PAGES = 8, 16


def sequence(i, pages):
    return tokens_from(1 + 10_000 * i, pages)


def used_on_host(cache):
    """(pages, tiles) that the host holds."""
    cache.tree.check_hicache_events()
    return tuple(size - free for size, free in zip(host_size(cache), host_free(cache), strict=True))


# The device --------------------------------------------------------------------


def test_a_full_capture_pool_drops_new_tiles_and_stays_exact(core):
    """Two tiles, held by two running requests: a third request runs without, and gets them afterwards."""
    with server_context() as args, TileCache(args, core=core, tiles=2, publishes=True) as cache:
        planner = cache.allocator.capture_planner
        planner.stride = 0
        # A prompt of 2 pages and a bit has one last boundary, so one tile.
        a, b, c = (TileRequest(cache, sequence(i, 3)[: 2 * P + 9], seed=i).admit() for i in range(3))
        for request in (a, b):
            planner.finish(prefill(cache, (request, 2 * P + 9)))
            request.checkpoint()
        assert prefill(cache, (c, 2 * P + 9)) is None
        assert planner.counters == TileCounters(captured=2, dropped=1, returned=0)
        cache.check(a, b, c)
        c.finish()
        cache.check(a, b)
        assert cache.match(sequence(2, 3)).device_prefix_len == 0
        for i, request in ((0, a), (1, b)):
            assert cache.holds(cache.match(sequence(i, 3)), request.captured[2 * P])
            request.finish()
        cache.check()
        # Its rows are there; the same prompt finds where to capture, and takes the oldest tile.
        again = TileRequest(cache, sequence(2, 3), seed=7).admit()
        assert (again.req.prefix_len, again.req.swa_branching_seqlen) == (0, 2 * P)
        plan = prefill(cache, (again, 3 * P))
        assert 3 * P in [capture.boundary for capture in plan.captures]
        planner.finish(plan)
        again.finish()
        cache.check()
        assert cache.holds(cache.match(sequence(2, 3)), again.captured[3 * P])
        assert emptied(cache) == ((2, PAGES), host_size(cache))


@contextmanager
def without_rows(cache):
    """Two FULL pages are free."""
    held = cache.allocator.full_attn_allocator.alloc((cache.free()[1] - 2) * P)
    yield
    cache.allocator.full_attn_allocator.free(held)


@contextmanager
def without_tiles(cache):
    held = cache.allocator.alloc_tiles(cache.free()[0])
    yield
    cache.allocator.free_tiles(held)


@contextmanager
def without_quota(cache):
    """The scheduler's admission budget is two pages."""
    load = cache.tree.load_back
    with mock.patch.object(cache.tree, "load_back", lambda node, quota, req: load(node, 2 * P, req)):
        yield


@pytest.mark.parametrize("device_has", [0, 1])
@pytest.mark.parametrize("short", [without_rows, without_tiles, without_quota])
def test_a_load_that_is_rejected_leaves_the_request_to_compute(cache, short, device_has):
    """Three pages more than the device has are asked for, or their tile. It is all or nothing."""
    tokens = tokens_from(1, 5)
    a = computed(cache, tokens, 4 * P, P, 4 * P, seed=1)
    cache.evict_device()
    keepers = []
    if device_has:
        keepers.append(TileRequest(cache, tokens[: P + 1], seed=3).admit().extend(P + 1))
        keepers[0].take_restores()
        cache.settle()
    with short(cache):
        before = cache.free()
        b = TileRequest(cache, tokens, seed=2).admit()
        assert (b.req.prefix_len, cache.free()) == (device_has * P, before)
        assert cache.tree.ongoing_load_back == {}
    b.extend(4 * P + 1, 4 * P)
    assert b.take_restores().boundaries == [device_has * P]
    b.checkpoint()
    cache.check(b, *keepers)
    match = cache.match(tokens)
    assert match.device_prefix_len == 4 * P and cache.holds(match, b.captured[4 * P])
    for request in (b, *keepers):
        request.finish()
    cache.check()
    # What the host has is whole: the first copy of the same tokens.
    cache.evict_device()
    assert cache.holds(cache.load_back(tokens), a.captured[4 * P])
    cache.check()
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


def test_a_load_below_the_threshold_brings_its_window(cache):
    """SGLang does not load few rows; with a window to load the rows come along, or it would be of no use."""
    tokens = tokens_from(1, 2)
    a = computed(cache, tokens, P, P, seed=1)
    cache.evict_device()
    b = TileRequest(cache, tokens, seed=2).match()
    cache.tree.load_back_threshold = 1 << 20
    assert cache.tree.load_back(b.req.best_match_node)
    cache.tree.ready_to_load_host_cache()
    cache.settle()
    match = cache.match(tokens)
    assert match.device_prefix_len == P and cache.holds(match, a.captured[P])
    cache.check()


def test_a_window_that_finds_no_tile_is_computed_again(cache):
    """Its rows are on the device, with a longer carrier; only the window would have to be loaded."""
    tokens = tokens_from(1, 4)
    a = computed(cache, tokens, 3 * P, P, 3 * P, seed=1)
    evict_tiles(cache.tree, 1)
    keeper = TileRequest(cache, tokens, seed=2).admit()
    with without_tiles(cache):
        b = TileRequest(cache, tokens[: P + 1], seed=3).admit()
        assert (b.req.prefix_len, b.req.swa_host_hit_length) == (0, P)
        b.extend(P + 1)
        assert b.take_restores().boundaries == [0]
        b.checkpoint()
        b.finish()
    cache.tree.unlock(keeper.req.lock)
    cache.check()
    assert cache.holds(cache.match(tokens), a.captured[3 * P])
    assert cache.holds(cache.load_back(tokens[:P]), a.captured[P])
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


# The host ----------------------------------------------------------------------


@contextmanager
def host_room(cache, pages, tiles):
    """So many pages and tiles are free on the host."""
    group = cache.tree.host_pool_group
    free = host_free(cache)
    held = [
        (name, group.alloc((have - left) * P, pool=name))
        for name, have, left in ((None, free[0], pages), (PoolName.SWA, free[1], tiles))
    ]
    yield
    for name, slots in held:
        group.free(slots, pool=name)


def test_a_host_of_one_page_keeps_what_it_has_room_for(cache):
    """One page with its window is backed up. Two pages are not, not even one of them, and are gone at eviction."""
    with host_room(cache, 1, 1):
        one = computed(cache, sequence(0, 2), P, P, seed=1)
        assert host_free(cache) == (0, 0)
        computed(cache, sequence(1, 3), 2 * P, seed=2)
        computed(cache, sequence(2, 3), 2 * P, 2 * P, seed=3)
        cache.check()
        assert (host_free(cache), cache.tree.ongoing_write_through) == ((0, 0), {})
        cache.evict_device()
        assert cache.free() == (TILES, PAGES)
        found = [cache.match(sequence(i, 3)).host_hit_length for i in range(3)]
        assert found == [P, 0, 0]
        assert cache.holds(cache.load_back(sequence(0, 2)), one.captured[P])
        # Off the device, it makes room for the next.
        cache.evict_device()
        other = computed(cache, sequence(4, 2), P, P, seed=5)
        cache.check()
        assert host_free(cache) == (0, 0)
        cache.evict_device()
        assert [cache.match(sequence(i, 2)).host_hit_length for i in (0, 4)] == [0, P]
        assert cache.holds(cache.load_back(sequence(4, 2)), other.captured[P])
        cache.check()
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


@pytest.mark.parametrize("pool", [PoolName.KV, PoolName.SWA])
def test_a_host_pool_that_refuses_gives_everything_back(cache, pool):
    """Rows find room and the window does not, or the reverse: nothing is kept, and the next insert tries again."""
    tokens = tokens_from(1, 3)
    holder = TileRequest(cache, tokens, seed=9).admit()
    with mock.patch.object(cache.tree.host_pool_group.get_pool(pool), "alloc", return_value=None) as asked:
        computed(cache, tokens, 2 * P, P, 2 * P, seed=1)
    assert asked.called
    cache.check()
    assert (used_on_host(cache), cache.tree.ongoing_write_through) == ((0, 0), {})
    # Nobody takes it for backed up: with the device's copy it is gone, and nothing of it is stored.
    node = cache.match(tokens).last_device_node
    assert not cache.tree.is_backuped(node)
    assert cache.match(tokens).host_hit_length == 0
    again = holder.extend(2 * P, P, 2 * P).finish()
    cache.check()
    assert used_on_host(cache) == (2, 2)
    cache.evict_device()
    for n in (1, 2):
        assert cache.load_back(tokens[: n * P]).device_prefix_len == n * P
    assert again.captured.keys() == {P, 2 * P}
    cache.check()
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


@pytest.mark.parametrize("pool", [PoolName.KV, PoolName.SWA])
def test_what_no_host_pool_took_is_gone_with_the_device(cache, pool):
    tokens = tokens_from(1, 3)
    with mock.patch.object(cache.tree.host_pool_group.get_pool(pool), "alloc", return_value=None):
        computed(cache, tokens, 2 * P, 2 * P, seed=1)
        cache.evict_device()
    match = cache.match(tokens)
    # The page before the window's is a node of its own, which needs no tile.
    rows = P if pool == PoolName.SWA else 0
    assert (match.device_prefix_len, match.host_hit_length, match.full_kv_hit_length) == (0, 0, rows)
    cache.check()
    assert (cache.free(), used_on_host(cache)) == ((TILES, PAGES), (rows // P, 0))
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


def test_states_are_stored_at_the_windows_slots(cache):
    """Two pools are asked for room, whatever is backed up; the others are written at these slots."""
    group = cache.tree.host_pool_group
    with ExitStack() as stack:
        spies = {
            entry.name: stack.enter_context(mock.patch.object(entry.host_pool, "alloc", wraps=entry.host_pool.alloc))
            for entry in group.entries
        }
        computed(cache, tokens_from(1, 3), 2 * P, 2 * P, seed=1)
    assert {name for name, spy in spies.items() if spy.called} == {PoolName.KV, PoolName.SWA}
    states = {"deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state"}
    assert {s.pool_name: s.indices_from_pool for s in cache.tree.sidecar_pool_specs if s.pool_name in states} == (
        dict.fromkeys(states, PoolName.SWA)
    )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
