"""What storage gives back is compared with its digest: no changed byte is ever reused."""

from __future__ import annotations

import sys
import tempfile
import threading
from itertools import cycle
from pathlib import Path
from unittest import mock

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult
from sglang.srt.mem_cache.swa_bitexact.verified_storage import VerifiedStorage
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import TileCache, server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_storage import COMPRESSED, TILE, TileStorage, wait_for_storage

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

P = PAGE
TOKENS = tokens_from(1, 4)
# Without the anchor, whose pages have no bytes.
PAGE_POOLS = COMPRESSED[1:]
# Where a byte is changed in a file of some size.
PLACES = {"first": lambda size: 0, "middle": lambda size: size // 2, "last": lambda size: size - 1}


@pytest.fixture
def storage(core):
    with tempfile.TemporaryDirectory() as directory:
        yield TileStorage(Path(directory), core)


def cache_of(storage, args):
    """Tiles are published by hand, so that part 2 alone can be tested."""
    return TileCache(args, core=storage.core)


def filled(cache):
    """Three pages with a tile at the first and the third, on every tier; their tiles by end."""
    rows = cache.kvcache.unified_region_buffers(128)[0][0]
    rows.copy_(torch.randint(0, 256, rows.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8))
    tiles = {end: cache.publish_random(TOKENS, end, seed=end) for end in (P, 3 * P)}
    cache.settle()
    if cache.controller.enable_storage:
        wait_for_storage(cache)
        cache.settle()
    return tiles


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place(len(content))] ^= 0x10
    path.write_bytes(content)


def quarantined(directory):
    return sorted(path.name.split("_tiny")[0].partition(".")[2] for path in directory.glob("*.quarantined"))


def test_a_digest_is_that_of_the_stored_bytes(storage):
    with server_context(**storage.arguments) as args, cache_of(storage, args) as cache:
        filled(cache)
        assert_digests(storage)


def assert_digests(storage):
    assert storage.holds(pages=3, tiles=2)
    for end, groups in ((P, (PAGE_POOLS, TILE)), (2 * P, (PAGE_POOLS,)), (3 * P, (PAGE_POOLS, TILE))):
        for *members, digests in groups:
            found = file_at(storage, digests, end).read_bytes()
            expected = [xxhash.xxh3_64_digest(file_at(storage, m, end).read_bytes())[::-1] for m in members]
            # One line of little-endian words, the rest of it empty.
            assert found == b"".join(expected).ljust(64, b"\0"), end


def file_at(storage, pool, end):
    """The file of the page that ends at ``end``, wherever nodes end."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = get_storage_hash_str(TOKENS[:end], None, page_size=P)[-1]
    (path,) = storage.directory.glob(f"{key}.{pool}_tiny*.bin")
    return path


@pytest.mark.parametrize(
    ("pool", "end", "place"),
    [(pool, 3 * P, place) for pool, place in zip(TILE, cycle(PLACES), strict=False)]
    + [(pool, 2 * P, place) for pool, place in zip(PAGE_POOLS, cycle(PLACES), strict=False)]
    + [("bitexact_tile", 3 * P, "last"), ("bitexact_page", 2 * P, "last")],
)
def test_a_changed_byte_is_not_reused(storage, pool, end, place):
    """Of the last tile, or of the page before it: the tile at the first page is what is left."""
    left = P
    with server_context(**storage.arguments) as args:
        with cache_of(storage, args) as cache:
            tiles = filled(cache)
            path = file_at(storage, pool, end)
        good = path.read_bytes()
        flip(path, PLACES[place])
        with cache_of(storage, args) as cache:
            # All or nothing: what failed is not half used, and does not come again.
            assert cache.prefetch(TOKENS[: 3 * P]).host_hit_length == 0
            assert quarantined(storage.directory) == sorted(TILE if pool in TILE else PAGE_POOLS)
            assert cache.controller.storage_backend.quarantined == 1
            match = cache.prefetch(TOKENS[: 3 * P])
            assert match.host_hit_length == left
            match = cache.load_back(TOKENS)
            assert match.device_prefix_len == left and cache.holds(match, tiles[left])
            cache.tree.sanity_check()
        with cache_of(storage, args) as cache:
            # Computed again, it is stored again.
            filled(cache)
            assert file_at(storage, pool, end).read_bytes() == good
        with cache_of(storage, args) as cache:
            assert cache.prefetch(TOKENS[: 3 * P]).host_hit_length == 3 * P
            assert cache.controller.storage_backend.quarantined == 0
            assert cache.holds(cache.load_back(TOKENS), tiles[3 * P])


def test_what_a_damaged_file_left_in_host_memory_is_not_stored_again(storage):
    """A digest page is read before it is looked at, with the part that no pool has; others come to lie there."""
    with server_context(**storage.arguments) as args, cache_of(storage, args) as cache:
        for group in cache.controller.tile_digests.groups:
            for index in range(0, group.pool.size, P):
                group.pool.set_from_flat_data_page(index, torch.full((64,), 0xFF, dtype=torch.uint8))
        filled(cache)
    assert_digests(storage)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_changed_byte_of_any_file(data):
    with tempfile.TemporaryDirectory() as directory:
        storage = TileStorage(Path(directory), "rust")
        with server_context(**storage.arguments) as args:
            with cache_of(storage, args) as cache:
                tiles = filled(cache)
            path = data.draw(st.sampled_from(sorted(p for p in storage.directory.iterdir() if p.stat().st_size)))
            at = data.draw(st.integers(0, path.stat().st_size - 1))
            value = data.draw(st.integers(1, 255))
            content = bytearray(path.read_bytes())
            content[at] ^= value
            path.write_bytes(content)
            with cache_of(storage, args) as cache:
                match = cache.prefetch(TOKENS[: 3 * P])
                if not match.host_hit_length:
                    match = cache.prefetch(TOKENS[: 3 * P])
                    assert cache.controller.storage_backend.quarantined == 1
                else:
                    # The first page's tile is not asked for by a hit of three.
                    assert path == file_at(storage, pool_of(path), P) and pool_of(path) in TILE
                if match.host_hit_length:
                    match = cache.load_back(TOKENS)
                    assert cache.holds(match, tiles[match.device_prefix_len])


def pool_of(path):
    return path.name.split("_tiny")[0].partition(".")[2]


@pytest.mark.parametrize("size", [0, 1, -1])
@pytest.mark.parametrize("pool", ["swa", "bitexact_tile", "deepseek_v4_c128", "bitexact_page"])
def test_a_file_of_another_size_is_quarantined(storage, pool, size):
    with server_context(**storage.arguments) as args:
        with cache_of(storage, args) as cache:
            filled(cache)
            path = file_at(storage, pool, 3 * P)
        path.write_bytes(path.read_bytes()[:size])
        with cache_of(storage, args) as cache:
            assert cache.prefetch(TOKENS[: 3 * P]).host_hit_length == 0
            assert pool in quarantined(storage.directory)
            assert cache.prefetch(TOKENS[: 3 * P]).host_hit_length == P


def test_a_key_that_cannot_be_renamed_is_remembered(storage):
    """As with every backend that has no files."""
    with server_context(**storage.arguments) as args:
        with cache_of(storage, args) as cache:
            tiles = filled(cache)
            flip(file_at(storage, "swa", 3 * P), PLACES["middle"])
        with cache_of(storage, args) as cache, mock.patch("os.replace", side_effect=PermissionError(1, "no")):
            assert cache.prefetch(TOKENS[: 3 * P]).host_hit_length == 0
            assert quarantined(storage.directory) == []
            assert cache.prefetch(TOKENS[: 3 * P]).host_hit_length == P
            assert cache.controller.storage_backend.quarantined == 1
            assert cache.holds(cache.load_back(TOKENS), tiles[P])


def test_what_the_device_could_not_read_is_no_reason_to_rename(storage):
    with server_context(**storage.arguments) as args:
        with cache_of(storage, args) as cache:
            filled(cache)
        with cache_of(storage, args) as cache:
            with mock.patch.object(HiCacheFile, "get", side_effect=OSError(5, "Input/output error")):
                assert cache.prefetch(TOKENS[: 3 * P]).host_hit_length == 0
            assert quarantined(storage.directory) == []
            assert cache.prefetch(TOKENS[: 3 * P]).host_hit_length == 3 * P


def test_a_page_without_its_digest_is_no_hit(storage):
    with server_context(**storage.arguments) as args:
        with cache_of(storage, args) as cache:
            filled(cache)
            file_at(storage, "bitexact_tile", 3 * P).unlink()
        with cache_of(storage, args) as cache:
            assert cache.prefetch(TOKENS[: 3 * P]).host_hit_length == P
            file_at(storage, "bitexact_page", P).unlink()
        with cache_of(storage, args) as cache:
            assert cache.prefetch(TOKENS[: 3 * P]).host_hit_length == 0


@pytest.mark.parametrize("attached", [True, False])
def test_a_digest_is_made_where_a_page_arrives(storage, attached):
    """And nothing is read as long as no storage is attached; such pages get theirs when they are written."""
    with server_context(**storage.arguments) as args, cache_of(storage, args) as cache:
        digests, threads = cache.controller.tile_digests, set()
        digests.enabled = attached
        digest = digests.digest

        def observed(*where):
            threads.add(threading.current_thread().name.startswith("tile-digests"))
            return digest(*where)

        with mock.patch.object(digests, "digest", observed):
            filled(cache)
        assert threads == {attached}
        assert_digests(storage)


# Host memory --------------------------------------------------------------------


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("pool", ["swa", "deepseek_v4_c4_indexer_state", "deepseek_v4_c128"])
def test_a_page_that_changed_in_host_memory(core, pool, verified):
    """With the switch it is not loaded, and nothing leaks; without, the debug checks alone would see it."""
    with envs.SGLANG_SWA_VERIFY_HOST.override(verified), server_context() as args, TileCache(args, core=core) as cache:
        filled(cache)
        cache.evict_device()
        # What has no digest yet would get that of the changed bytes.
        cache.controller.tile_digests.wait()
        (buffer,) = [
            entry.host_pool.kv_buffer for entry in cache.controller.mem_pool_host.entries if entry.name == pool
        ]
        for layer in buffer if isinstance(buffer, list) else [buffer]:
            layer.view(torch.uint8).flatten()[::1000] ^= 1
        before = cache.free()
        cache.tree.load_back_threshold = 0
        assert cache.tree.load_back(cache.match(TOKENS).best_match_node) is not verified
        cache.tree.ready_to_load_host_cache()
        cache.settle()
        assert (cache.match(TOKENS).device_prefix_len, cache.free() == before) == (
            (0, True) if verified else (3 * P, False)
        )
        cache.tree.sanity_check()


def test_a_page_that_did_not_change_is_loaded(core):
    with envs.SGLANG_SWA_VERIFY_HOST.override(True), server_context() as args, TileCache(args, core=core) as cache:
        tiles = filled(cache)
        cache.evict_device()
        assert cache.holds(cache.load_back(TOKENS), tiles[3 * P])


def test_what_a_bad_page_leaves():
    """The docstring's example."""
    bad = [False, True, False, False]
    trailing = PoolTransfer(name=PoolName.SWA, hit_policy=PoolHitPolicy.TRAILING_PAGES, keys=["k"])
    pages = PoolTransfer(name=PoolName.DEEPSEEK_V4_C4)
    assert cut(PoolTransferResult(4, {}, [1, 2, 3, 4]), bad, trailing) == (4, [1, 3, 4])
    assert cut(PoolTransferResult(4, {}, [1, 2, 3, 4]), bad, pages) == (1, [1])
    assert cut(PoolTransferResult(4, {}), bad, pages) == (1, None)
    # Of a backend that names only its longest hit, only that is known to end with a tile.
    assert cut(PoolTransferResult(4, {}), bad, trailing) == (4, None)
    assert cut(PoolTransferResult(2, {}), bad, trailing) == (0, None)


def cut(found, bad, member):
    VerifiedStorage._cut(found, bad, member)
    return found.kv_hit_pages, found.restorable_prefix_pages


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
