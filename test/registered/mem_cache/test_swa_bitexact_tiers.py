"""Windows on the host and in L3: whole reuse points come and go, and nothing is half used."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from sglang.srt.mem_cache.swa_bitexact.evict import evict_tiles
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest
from kit.tile_storage import TILE, TileStorage, computed

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

P = PAGE
TILES, PAGES = 8, 16


@pytest.fixture
def storage(core):
    with tempfile.TemporaryDirectory() as directory:
        yield TileStorage(Path(directory), core)


# The host ----------------------------------------------------------------------


def test_a_load_brings_tile_and_rows_together(cache):
    tokens = tokens_from(1, 4)
    a = computed(cache, tokens, 3 * P, P, 3 * P, seed=1)
    cache.evict_device()
    cache.check()
    assert cache.free() == (TILES, PAGES)
    b = TileRequest(cache, tokens, seed=2).match()
    assert (b.req.prefix_len, b.req.host_hit_length) == (0, 3 * P)
    b.admit()
    assert (b.req.prefix_len, cache.free()) == (3 * P, (7, 13))
    b.extend(3 * P + 1)
    assert b.take_restores().layer_wise
    cache.settle()
    cache.check(b)
    assert cache.holds(cache.match(tokens), a.captured[3 * P])
    b.finish()
    cache.check()
    # Nothing but the last window was loaded: the inner one is on the host.
    match = cache.match(tokens[:P])
    assert (match.device_prefix_len, match.swa_host_hit_length, cache.free()) == (0, P, (7, 13))


@pytest.mark.parametrize("device_has", [0, 1])
def test_a_load_without_a_tile_falls_back_to_what_the_device_has(cache, device_has):
    """All tiles are held by running requests. Nothing is loaded, nothing is mapped, nothing leaks."""
    tokens = tokens_from(1, 4)
    a = computed(cache, tokens, 3 * P, P, 3 * P, seed=1)
    cache.evict_device()
    keeper = None
    if device_has:
        # A request of the first page loads it, and keeps it.
        keeper = TileRequest(cache, tokens[: P + 1], seed=3).admit().extend(P + 1)
        keeper.take_restores()
        cache.settle()
    held = cache.allocator.alloc_tiles(cache.free()[0])
    before = cache.free()
    b = TileRequest(cache, tokens, seed=2).admit()
    assert b.req.prefix_len == device_has * P
    assert cache.free() == before
    b.extend(3 * P + 1)
    restores = b.take_restores()
    assert restores.boundaries == [device_has * P] and not restores.layer_wise
    assert cache.tree.restore_queue.receipts.counters.nominal_tokens == 3 * P + device_has * P
    b.abort()
    if keeper is not None:
        keeper.abort()
    cache.allocator.free_tiles(held)
    cache.check()
    # With tiles again, what the host has is whole.
    assert cache.load_back(tokens).device_prefix_len == 3 * P
    assert cache.holds(cache.match(tokens), a.captured[3 * P])
    cache.check()


def test_a_window_on_the_host_whose_rows_are_on_the_device(cache):
    tokens = tokens_from(1, 4)
    a = computed(cache, tokens, 3 * P, P, 3 * P, seed=1)
    evict_tiles(cache.tree, 1)
    cache.poison_free_tiles()
    match = cache.match(tokens[: P + 1])
    assert (match.device_prefix_len, match.full_kv_hit_length, match.swa_host_hit_length) == (0, P, P)
    before = cache.free()
    b = TileRequest(cache, tokens[: P + 1], seed=2).admit()
    # The tile alone is loaded: the rows are there.
    assert (b.req.prefix_len, cache.free()) == (P, (before[0] - 1, before[1]))
    b.extend(P + 1).take_restores()
    cache.settle()
    cache.check(b)
    assert cache.holds(cache.match(tokens[:P]), a.captured[P])
    assert cache.holds(cache.match(tokens), a.captured[3 * P])
    b.abort()
    cache.check()


def test_a_window_that_is_nowhere_is_captured_again(cache):
    tokens = tokens_from(1, 4)
    computed(cache, tokens, 3 * P, P, 3 * P, seed=1)
    evict_tiles(cache.tree, 1)
    assert cache.tree.evict_host(P, ComponentType.SWA) == P
    cache.check()
    assert [cache.match(tokens[:n]).device_prefix_len for n in (P, 3 * P)] == [0, 3 * P]
    b = TileRequest(cache, tokens[:P] + tokens_from(5000, 1), seed=2).admit()
    assert (b.req.prefix_len, b.req.host_hit_length, b.req.swa_branching_seqlen) == (0, 0, P)
    b.extend(P + 1, P).finish()
    cache.check()
    assert cache.holds(cache.match(tokens[:P]), b.captured[P])
    # On the host, too.
    cache.evict_device()
    assert cache.load_back(tokens[:P]).device_prefix_len == P
    assert cache.holds(cache.match(tokens[:P]), b.captured[P])
    cache.check()


def test_the_host_keeps_its_copy_of_a_window_that_is_on_the_device(cache):
    """Otherwise evicting it from the device would lose it: an unlocked carrier is on the host."""
    tokens = tokens_from(1, 3)
    a = computed(cache, tokens, 2 * P, P, 2 * P, seed=1)
    assert cache.tree.evict_host(2 * P, ComponentType.SWA) == 0
    cache.evict_device()
    for n in (1, 2):
        assert cache.load_back(tokens[: n * P]).device_prefix_len == n * P
        assert cache.holds(cache.match(tokens[: n * P]), a.captured[n * P])
    cache.check()


def test_a_window_without_room_on_the_host_is_backed_up_by_the_next_insert(cache):
    tokens = tokens_from(1, 3)
    a, b = (TileRequest(cache, tokens, seed=seed).admit() for seed in (1, 2))
    with mock.patch.object(cache.controller, "write", return_value=None):
        a.extend(2 * P, 2 * P).finish()
    cache.check(b)
    assert cache.tree.ongoing_write_through == {}
    b.extend(2 * P, 2 * P).finish()
    cache.check()
    assert cache.free() == (7, 14)
    cache.evict_device()
    assert cache.load_back(tokens).device_prefix_len == 2 * P
    assert cache.holds(cache.match(tokens), a.captured[2 * P])
    cache.check()


def test_evicted_rows_are_computed_again_with_their_window(cache):
    """Rows and window are on the host, and the request could not load them: its own take their place."""
    tokens = tokens_from(1, 3)
    a = computed(cache, tokens, 2 * P, 2 * P, seed=1)
    cache.evict_device()
    b = TileRequest(cache, tokens, seed=2).admit(loads=False).extend(2 * P + 1, 2 * P)
    assert cache.free() == (7, 13)
    b.checkpoint()
    cache.check(b)
    match = cache.match(tokens)
    assert (match.device_prefix_len, match.host_hit_length) == (2 * P, 0)
    assert cache.holds(match, b.captured[2 * P])
    assert cache.tree.path_device_indices(match.last_device_node).tolist() == b.rows[: 2 * P].tolist()
    b.finish()
    cache.check()
    assert cache.free() == (7, 14)
    # The host still has the first copy, of the same tokens.
    cache.evict_device()
    assert cache.holds(cache.load_back(tokens), a.captured[2 * P])
    cache.check()


def test_evicted_rows_are_computed_again_without_a_window(cache):
    tokens = tokens_from(1, 3)
    computed(cache, tokens, 2 * P, 2 * P, seed=1)
    cache.evict_device()
    b = TileRequest(cache, tokens, seed=2).admit(loads=False).extend(2 * P + 1).finish()
    cache.check()
    assert b.captured == {}
    match = cache.match(tokens)
    assert (match.device_prefix_len, match.full_kv_hit_length, match.swa_host_hit_length) == (0, 2 * P, P)
    assert cache.free() == (TILES, 14)


# Storage -----------------------------------------------------------------------


@pytest.mark.parametrize("missing", [None, *TILE])
def test_a_prefetch_takes_whole_reuse_points_only(storage, missing):
    """Tiles at 1, 2 and 4 pages; of the last one a file is missing. Absent state means absent window."""
    tokens = tokens_from(1, 5)
    with server_context(**storage.arguments) as args:
        with storage.server(args) as cache:
            a = computed(cache, tokens, 4 * P, P, 2 * P, 4 * P, seed=1)
            cache.check()
            assert storage.holds(pages=4, tiles=3)
            if missing is not None:
                storage.remove(cache, missing, tokens[: 4 * P])
        with storage.server(args) as cache:
            expected = 4 * P if missing is None else 2 * P
            assert cache.prefetch(tokens).host_hit_length == expected
            b = TileRequest(cache, tokens, seed=2).admit()
            assert (b.req.prefix_len, cache.free()) == (expected, (7, PAGES - expected // P))
            b.extend(4 * P + 1).take_restores()
            cache.settle()
            cache.check(b)
            assert cache.holds(cache.match(tokens), a.captured[expected])
            # What was not reused is captured and stored again.
            if missing is not None:
                b.capture(4 * P)
            b.finish()
            cache.check()
            assert storage.holds(pages=4, tiles=3)


@pytest.mark.parametrize("missing", TILE)
def test_without_any_whole_reuse_point_nothing_is_taken(storage, missing):
    tokens = tokens_from(1, 3)
    with server_context(**storage.arguments) as args:
        with storage.server(args) as cache:
            computed(cache, tokens, 2 * P, 2 * P, seed=1)
            assert storage.holds(pages=2, tiles=1)
            storage.remove(cache, missing, tokens[: 2 * P])
        with storage.server(args) as cache:
            match = cache.prefetch(tokens)
            assert (match.device_prefix_len, match.host_hit_length) == (0, 0)
            b = TileRequest(cache, tokens, seed=2).admit().extend(2 * P + 1)
            restores = b.take_restores()
            assert (restores.boundaries, restores.layer_wise) == ([0], False)
            b.finish()
            cache.check()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
