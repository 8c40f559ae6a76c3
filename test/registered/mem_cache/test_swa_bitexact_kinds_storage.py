"""Kinds of faults that others met in backups and storage: late copies, and whose bytes they are."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.swa_bitexact.evict import evict_tiles
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.ci.ci_register import register_cpu_ci

from kit.existing_tests import missing_tests
from kit.tile_cache import server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest
from kit.tile_storage import TileStorage, computed, emptied, host_size

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

P = PAGE
TILES, PAGES = 8, 16

# By kind, the tests.
KINDS = {
    "a late backup reads a mapping that is cleared already": (
        "test_a_late_copy_to_the_host_copies_what_was_published",
        "test_a_late_copy_to_storage_stores_what_was_published",
    ),
    "a prompt of whole pages is not found again": ("test_a_prompt_of_whole_pages_is_found_in_storage",),
    "stored bytes outlive dtype, model or weights": (
        "test_swa_bitexact_identity.py::TestIdentity.test_every_ingredient_changes_it",
        "test_swa_bitexact_identity.py::TestFileStorage.test_a_server_finds_its_own_pages_only",
        "test_swa_bitexact_weight_update.py::TestDisk.test_old_pages_are_not_found_and_new_ones_have_a_new_name",
        "test_swa_bitexact_weight_update.py::TestDisk.test_an_unnamed_update_is_private_to_one_boot",
    ),
    "namespaces collide, or are missing in storage's keys": (
        "test_namespaces_are_kept_apart_in_storage",
        "test_an_adapter_is_not_named_by_the_client",
        "test_swa_bitexact_identity.py::TestPageHashes.test_requests_that_differ_only_in_one_of_them",
    ),
    "the tail behind a failed write is lost, or skipped to": (
        "test_swa_bitexact_faults_storage_writes.py::test_a_hit_stops_at_a_page_that_was_not_written",
        "test_swa_bitexact_faults_storage_writes.py::test_a_hit_stops_at_a_batch_that_was_not_written",
    ),
    "a prefetch is aborted while side pools are read": (
        "test_swa_bitexact_faults_storage.py::test_an_aborted_prefetch_ends_with_its_read",
    ),
    "a failed backup counts as one": (
        "test_swa_bitexact_faults_memory.py::test_a_host_of_one_page_keeps_what_it_has_room_for",
        "test_swa_bitexact_faults_memory.py::test_a_host_pool_that_refuses_gives_everything_back",
    ),
}


def test_the_tests_of_the_table_are_there():
    assert missing_tests(KINDS, __file__) == []


@pytest.fixture
def storage(core):
    with tempfile.TemporaryDirectory() as directory:
        yield TileStorage(Path(directory), core)


# Late copies -------------------------------------------------------------------


def regions(cache):
    """The compressed rows of both ratios, as bytes by page: tensors [pages, bytes]."""
    return [buffer for ratio in (4, 128) for buffer in cache.kvcache.unified_region_buffers(ratio)[0]]


def stamp(cache, request):
    """Random bytes into the compressed rows of all of ``request``'s pages; copies of them, by region."""
    pages = request.rows[::P] // P
    source = torch.Generator().manual_seed(request.seed)
    for rows in regions(cache):
        rows[pages] = torch.randint(0, 256, rows[pages].shape, generator=source, dtype=torch.uint8)
    return [rows[pages].clone() for rows in regions(cache)]


def rows_of(cache, match):
    pages = cache.tree.path_device_indices(match.last_device_node)[::P] // P
    return [rows[pages] for rows in regions(cache)]


def recycled(cache):
    """Another request takes every free tile, and overwrites it."""
    cache.poison_free_tiles()
    for rows in regions(cache):
        free = cache.allocator.full_attn_allocator.get_all_free_pages()
        rows[free] = 0xA5


def loaded(cache, tokens, boundary, request, stamped):
    """``boundary`` is loaded with ``request``'s own tile and rows."""
    match = cache.load_back(tokens[:boundary])
    assert match.device_prefix_len == boundary and cache.holds(match, request.captured[boundary])
    for found, expected in zip(rows_of(cache, match), stamped, strict=True):
        assert torch.equal(found, expected[: boundary // P])


def test_a_late_copy_to_the_host_copies_what_was_published(cache):
    """The copies are queued, and the device is asked for its memory before the first of them runs."""
    tokens = tokens_from(1, 4)
    a = TileRequest(cache, tokens, seed=1).admit().extend(4 * P, P, 2 * P, 4 * P)
    stamped = stamp(cache, a)
    a.finish()
    # A node ends at each page: three with a window.
    assert len(cache.tree.ongoing_write_through) == 4
    evict_tiles(cache.tree, TILES)
    cache.allocator.evict_to_free_tokens(cache.tree, PAGES * P)
    assert cache.free() == (TILES - 3, PAGES - 4)
    recycled(cache)
    cache.settle()
    cache.evict_device()
    recycled(cache)
    assert cache.free() == (TILES, PAGES)
    for boundary in a.captured:
        loaded(cache, tokens, boundary, a, stamped)
    cache.check()
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


def test_a_late_copy_to_storage_stores_what_was_published(storage):
    """The writer is held up; device and host are asked for their memory, and others use it."""
    tokens = tokens_from(1, 4)
    go, write = threading.Event(), HiCacheFile.batch_set_v2

    def held_up(self, *arguments, **keywords):
        assert go.wait(5)
        return write(self, *arguments, **keywords)

    with server_context(**storage.arguments) as args:
        with storage.server(args) as cache, mock.patch.object(HiCacheFile, "batch_set_v2", held_up):
            a = TileRequest(cache, tokens, seed=1).admit().extend(4 * P, P, 2 * P, 4 * P)
            stamped = stamp(cache, a)
            a.finish()
            while cache.tree.ongoing_write_through:
                cache.tree.check_hicache_events()
            assert len(cache.tree.ongoing_backup) == 4 and storage.holds(pages=0, tiles=0)
            cache.evict_device()
            recycled(cache)
            assert cache.free() == (TILES, PAGES)
            for component in (ComponentType.SWA, ComponentType.FULL):
                assert cache.tree.evict_host(1 << 20, component) == 0
            go.set()
            cache.settle()
            cache.check()
            assert storage.holds(pages=4, tiles=3)
            assert emptied(cache) == ((TILES, PAGES), host_size(cache))
        for boundary in a.captured:
            with storage.server(args) as cache:
                assert cache.prefetch(tokens[:boundary]).host_hit_length == boundary
                loaded(cache, tokens, boundary, a, stamped)
                cache.check()


# Whole pages -------------------------------------------------------------------


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_a_prompt_of_whole_pages_is_found_in_storage(storage, pages):
    """Its last token must be computed, so it is found up to the page before; a longer prompt finds it all."""
    tokens = tokens_from(1, 4)
    captures = [n * P for n in (pages - 1, pages) if n]
    with server_context(**storage.arguments) as args:
        with storage.server(args) as cache:
            a = computed(cache, tokens[: pages * P], pages * P, *captures, seed=1)
            assert storage.holds(pages=pages, tiles=len(captures))
        for length, expected in ((pages * P, (pages - 1) * P), (pages * P + 1, pages * P)):
            with storage.server(args) as cache:
                b = asked_of_storage(TileRequest(cache, tokens[:length], seed=2))
                assert b.admit().req.prefix_len == expected
                b.extend(length).take_restores()
                cache.settle()
                assert not expected or cache.holds(cache.match(tokens[:expected]), a.captured[expected])
                b.finish()
                cache.check()


def asked_of_storage(request):
    """The request asks storage for what it could reuse, as the scheduler does on its arrival."""
    tree, req = request.cache.tree, request.match(for_reuse=False).req
    handle = CacheRequestHandle(rid=req.rid, attempt_id=0)
    tokens = req.full_untruncated_fill_ids
    found = req.prefix_len + req.host_hit_length
    tree.prefetch_from_storage(
        handle,
        req.last_host_node,
        tokens[found : req._compute_max_prefix_len(len(tokens))],
        tree.get_last_hash_value(req.last_host_node),
        matched_prefix_tokens=tokens[:found],
        extra_key=req.extra_key,
        cache_salt=req.cache_salt,
    )
    for _ in range(1000):
        tree.check_hicache_events()
        if tree.check_prefetch_progress(handle):
            return request
        time.sleep(0.01)
    raise AssertionError("the prefetch is not done after 10 s")


# Namespaces --------------------------------------------------------------------

_NAMESPACES = (
    {},
    {"cache_salt": "X"},
    {"cache_salt": "Y"},
    {"extra_key": "X"},
    {"extra_key": "X", "cache_salt": "X"},
    {"extra_key": "XX"},
)


def in_namespace(cache, tokens, seed, namespace):
    request = TileRequest(cache, tokens, seed=seed)
    for name, value in namespace.items():
        setattr(request.req, name, value)
    return request


def test_namespaces_are_kept_apart_in_storage(storage):
    """Each finds nothing of the others', and its own afterwards."""
    tokens = tokens_from(1, 3)
    with server_context(**storage.arguments) as args:
        for seed, namespace in enumerate(_NAMESPACES):
            with storage.server(args) as cache:
                a = asked_of_storage(in_namespace(cache, tokens[: 2 * P + 1], seed, namespace)).admit()
                assert a.req.prefix_len == 0, namespace
                a.extend(2 * P + 1, 2 * P).finish()
                cache.check()
        assert storage.holds(pages=2 * len(_NAMESPACES), tiles=len(_NAMESPACES))
        for seed, namespace in enumerate(_NAMESPACES):
            with storage.server(args) as cache:
                b = asked_of_storage(in_namespace(cache, tokens[: 2 * P + 1], 100 + seed, namespace)).admit()
                assert b.req.prefix_len == 2 * P, namespace
                b.extend(2 * P + 1)
                plan = b.take_restores()
                cache.settle()
                cache.fill(0, seed * 100_000 + 2 * P)
                expected = cache.tile(0)
                cache.kvcache.capture_pool.clear_tile()
                found = cache.tile(int(plan.tile_ids))
                assert all(torch.equal(found[name], rows) for name, rows in expected.items()), namespace
                b.finish()
                cache.check()


def test_an_adapter_is_not_named_by_the_client():
    """SGLang puts an adapter's id behind extra_key; it makes the id itself, so no client's word is one."""
    made = [LoRARef(lora_name="X", lora_path="X").lora_id for _ in range(2)]
    assert len(set(made)) == 2
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in made)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
