"""What goes wrong where SGLang's own floors, accounting and frees meet tiles; and does not here.

Each of these was provoked with SGLang's code alone, and each was silent there.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.swa_bitexact import integrity
from sglang.srt.mem_cache.swa_bitexact.evict import evict_tiles
from sglang.srt.mem_cache.swa_bitexact.integrity import check_tree
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest
from kit.tile_storage import TileStorage, computed

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

P = PAGE
TILES, PAGES = 8, 16


def hits(cache, tokens):
    """What the device has of each number of whole pages of ``tokens``."""
    return [cache.match(tokens[: n * P]).device_prefix_len for n in range(1, len(tokens) // P + 1)]


def from_elsewhere(cache, tokens, *, floor, known=0):
    """An insert that no request makes, with fresh rows and SGLang's ``floor``; returns the rows."""
    rows = cache.allocator.full_attn_allocator.alloc(len(tokens))
    cache.insert(tokens, rows, floor=floor, known=known)
    return rows


# Unmapped windows --------------------------------------------------------------


def test_only_the_page_with_the_tile_gets_a_window(cache):
    """SGLang's own floor for 1,024 tokens is 512: it would publish [512, 768) with mapping 0."""
    tokens = tokens_from(1, 5)
    a = TileRequest(cache, tokens, seed=1).admit().extend(4 * P, 4 * P)
    a.req.kv.set_evicted_seqlen(ComponentType.SWA, 2 * P)
    a.checkpoint()
    cache.check(a)
    assert hits(cache, tokens[: 4 * P]) == [0, 0, 0, 4 * P]
    assert cache.free() == (7, 12)
    a.finish()
    cache.check()


def test_nothing_captured_publishes_no_window_on_any_tier(core):
    tokens = tokens_from(1, 5)
    with tempfile.TemporaryDirectory() as directory:
        storage = TileStorage(Path(directory), core)
        with server_context(**storage.arguments) as args, storage.server(args) as cache:
            computed(cache, tokens, 4 * P, seed=1)
            cache.check()
            assert hits(cache, tokens) == [0] * 5
            assert cache.match(tokens).full_kv_hit_length == 4 * P
            cache.evict_device()
            assert cache.match(tokens).host_hit_length == 0
            assert storage.holds(pages=4, tiles=0)


def test_the_integrity_check_sees_a_window_without_a_tile(cache):
    """SGLang's sanity_check passes with it."""
    TileRequest(cache, tokens_from(1, 2), seed=1).admit().extend(2 * P, 2 * P).finish()
    cache.check()
    rows = cache.tree.path_device_indices(cache.match(tokens_from(1, 2)).last_device_node)[P:]
    slots = cache.allocator.full_to_swa_index_mapping[rows]
    cache.allocator.clear_full_to_swa_mapping(rows)
    with mock.patch.object(integrity, "check_tree"):
        cache.tree.sanity_check()
    with pytest.raises(AssertionError, match=r"windows without a tile on FULL pages \[\d+\]"):
        check_tree(cache.tree)
    with pytest.raises(AssertionError, match="windows without a tile"):
        cache.tree.sanity_check()
    cache.allocator.set_full_to_swa_mapping(rows, slots)
    cache.check()


def test_the_integrity_check_sees_free_rows_with_a_mapping_and_lost_tiles(cache):
    allocator = cache.allocator
    page = allocator.full_attn_allocator.alloc(P)
    tile_id = allocator.alloc_tiles(1)
    with pytest.raises(AssertionError, match=rf"lost tiles \[{int(tile_id)}\]"):
        check_tree(cache.tree)
    check_tree(cache.tree, [tile_id])
    with pytest.raises(AssertionError, match=r"several owners \[2\]"):
        check_tree(cache.tree, [tile_id, torch.tensor([2])])
    allocator.map_tile(page, tile_id)
    with pytest.raises(AssertionError, match="belong to no window"):
        check_tree(cache.tree)
    allocator.free_full_segment(page, start_pos=0)
    with pytest.raises(AssertionError, match=rf"free FULL pages \[{int(page[0]) // P}\] are mapped"):
        check_tree(cache.tree)
    allocator.free_swa(page)
    cache.check()


# An insert from elsewhere ------------------------------------------------------


def test_a_window_from_elsewhere_is_refused(cache):
    tokens = tokens_from(1, 4)
    from_elsewhere(cache, tokens, floor=2 * P)
    cache.check(refused=2)
    assert hits(cache, tokens) == [0] * 4
    assert cache.free() == (TILES, PAGES - 4)


def test_a_window_from_elsewhere_is_refused_after_a_tile_was_published(cache):
    a = TileRequest(cache, tokens_from(9000, 2), seed=1).admit().extend(P, P).checkpoint()
    tokens = tokens_from(1, 4)
    from_elsewhere(cache, tokens, floor=2 * P)
    cache.check(a, refused=2)
    assert hits(cache, tokens) == [0] * 4


@pytest.mark.parametrize("locked", [False, True])
def test_a_recovery_from_elsewhere_is_refused_and_nothing_leaks(cache, locked):
    tokens = tokens_from(1, 2)
    a = TileRequest(cache, tokens, seed=1).admit().extend(2 * P).checkpoint()
    cache.settle()
    if not locked:
        a.finish()
    from_elsewhere(cache, tokens, floor=P)
    cache.check(*([a] if locked else []), refused=1)
    assert (hits(cache, tokens), cache.free()) == ([0, 0], (TILES, PAGES - 2))
    if locked:
        a.finish()
    cache.tree.evict(EvictParams(num_tokens=PAGES * P))
    cache.check(refused=1)
    assert cache.free() == (TILES, PAGES)


# Frees -------------------------------------------------------------------------


def test_a_leafs_window_goes_last_since_its_full_page_goes_with_it(cache):
    tokens = tokens_from(1, 4)
    a = TileRequest(cache, tokens, seed=1).admit().extend(3 * P, P, 2 * P, 3 * P).finish()
    cache.check()
    assert cache.free() == (5, 13)
    for count, left in ((1, [0, 2 * P, 3 * P]), (1, [0, 0, 3 * P])):
        evict_tiles(cache.tree, count)
        cache.check()
        assert hits(cache, tokens[: 3 * P]) == left
        assert cache.free()[1] == 13
    assert cache.holds(cache.match(tokens), a.captured[3 * P])
    evict_tiles(cache.tree, 1)
    cache.check()
    # The leaf is [2P, 3P); with its window its page left the device, and only the host has it.
    assert (hits(cache, tokens[: 3 * P]), cache.free()) == ([0] * 3, (8, 14))
    assert cache.match(tokens).host_hit_length == 3 * P


def test_a_shortage_of_request_slots_evicts_no_tile(cache):
    """In ring mode SGLang's available SWA size counts request slots, of which there are four."""
    tokens = tokens_from(1, 3)
    a = TileRequest(cache, tokens, seed=1).admit().extend(2 * P, P, 2 * P).finish()
    cache.check()
    others = [TileRequest(cache, tokens_from(5000 * i, 2), seed=i).admit().extend(P) for i in range(2, 6)]
    assert cache.allocator.swa_available_size() == 0
    before = cache.free()
    cache.allocator.evict_to_free_tokens(cache.tree, 6 * P)
    assert cache.free() == before == (6, 10)
    assert hits(cache, tokens[: 2 * P]) == [P, 2 * P]
    # A shortage of FULL rows does evict, and gives the tiles of the rows back.
    cache.allocator.evict_to_free_tokens(cache.tree, 11 * P)
    assert cache.free() == (7, 11)
    cache.allocator.evict_to_free_tokens(cache.tree, 12 * P)
    assert cache.free() == (8, 12)
    for other in others:
        other.abort()
    cache.check()
    assert cache.free() == (TILES, PAGES)
    assert a.captured.keys() == {P, 2 * P}


def test_each_insert_starts_where_the_last_one_ended(cache):
    """With the first one's prev_prefix_len again, an insert frees pages that the tree owns."""
    tokens = tokens_from(1, 5)
    a = TileRequest(cache, tokens, seed=1).admit().extend(P, P).checkpoint()
    seen = []
    insert = cache.tree.insert

    def spy(params):
        floor = params.get_evicted_seqlen(ComponentType.SWA)
        seen.append((len(params.key), len(params.value), params.prev_prefix_len, floor, params.inserted_len))
        return insert(params)

    cache.tree.insert = spy
    a.extend(5 * P, 2 * P, 4 * P)
    before = cache.free()
    a.checkpoint()
    assert seen == [
        (2 * P, 2 * P, P, P, P),
        (4 * P, 4 * P, 2 * P, 3 * P, 2 * P),
        (5 * P, 5 * P, 4 * P, 5 * P, 4 * P),
    ]
    # Published rows are still in use: freed twice, they would be handed out again.
    assert cache.free() == before == (5, 11)
    cache.check(a)
    a.finish()
    cache.check()
    assert cache.free() == (5, 11)


def test_a_reinserted_node_is_not_another_hit(cache):
    """One request's second insert of its nodes counts as its first: nothing is backed up twice."""
    tokens = tokens_from(1, 5)
    written = []
    write = cache.controller.write
    cache.controller.write = lambda rows, **others: written.append(len(rows)) or write(rows, **others)
    TileRequest(cache, tokens, seed=1).admit().extend(4 * P, P, 2 * P, 4 * P).finish()
    cache.check()
    assert sorted(written) == [P, P, P, P]


def test_an_abort_above_the_floor_and_below_it(cache):
    """Tiles are mapped by publish alone, so rows below a window's floor never carry one to the next owner."""
    tokens = tokens_from(1, 5)
    a = TileRequest(cache, tokens, seed=1).admit().extend(4 * P + 1, 2 * P, 4 * P)
    a.req.kv.set_evicted_seqlen(ComponentType.SWA, 3 * P)
    assert not cache.allocator.full_to_swa_index_mapping[a.rows].any()
    assert cache.free() == (6, 11)
    a.abort()
    cache.check()
    assert (cache.free(), a.req.swa_tiles) == ((TILES, PAGES), None)
    # Whoever gets the rows next: extend() asserts that they come without a mapping.
    TileRequest(cache, tokens, seed=2).admit().extend(5 * P).abort()
    cache.check()


@pytest.mark.parametrize("captures", [(3 * P,), ()])
@pytest.mark.parametrize("end", ["abort", "finish", "retract"])
def test_tiles_that_are_not_published_come_back(cache, end, captures):
    """The tile at 4 pages lies beyond what the request committed, as after a step that did not count."""
    tokens = tokens_from(1, 5)
    a = TileRequest(cache, tokens, seed=1).admit().extend(2 * P, 2 * P).checkpoint()
    a.extend(3 * P + 10, *captures)
    a.capture(4 * P)
    cache.check(a)
    assert cache.free() == (6 - len(captures), 12)
    getattr(a, end)()
    cache.check()
    rows = 3 if end == "finish" else 2
    last = rows if captures else 2
    assert (cache.free(), a.req.swa_tiles) == ((9 - last, 16 - rows), None)
    assert hits(cache, tokens) == [0, 2 * P, last * P, last * P, last * P]
    assert cache.holds(cache.match(tokens), a.captured[last * P])


def test_a_session_that_takes_the_row_over_gets_no_tiles(cache):
    a = TileRequest(cache, tokens_from(1, 3), seed=1).admit().extend(2 * P + 1, 2 * P)

    def claim(req):
        req.detach_kv()
        return True

    with mock.patch.object(cache.tree, "claim_kv_row", claim):
        a.finish()
    assert (cache.free(), a.req.swa_tiles) == ((TILES, 13), None)
    cache.allocator.check_tiles([])


def test_tiles_inside_the_protected_prefix_are_not_published(cache):
    """The tree has these pages already, and would free them as duplicates."""
    tokens = tokens_from(1, 5)
    TileRequest(cache, tokens, seed=1).admit().extend(2 * P, 2 * P).finish()
    a = TileRequest(cache, tokens, seed=2).admit().extend(3 * P + 1, 3 * P)
    a.capture(P)
    a.capture(2 * P)
    a.checkpoint()
    cache.check(a)
    assert sorted(a.req.swa_tiles.tiles) == [P, 2 * P]
    assert hits(cache, tokens) == [0, 2 * P, 3 * P, 3 * P, 3 * P]
    a.finish()
    cache.check()
    assert cache.free() == (6, 13)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
