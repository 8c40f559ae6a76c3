"""The stock allocator in ring mode with the capture pool behind it: what is freed, and what not."""

from __future__ import annotations

import sys
import unittest.mock
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import server_context
from kit.tile_pools import PAGE, ROWS, tile_pools

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

TILES = 8


@pytest.fixture(autouse=True)
def _context():
    with server_context():
        yield


@pytest.fixture
def allocator():
    return tile_pools(tiles=TILES)


def full(allocator, pages):
    """FULL indices of ``pages`` fresh pages."""
    return allocator.full_attn_allocator.alloc(pages * PAGE)


def mapped(allocator, pages, at):
    """``pages`` fresh FULL pages; page ``at`` carries a tile. Returns indices and the tile."""
    indices, tile = full(allocator, pages), allocator.alloc_tiles(1)
    allocator.map_tile(indices[at * PAGE : (at + 1) * PAGE], tile)
    return indices, tile


def test_sizes_keep_their_stock_meaning(allocator):
    # Ring capacity in request slots: 4 slots, a ring of 128 rows priced as one page.
    assert allocator.swa_available_size() == 4 * PAGE
    assert allocator.size_swa == 4 * PAGE
    assert allocator.available_size() == ROWS
    allocator.alloc_tiles(5)
    assert allocator.swa_available_size() == 4 * PAGE
    assert allocator.available_size() == ROWS
    assert allocator.tiles_available == 3


def test_tiles_are_handed_out_once_and_never_the_padding_page(allocator):
    ids = allocator.alloc_tiles(TILES)
    assert sorted(ids.tolist()) == list(range(1, TILES + 1))
    assert allocator.alloc_tiles(1) is None
    allocator.free_tiles(ids[2:4])
    assert sorted(allocator.alloc_tiles(2).tolist()) == sorted(ids[2:4].tolist())


def test_a_full_page_is_handed_out_unmapped(allocator):
    indices, _ = mapped(allocator, 3, at=1)
    allocator.free(indices)
    again = full(allocator, ROWS // PAGE)
    assert not allocator.full_to_swa_index_mapping[again].any()


@pytest.mark.parametrize("free", ["free", "free_segment", "free_swa", "free_swa_segment"])
def test_free_of_a_mapped_page_returns_exactly_its_tile(allocator, free):
    indices, tile = mapped(allocator, 4, at=2)
    other, other_tile = mapped(allocator, 1, at=0)
    keywords = {"start_pos": 0} if free.endswith("segment") else {}
    getattr(allocator, free)(indices, **keywords)
    assert allocator.tiles_available == TILES - 1
    allocator.check_tiles([])
    assert tile.item() in allocator.swa_attn_allocator.free_pages.tolist()
    assert (allocator.full_to_swa_index_mapping[other] // PAGE == other_tile).all()


@pytest.mark.parametrize("free", ["free", "free_segment", "free_swa", "free_swa_segment"])
def test_free_of_an_unmapped_page_returns_nothing(allocator, free):
    mapped(allocator, 1, at=0)
    indices = full(allocator, 3)
    keywords = {"start_pos": 0} if free.endswith("segment") else {}
    getattr(allocator, free)(indices, **keywords)
    assert allocator.tiles_available == TILES - 1
    allocator.check_tiles([])


def test_a_free_of_the_window_alone_leaves_the_page(allocator):
    indices, _ = mapped(allocator, 2, at=1)
    before = allocator.full_available_size()
    allocator.free_swa_segment(indices, start_pos=0)
    assert allocator.full_available_size() == before
    assert not allocator.full_to_swa_index_mapping[indices].any()
    # What follows is stock's two-step free: the FULL half finds its peer released.
    allocator.free_full_segment(indices, start_pos=0)
    assert allocator.full_available_size() == before + 2 * PAGE


def test_indices_in_any_order_and_several_of_a_page_free_each_tile_once(allocator):
    first, _ = mapped(allocator, 2, at=1)
    second, _ = mapped(allocator, 1, at=0)
    touched = torch.cat((first[PAGE + 7 : PAGE + 9], second[3:4], first[PAGE : PAGE + 1], first[PAGE + 7 : PAGE + 8]))
    allocator.free_swa(touched)
    assert allocator.tiles_available == TILES
    allocator.check_tiles([])


def test_empty_frees_do_nothing(allocator):
    nothing = torch.empty(0, dtype=torch.int64)
    allocator.free_swa(nothing)
    allocator.free_swa_segment(nothing, start_pos=0)
    assert allocator.tiles_available == TILES


def test_a_segment_that_begins_inside_a_page_is_refused(allocator):
    indices, _ = mapped(allocator, 1, at=0)
    with pytest.raises(AssertionError, match="segment start 5 is no multiple of 256"):
        allocator.free_swa_segment(indices[5:], start_pos=5)


def test_a_group_returns_its_tiles_at_its_end(allocator):
    indices, _ = mapped(allocator, 2, at=0)
    more, _ = mapped(allocator, 2, at=1)
    allocator.free_group_begin()
    allocator.free_segment(indices, start_pos=0)
    allocator.free(more)
    assert allocator.tiles_available == TILES - 2
    allocator.free_group_end()
    assert allocator.tiles_available == TILES
    allocator.check_tiles([])


def test_a_page_mapped_anew_inside_a_group_keeps_its_new_tile(allocator):
    indices, old = mapped(allocator, 1, at=0)
    allocator.free_group_begin()
    allocator.free_swa_segment(indices, start_pos=0)
    new = allocator.alloc_tiles(1)
    allocator.map_tile(indices, new)
    allocator.free_group_end()
    assert new.item() != old.item()
    assert (allocator.full_to_swa_index_mapping[indices] // PAGE == new).all()
    assert allocator.tiles_available == TILES - 1
    allocator.check_tiles([])


def test_a_page_freed_twice_in_a_group_returns_its_tile_once(allocator):
    indices, _ = mapped(allocator, 1, at=0)
    allocator.free_group_begin()
    allocator.free_swa(indices)
    allocator.free_swa_segment(indices, start_pos=0)
    allocator.free_group_end()
    assert allocator.tiles_available == TILES
    allocator.check_tiles([])


def test_a_free_does_not_wait_and_does_not_pile_up(allocator):
    """Which tiles came back is looked at when one is missing, or after many frees."""
    collected = unittest.mock.Mock(wraps=allocator._collect_freed)
    with unittest.mock.patch.object(allocator, "_collect_freed", collected):
        mapped_rows = [mapped(allocator, 1, at=0)[0] for _ in range(TILES)]
        for indices in mapped_rows:
            allocator.free_segment(indices, start_pos=0)
        assert collected.call_count == 0
        assert allocator.tiles_up_to(0) == 0 and collected.call_count == 0
        assert allocator.tiles_up_to(TILES + 1) == TILES and collected.call_count == 1
        for _ in range(1_000):
            allocator.free_segment(full(allocator, 1), start_pos=0)
        assert collected.call_count == 1 + 1_000 // 256
    assert len(allocator._freed_slots) < 256
    allocator.check_tiles([])


def test_clear_takes_every_tile_and_mapping_back(allocator):
    mapped(allocator, 3, at=1)
    allocator.alloc_tiles(2)
    allocator.clear()
    assert allocator.tiles_available == TILES
    assert not allocator.full_to_swa_index_mapping[:-1].any()
    allocator.check_tiles([])


def test_resize_of_the_full_pool_keeps_the_tiles_that_have_storage(allocator):
    allocator.alloc_tiles(2)
    allocator.resize(SimpleNamespace(full_max_total_num_tokens=2048, swa_max_total_num_tokens=3 * PAGE))
    assert allocator.full_available_size() == 2048
    assert allocator.tiles_available == TILES
    allocator.check_tiles([])


class _Tree:
    """Records what an allocation asks to be evicted."""

    def __init__(self):
        self.asked = []

    def supports_prefix_sharing(self):
        return True

    def evict_for_alloc(self, params):
        self.asked.append(params)


def test_a_shortage_of_request_slots_evicts_no_tile(allocator):
    tree = _Tree()
    allocator._req_to_token_pool.free_slots.clear()
    assert allocator.swa_available_size() == 0
    allocator.evict_to_free_tokens(tree, PAGE)
    assert tree.asked == []


def test_a_shortage_of_full_rows_evicts_full_rows_only(allocator):
    tree = _Tree()
    full(allocator, 15)
    allocator.evict_to_free_tokens(tree, 3 * PAGE)
    assert tree.asked == [EvictParams(num_tokens=2 * PAGE, swa_num_tokens=0)]


def test_check_tiles_names_what_is_lost_and_what_is_shared(allocator):
    held = allocator.alloc_tiles(2)
    with pytest.raises(AssertionError, match=r"lost tiles \[1, 2\], tiles with several owners \[\]"):
        allocator.check_tiles([])
    allocator.free_tiles(held[:1])
    with pytest.raises(AssertionError, match=r"lost tiles \[\], tiles with several owners \[1\]"):
        allocator.check_tiles([held])


def test_debug_mode_refuses_to_hand_out_a_page_with_a_tile(allocator):
    allocator.full_attn_allocator.debug_mode = True
    tile = allocator.alloc_tiles(1)
    page = allocator.full_attn_allocator.free_pages[:1] * PAGE + torch.arange(PAGE)
    allocator.map_tile(page, tile)
    lens = torch.tensor([PAGE])
    with pytest.raises(AssertionError, match="handed out with tiles"):
        allocator.alloc_extend(torch.tensor([0]), torch.tensor([0]), lens, lens, torch.tensor([-1]), PAGE)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
