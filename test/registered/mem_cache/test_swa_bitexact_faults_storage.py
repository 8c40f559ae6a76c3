"""Storage that fails while it is read: nothing wrong is reused, nothing hangs, nothing leaks."""

from __future__ import annotations

import errno
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.test.ci.ci_register import register_cpu_ci

from kit.existing_tests import missing_tests
from kit.tile_cache import server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest
from kit.tile_storage import (
    COMPRESSED,
    TILE,
    TileStorage,
    computed,
    emptied,
    events_until,
    host_free,
    host_size,
    start_prefetch,
)

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

P = PAGE
TILES, PAGES = 8, 16
TOKENS = tokens_from(1, 5)

# By fault, the tests.
KINDS = {
    "slow, and the request does not wait": ("test_an_aborted_prefetch_ends_with_its_read",),
    "a read fails, or finds nothing": (
        "test_a_failed_read_uses_nothing_of_this_prefetch",
        "test_of_two_equal_prefetches_one_fails",
    ),
    "a file is cut short, or empty": ("test_a_damaged_file_is_not_used",),
    "compressed rows of a page are gone": ("test_a_missing_page_ends_the_hit",),
    "window or state of a page is gone": (
        "test_swa_bitexact_tiers.py::test_a_prefetch_takes_whole_reuse_points_only",
        "test_swa_bitexact_tiers.py::test_without_any_whole_reuse_point_nothing_is_taken",
    ),
    "a writer was killed": ("test_unfinished_files_are_not_seen",),
}


def test_the_tests_of_the_table_are_there():
    assert missing_tests(KINDS, __file__) == []


@pytest.fixture
def storage(core):
    """Four pages of TOKENS are stored, with tiles at 1, 2 and 4 pages; ``captured`` are their bytes."""
    with tempfile.TemporaryDirectory() as directory:
        storage = TileStorage(Path(directory), core)
        with server_context(**storage.arguments) as storage.args:
            with storage.server(storage.args) as cache:
                storage.captured = computed(cache, TOKENS, 4 * P, P, 2 * P, 4 * P, seed=1).captured
                storage.files = {
                    (pool, n): storage.path(cache, pool, TOKENS[: n * P])
                    for n in (1, 2, 4)
                    for pool in (*COMPRESSED, *TILE)
                }
                assert storage.holds(pages=4, tiles=3)
            yield storage


def found_whole(storage, cache, expected):
    """A prefetch finds ``expected`` tokens, which load with their own tile; then nothing is held any more."""
    assert cache.prefetch(TOKENS).host_hit_length == expected
    if expected:
        assert cache.holds(cache.load_back(TOKENS), storage.captured[expected])
    cache.check()
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


def computes(cache, expected):
    """A request that finds ``expected`` tokens computes the others; a later one reuses what it captured. Returns it."""
    b = TileRequest(cache, TOKENS, seed=2).admit()
    assert b.req.prefix_len == expected
    b.extend(4 * P + 1, *([4 * P] if expected < 4 * P else []))
    assert b.take_restores().boundaries == [expected]
    b.finish()
    cache.check()
    if expected < 4 * P:
        assert cache.holds(cache.match(TOKENS), b.captured[4 * P])
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))
    return b


# Slow --------------------------------------------------------------------------


@pytest.mark.parametrize("reading", ["rows", "tiles"])
@pytest.mark.parametrize("ended_by", ["deadline", "abort"])
def test_an_aborted_prefetch_ends_with_its_read(storage, ended_by, reading):
    """The reader is held up in one kind of pool; host memory that it may still write is nobody else's.

    Once the rows are there SGLang does not give up a prefetch for its deadline.
    """
    reads, go, read = threading.Event(), threading.Event(), HiCacheFile.batch_get_v2

    def held_up(self, transfers, extra_info=None):
        if any(transfer.name == "swa" for transfer in transfers) == (reading == "tiles"):
            reads.set()
            assert go.wait(20)
        return read(self, transfers, extra_info)

    with storage.server(storage.args) as cache, mock.patch.object(HiCacheFile, "batch_get_v2", held_up):
        tree = cache.tree
        tree.prefetch_stop_policy = "timeout"
        tree.prefetch_timeout_base = tree.prefetch_timeout_per_page = 0.0
        handle = start_prefetch(cache, TOKENS, "ends")
        events_until(cache, reads.is_set)
        kept = ended_by == "deadline" and reading == "tiles"
        if reading == "tiles":
            # So that all have the news of the rows.
            events_until(cache, lambda: tree.ongoing_prefetch[handle].operation.completed_tokens == 4 * P)
        if ended_by == "abort":
            tree.release_aborted_request(handle)
        else:
            # The first look starts the clock.
            looks = [tree.check_prefetch_progress(handle) for _ in range(2)]
            assert looks == [False, not kept]
        tree.check_hicache_events()
        pages, tiles = host_size(cache)
        free = host_free(cache)
        assert free[1] == tiles - 1
        assert free[0] == (pages if ended_by == "abort" and reading == "tiles" else pages - 4)
        go.set()
        if kept:
            events_until(cache, lambda: tree.check_prefetch_progress(handle))
            assert cache.match(TOKENS).host_hit_length == 4 * P
        else:
            assert handle not in tree.ongoing_prefetch
            events_until(cache, lambda: host_free(cache) == (pages, tiles))
            assert cache.match(TOKENS).host_hit_length == 0
        tree.prefetch_stop_policy = "wait_complete"
        found_whole(storage, cache, 4 * P)


# Failing reads -----------------------------------------------------------------


@pytest.mark.parametrize("pool", [*COMPRESSED, *TILE])
@pytest.mark.parametrize("how", ["raises", "finds nothing"])
def test_a_failed_read_uses_nothing_of_this_prefetch(storage, pool, how):
    """Of the second page's rows, or of the last tile. The next prefetch is as if nothing had been.

    What raises is tried once more by itself, to know which page it is; "kv" has no bytes to compare.
    """
    name = storage.files[pool, 2 if pool in COMPRESSED else 4].name
    get, failed = HiCacheFile.get, []

    def failing(self, key, *arguments):
        if f"{self._get_suffixed_key(key)}.bin" == name:
            failed.append(key)
            if how == "raises":
                raise OSError(errno.EIO, "the disk is gone")
            return None
        return get(self, key, *arguments)

    with storage.server(storage.args) as cache:
        with mock.patch.object(HiCacheFile, "get", failing):
            assert cache.prefetch(TOKENS).host_hit_length == 0
            assert len(failed) == (2 if how == "raises" and pool != "kv" else 1)
        cache.check()
        assert emptied(cache) == ((TILES, PAGES), host_size(cache))
        computes(cache, 0)
        found_whole(storage, cache, 4 * P)


@pytest.mark.parametrize("pool", [pool for pool in (*COMPRESSED, *TILE) if pool != "kv"])
@pytest.mark.parametrize("left", ["half", "nothing"])
def test_a_damaged_file_is_not_used(storage, pool, left):
    """ "kv" has no bytes: its files only say that a page is there."""
    path = storage.files[pool, 2 if pool in COMPRESSED else 4]
    content = path.read_bytes()
    assert len(content) > 1
    path.write_bytes(content[: len(content) // 2 if left == "half" else 0])
    with storage.server(storage.args) as cache:
        assert cache.prefetch(TOKENS).host_hit_length == 0
        b = computes(cache, 0)
    assert path.exists(), "it was set aside, and computed and stored again"
    if pool in TILE:
        storage.captured[4 * P] = b.captured[4 * P]
    with storage.server(storage.args) as cache:
        found_whole(storage, cache, 4 * P)


@pytest.mark.parametrize("pool", COMPRESSED)
@pytest.mark.parametrize("page", [1, 2, 4])
def test_a_missing_page_ends_the_hit(storage, pool, page):
    """Before it the last tile counts, wherever the others are; what is computed again is stored again."""
    storage.files[pool, page].unlink()
    expected = {1: 0, 2: P, 4: 2 * P}[page]
    with storage.server(storage.args) as cache:
        found_whole(storage, cache, expected)
        cache.prefetch(TOKENS)
        computes(cache, expected)
    assert storage.holds(pages=4, tiles=3)
    with storage.server(storage.args) as cache:
        assert cache.prefetch(TOKENS).host_hit_length == 4 * P


def test_of_two_equal_prefetches_one_fails(storage):
    """Both read the same pages at once; the first one's last tile cannot be read, twice."""
    get, fails = HiCacheFile.get, [True, True]

    def failing(self, key, *arguments):
        if key.endswith(".swa") and fails:
            fails.pop()
            raise OSError(errno.EIO, "the disk is gone")
        return get(self, key, *arguments)

    with storage.server(storage.args) as cache, mock.patch.object(HiCacheFile, "get", failing):
        handles = [start_prefetch(cache, TOKENS, rid) for rid in ("first", "second")]
        for handle in handles:
            events_until(cache, lambda handle=handle: cache.tree.check_prefetch_progress(handle))
        assert [cache.tree.pop_prefetch_loaded_tokens(handle) for handle in handles] == [0, 4 * P]
        cache.tree.check_hicache_events()
        pages, tiles = host_size(cache)
        assert host_free(cache) == (pages - 4, tiles - 1)
        computes(cache, 4 * P)
        assert not fails


def test_unfinished_files_are_not_seen(storage):
    """A file has another name until it is whole; what a killed writer left lies there, and is no page."""
    for n, content in enumerate((b"", b"\xa5" * 1000, storage.files["swa", 4].read_bytes())):
        (storage.directory / f".{n:032x}.tmp").write_bytes(content)
    storage.files["swa", 4].unlink()
    with storage.server(storage.args) as cache:
        found_whole(storage, cache, 2 * P)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
