"""Storage that fails while it is written, and storage that several servers write: nothing wrong is reused."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest
from kit.tile_storage import COMPRESSED, TILE, TileStorage, computed, emptied, host_size

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

P = PAGE
TILES, PAGES = 8, 16
TOKENS = tokens_from(1, 6)


@pytest.fixture
def storage(core):
    with tempfile.TemporaryDirectory() as directory:
        storage = TileStorage(Path(directory) / "stored", core)
        with server_context(**storage.arguments) as storage.args:
            yield storage


def page_keys(storage, pages):
    """The keys of TOKENS' first pages; of a server that stores elsewhere."""
    with tempfile.TemporaryDirectory() as directory:
        other = TileStorage(Path(directory), storage.core)
        with server_context(**other.arguments) as args, other.server(args) as cache:
            boundaries = [n * P for n in range(1, pages + 1)]
            computed(cache, TOKENS, pages * P, *boundaries, seed=1)
            return [cache.tree.get_last_hash_value(cache.match(TOKENS[:end]).last_device_node) for end in boundaries]


def found(storage, expected, captured):
    """A new server finds ``expected`` tokens, with the tile of their end, and computes the others."""
    with storage.server(storage.args) as cache:
        assert cache.prefetch(TOKENS).host_hit_length == expected
        b = TileRequest(cache, TOKENS, seed=2).admit()
        assert b.req.prefix_len == expected
        b.extend(5 * P + 1, 5 * P)
        assert b.take_restores().boundaries == [expected]
        cache.settle()
        if expected:
            assert cache.holds(cache.match(TOKENS[:expected]), captured[expected])
        b.finish()
        cache.check()
        assert cache.holds(cache.match(TOKENS), b.captured[5 * P])
        assert emptied(cache) == ((TILES, PAGES), host_size(cache))


# Pages -------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [*COMPRESSED, *TILE])
@pytest.mark.parametrize("how", ["raises", "returns False"])
def test_a_hit_stops_at_a_page_that_was_not_written(storage, pool, how):
    """The second of three; each has a tile. A tile that is missing in the middle takes its own boundary only.

    What a write raises ends the backup of its node, whose rows come last: without them there is no page.
    """
    refused = page_keys(storage, 2)[1] + ("" if pool == "kv" else f".{pool}")
    write, asked = HiCacheFile.set, []

    def failing(self, key, *arguments):
        if key != refused:
            return write(self, key, *arguments)
        asked.append(key)
        if how == "raises":
            raise OSError("the disk is gone")
        return False

    with storage.server(storage.args) as cache, mock.patch.object(HiCacheFile, "set", failing):
        a = computed(cache, TOKENS, 3 * P, P, 2 * P, 3 * P, seed=1)
        cache.check()
        assert asked == [refused]
        # Device and host have it all.
        cache.evict_device()
        for end in (P, 2 * P, 3 * P):
            assert cache.holds(cache.load_back(TOKENS[:end]), a.captured[end])
        assert emptied(cache) == ((TILES, PAGES), host_size(cache))
    skips = pool in TILE and how == "returns False"
    found(storage, 3 * P if skips else P, a.captured)


@pytest.mark.parametrize("page", [2, 3, 4])
def test_a_hit_stops_at_a_batch_that_was_not_written(storage, page):
    """Pages 2 to 4 are one node, written one page a batch; page 5 is stored with its tile, and not reached."""
    refused, write = page_keys(storage, 4)[page - 1], HiCacheFile.set

    def failing(self, key, *arguments):
        return False if key == refused else write(self, key, *arguments)

    with (
        storage.server(storage.args) as cache,
        mock.patch.object(HiCacheFile, "set", failing),
        mock.patch.object(cache_controller, "STORAGE_BATCH_SIZE", 1),
    ):
        a = computed(cache, TOKENS, 5 * P, P, 5 * P, seed=1)
        cache.check()
    found(storage, P, a.captured)


# The disk ----------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing_leaves_device_and_host(storage, error):
    """A file gets its name when it is whole; that, or the last of its bytes, is what the disk refuses."""
    with storage.server(storage.args) as cache:
        with mock.patch.object(hicache_storage.os, "replace", side_effect=OSError(error, os.strerror(error))) as asked:
            a = computed(cache, TOKENS, 3 * P, P, 3 * P, seed=1)
            cache.check()
        # Every file of both nodes without a tile and both with one was tried, but of a node's pages one batch.
        assert asked.call_count >= 7
        assert list(storage.directory.iterdir()) == []
        assert cache.holds(cache.match(TOKENS), a.captured[3 * P])
        cache.evict_device()
        assert cache.holds(cache.load_back(TOKENS), a.captured[3 * P])
        # Room again: what comes now is stored.
        other = computed(cache, tokens_from(50_000, 3), 2 * P, 2 * P, seed=3)
        assert storage.holds(pages=2, tiles=1)
        assert emptied(cache) == ((TILES, PAGES), host_size(cache))
        assert cache.prefetch(tokens_from(50_000, 3)).host_hit_length == 2 * P
        assert cache.holds(cache.load_back(tokens_from(50_000, 3)), other.captured[2 * P])
    found(storage, 0, {})


def test_a_directory_that_is_gone_is_a_miss(storage):
    with storage.server(storage.args) as cache:
        computed(cache, TOKENS, 2 * P, 2 * P, seed=1)
        shutil.rmtree(storage.directory)
        assert emptied(cache) == ((TILES, PAGES), host_size(cache))
        assert cache.prefetch(TOKENS).host_hit_length == 0
        a = computed(cache, TOKENS, 2 * P, 2 * P, seed=2)
        cache.check()
        assert not storage.directory.exists()
        cache.evict_device()
        assert cache.holds(cache.load_back(TOKENS), a.captured[2 * P])
        assert emptied(cache) == ((TILES, PAGES), host_size(cache))


# Two servers -------------------------------------------------------------------


def test_two_servers_share_a_directory(storage):
    """Both are up; they compute the same two pages at once, and then each a path of its own."""
    own = {name: TOKENS[: 2 * P] + tokens_from(start, 3) for name, start in (("a", 20_000), ("b", 30_000))}
    with storage.server(storage.args) as first, storage.server(storage.args) as second:
        caches = {"a": first, "b": second}
        # Equal tokens have equal bytes, whoever computes them: the same seed.
        shared = {name: TileRequest(cache, TOKENS, seed=1).admit() for name, cache in caches.items()}
        for request in shared.values():
            request.extend(2 * P, P, 2 * P).finish()
        for cache in caches.values():
            cache.settle()
        assert storage.holds(pages=2, tiles=2)
        longer = {}
        for seed, (name, cache) in enumerate(caches.items(), 2):
            request = TileRequest(cache, own[name], seed=seed).admit()
            assert request.req.prefix_len == 2 * P
            longer[name] = request.extend(4 * P, 4 * P).finish()
            cache.check()
        assert storage.holds(pages=6, tiles=4)
        # Each finds what the other stored while it was up.
        for cache in caches.values():
            assert emptied(cache) == ((TILES, PAGES), host_size(cache))
        for name, cache in caches.items():
            (other,) = {"a", "b"} - {name}
            assert cache.prefetch(own[other]).host_hit_length == 4 * P
            assert cache.holds(cache.load_back(own[other]), longer[other].captured[4 * P])
            cache.check()
            assert emptied(cache) == ((TILES, PAGES), host_size(cache))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
