"""Kinds of faults that others met in trees: locks, splits, and rows of transfers under way."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_bitexact.evict import evict_tiles
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.ci.ci_register import register_cpu_ci

from kit.existing_tests import missing_tests
from kit.tile_cache import server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest
from kit.tile_storage import TileStorage, computed, emptied, host_free, host_size

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

P = PAGE
TILES, PAGES = 8, 16

# By kind, the tests.
KINDS = {
    "a lock is released more often than it was taken": (
        "test_locks_come_off_in_any_order",
        "test_swa_bitexact_oracle.py::test_real_caches_and_model_agree",
    ),
    "a lock from before a load releases a newer one": ("test_a_lock_from_before_a_load_releases_itself_alone",),
    "a host lock is lost, or stays, when its node splits": ("test_a_host_lock_survives_two_splits",),
    "a part of a split node is never backed up": (
        "test_both_parts_of_a_node_that_splits_are_backed_up",
        "test_swa_bitexact_late_windows.py::test_several_windows_that_come_during_a_backup",
        "test_swa_bitexact_late_windows.py::test_a_window_that_comes_to_a_stored_node_reaches_host_and_storage",
    ),
    "rows of a load under way are adopted, and freed when it fails": (
        "test_rows_of_a_load_under_way_are_shared",
        "test_a_failed_load_takes_nothing_from_others",
        "test_swa_bitexact_tiers.py::test_a_load_without_a_tile_falls_back_to_what_the_device_has",
        "test_swa_bitexact_faults_storage.py::test_of_two_equal_prefetches_one_fails",
    ),
}


def test_the_tests_of_the_table_are_there():
    assert missing_tests(KINDS, __file__) == []


def fork(tokens, pages):
    """A probe that leaves the path of ``tokens`` after ``pages``, and so splits the node there."""
    return tokens[: pages * P] + tokens_from(900_000, 1)


# Locks -------------------------------------------------------------------------


def sequence(branch):
    """Four pages: two for all, and two of one of three branches."""
    return tokens_from(1, 2) + tokens_from(100_000 * (1 + branch), 2)


@pytest.mark.parametrize("seed", range(3))
def test_locks_come_off_in_any_order(cache, seed):
    """Prefixes shared by many locks, while nodes split, windows come and go, and host copies are loaded.

    What is locked stays, with its bytes; when the last lock is off, everything can go.
    """
    rng, locks, count = random.Random(seed), [], 0
    for _ in range(150):
        tokens = sequence(rng.randrange(3))[: rng.randint(1, 4) * P]
        act = rng.choice(["insert", "lock", "lock", "unlock", "split", "evict", "load"])
        if act == "insert" and cache.allocator.full_available_size() >= 5 * P:
            count += 1
            end = len(tokens) // P * P
            a = TileRequest(cache, tokens + tokens_from(700_000, 1), seed=count).admit(loads=False)
            evict_tiles(cache.tree, 2)
            a.extend(end + 1)
            if a.req.prefix_len < end and cache.free()[0]:
                a.capture(end)
            a.finish()
        elif act == "lock" and len(locks) < 4:
            match = cache.match(tokens)
            if match.device_prefix_len:
                lock = cache.tree.lock(match.last_device_node)
                locks.append((lock, tokens[: match.device_prefix_len], cache.tile_at(match)))
        elif act == "unlock" and locks:
            cache.tree.unlock(locks.pop(rng.randrange(len(locks)))[0])
        elif act == "split":
            cache.match(fork(tokens, len(tokens) // P))
        elif act == "evict":
            evict_tiles(cache.tree, 1)
            if rng.random() < 0.5:
                cache.allocator.evict_to_free_tokens(cache.tree, 9 * P)
        elif act == "load":
            match = cache.match(tokens)
            if match.host_hit_length or match.swa_host_hit_length:
                cache.tree.load_back_threshold = 0
                cache.tree.load_back(match.best_match_node)
                cache.tree.ready_to_load_host_cache()
        cache.settle()
        cache.poison_free_tiles()
        for _, prefix, tile in locks:
            match = cache.match(prefix)
            assert match.device_prefix_len == len(prefix) and cache.holds(match, tile)
    assert count > 5
    for lock, *_ in locks:
        cache.tree.unlock(lock)
    cache.check()
    core = cache.tree.tree_core
    assert (core.swa_protected_size(), core.full_protected_size()) == (0, 0)
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


@pytest.mark.parametrize("first_off", ["before the load", "after the load"])
def test_a_lock_from_before_a_load_releases_itself_alone(cache, first_off):
    """The window is on the host only when the first lock is taken, and on the device at the second."""
    tokens = tokens_from(1, 4)
    a = computed(cache, tokens, 3 * P, P, 3 * P, seed=1)
    evict_tiles(cache.tree, 1)
    match = cache.match(tokens[:P])
    assert (match.device_prefix_len, match.swa_host_hit_length) == (0, P)
    locks = {"before the load": cache.tree.lock(match.best_match_node)}
    match = cache.load_back(tokens[:P])
    locks["after the load"] = cache.tree.lock(match.last_device_node)
    core = cache.tree.tree_core
    assert core.swa_protected_size() == P
    cache.tree.unlock(locks.pop(first_off))
    assert core.swa_protected_size() == P
    # All that may go is the other window, of the leaf.
    evict_tiles(cache.tree, TILES)
    cache.poison_free_tiles()
    assert cache.free()[0] == TILES - 1
    assert cache.holds(cache.match(tokens[:P]), a.captured[P])
    (last,) = locks.values()
    cache.tree.unlock(last)
    assert (core.swa_protected_size(), core.full_protected_size()) == (0, 0)
    cache.check()
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("window", [True, False])
def test_a_host_lock_survives_two_splits(cache, window, order):
    """Two host locks, one before a split and one after it, and another split: each comes off once, whole."""
    tokens = tokens_from(1, 4)
    a = computed(cache, tokens, 4 * P, *([4 * P] if window else []), seed=1)
    _, node, _ = cache.tree.tree_core.match_full_device_prefix(RadixKey(tokens))
    cache.evict_device()
    used = [size - free for size, free in zip(host_size(cache), host_free(cache), strict=True)]
    assert used == [4, int(window)]
    receipts = []
    for pages in (1, 2):
        receipts.append(cache.tree.inc_host_lock_ref(node).to_dec_params())
        cache.match(fork(tokens, pages))
    for i in order:
        for component in (ComponentType.SWA, ComponentType.FULL):
            assert cache.tree.evict_host(1 << 20, component) == 0
        assert cache.match(tokens).host_hit_length == (4 * P if window else 0)
        cache.tree.dec_host_lock_ref(node, receipts[i])
    if window:
        assert cache.holds(cache.load_back(tokens), a.captured[4 * P])
    cache.check()
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


# Splits ------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_both_parts_of_a_node_that_splits_are_backed_up(core, pages):
    """[0, 3P) is one node, the window's page another; the first splits while both backups are pending."""
    tokens = tokens_from(1, 5)
    with tempfile.TemporaryDirectory() as directory:
        storage = TileStorage(Path(directory), core)
        with server_context(**storage.arguments) as args, storage.server(args) as cache:
            a = TileRequest(cache, tokens, seed=1).admit().extend(4 * P, 4 * P).checkpoint()
            assert cache.tree.ongoing_write_through
            cache.match(fork(tokens, pages))
            a.finish()
            cache.check()
            assert storage.holds(pages=4, tiles=1)
            cache.evict_device()
            assert cache.free() == (TILES, PAGES)
            assert cache.match(tokens).host_hit_length == 4 * P
            assert cache.holds(cache.load_back(tokens), a.captured[4 * P])
            cache.check()
            assert emptied(cache) == ((TILES, PAGES), host_size(cache))
            assert cache.prefetch(tokens).host_hit_length == 4 * P
            assert cache.holds(cache.load_back(tokens), a.captured[4 * P])


# Loads under way ---------------------------------------------------------------


@pytest.mark.parametrize("first_ends", ["before the transfer", "after the transfer"])
def test_rows_of_a_load_under_way_are_shared(cache, first_ends):
    """A second request matches rows that the first one's load has not filled yet; the first is aborted."""
    tokens = tokens_from(1, 4)
    a = computed(cache, tokens, 3 * P, P, 3 * P, seed=1)
    cache.evict_device()
    first = TileRequest(cache, tokens, seed=2).admit()
    second = TileRequest(cache, tokens, seed=3).admit()
    assert (first.req.prefix_len, second.req.prefix_len) == (3 * P, 3 * P)
    assert cache.free() == (TILES - 1, PAGES - 3)
    if first_ends == "after the transfer":
        first.take_rows(3 * P + 1)
        first.take_restores()
        cache.settle()
        first.abort()
    else:
        cache.tree.unlock(first.req.lock)
    # Nothing of it may go while the second holds it.
    evict_tiles(cache.tree, TILES)
    cache.allocator.evict_to_free_tokens(cache.tree, PAGES * P)
    assert cache.free() == (TILES - 1, PAGES - 3)
    second.extend(3 * P + 1)
    restores = second.take_restores()
    cache.settle()
    cache.check(second)
    assert restores.boundaries == [3 * P]
    assert torch.equal(restores.tile_ids, torch.tensor([cache.tile_id_at(cache.match(tokens))]))
    assert cache.holds(cache.match(tokens), a.captured[3 * P])
    second.finish()
    cache.check()
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


def test_a_failed_load_takes_nothing_from_others(cache):
    """The first request has loaded a page; another's load of more finds rows, and no tile for its window."""
    tokens = tokens_from(1, 4)
    a = computed(cache, tokens, 3 * P, P, 3 * P, seed=1)
    cache.evict_device()
    first = TileRequest(cache, tokens[: P + 1], seed=2).admit()
    assert first.req.prefix_len == P
    before = cache.free()
    with mock.patch.object(cache.tree.host_pool_group.entry_map["swa"], "device_alloc_fn", return_value=None) as asked:
        second = TileRequest(cache, tokens, seed=3).admit()
    # Before and after an eviction for it.
    assert asked.call_count == 2
    assert (second.req.prefix_len, cache.free()) == (P, before)
    first.extend(P + 1)
    assert first.take_restores().boundaries == [P]
    cache.settle()
    second.extend(3 * P + 1)
    assert second.take_restores().boundaries == [P]
    cache.check(first, second)
    assert cache.holds(cache.match(tokens[:P]), a.captured[P])
    first.finish()
    second.finish()
    cache.check()
    assert emptied(cache) == ((TILES, PAGES), host_size(cache))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
