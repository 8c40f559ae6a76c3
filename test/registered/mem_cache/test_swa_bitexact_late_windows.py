"""A window that comes to a node which the tree has already follows it to the host and to L3."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest
from kit.tile_storage import TileStorage, computed, wait_for_storage

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

P = PAGE


@pytest.fixture(params=["python", "rust"])
def storage(request):
    with tempfile.TemporaryDirectory() as directory:
        yield TileStorage(Path(directory), request.param)


@pytest.mark.parametrize("shorter", [0, 1])
def test_a_window_that_comes_to_a_stored_node_reaches_host_and_storage(storage, shorter):
    """``shorter``: it comes inside the node, which splits."""
    tokens, end = tokens_from(1, 4), (3 - shorter) * P
    with server_context(**storage.arguments) as args:
        with storage.server(args) as cache:
            computed(cache, tokens, 3 * P, seed=1)
            assert storage.holds(pages=3, tiles=0)
            late = computed(cache, tokens[: end + 1], end + 1, end, seed=2)
            cache.check()
            assert storage.holds(pages=3, tiles=1)
            cache.evict_device()
            assert cache.match(tokens).host_hit_length == end
            assert cache.holds(cache.load_back(tokens), late.captured[end])
            cache.check()
        with storage.server(args) as cache:
            assert cache.prefetch(tokens).host_hit_length == end
            assert cache.holds(cache.load_back(tokens), late.captured[end])
            cache.check()


def pending(storage, cache, tokens):
    """A window that comes while its node's first backup is under way; not finished."""
    first = TileRequest(cache, tokens, seed=1).admit().extend(2 * P).checkpoint()
    late = TileRequest(cache, tokens, seed=2).admit().extend(2 * P, 2 * P).checkpoint()
    assert len(cache.tree.ongoing_write_through) == 1
    assert storage.holds(pages=0, tiles=0)
    return first, late


def test_a_window_that_comes_during_its_nodes_backup_reaches_the_host(storage):
    tokens = tokens_from(1, 3)
    with server_context(**storage.arguments) as args, storage.server(args) as cache:
        first, late = pending(storage, cache, tokens)
        cache.check(first, late)
        first.finish()
        late.finish()
        cache.check()
        assert storage.holds(pages=2, tiles=1)
        cache.evict_device()
        assert cache.match(tokens).host_hit_length == 2 * P
        assert cache.holds(cache.load_back(tokens), late.captured[2 * P])
        cache.check()


def test_a_window_that_comes_during_its_nodes_backup_reaches_storage(storage):
    tokens = tokens_from(1, 3)
    with server_context(**storage.arguments) as args:
        with storage.server(args) as cache:
            first, late = pending(storage, cache, tokens)
            # One look of the scheduler; then storage has all the time it wants.
            cache.tree.check_hicache_events()
            wait_for_storage(cache)
            first.finish()
            late.finish()
            cache.check()
            assert storage.holds(pages=2, tiles=1)
        with storage.server(args) as cache:
            assert cache.prefetch(tokens).host_hit_length == 2 * P
            assert cache.holds(cache.load_back(tokens), late.captured[2 * P])
            cache.check()


def test_several_windows_that_come_during_a_backup(storage):
    """The node splits at each of them; its one backup covers all parts."""
    tokens = tokens_from(1, 4)
    with server_context(**storage.arguments) as args, storage.server(args) as cache:
        first = TileRequest(cache, tokens, seed=1).admit().extend(3 * P).checkpoint()
        late = TileRequest(cache, tokens, seed=2).admit().extend(3 * P, P, 2 * P, 3 * P).checkpoint()
        cache.check(first, late)
        assert cache.free() == (5, 13)
        first.finish()
        late.finish()
        cache.check()
        assert storage.holds(pages=3, tiles=3)
        cache.evict_device()
        for n in (1, 2, 3):
            assert cache.load_back(tokens[: n * P]).device_prefix_len == n * P
            assert cache.holds(cache.match(tokens[: n * P]), late.captured[n * P])
        cache.check()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
