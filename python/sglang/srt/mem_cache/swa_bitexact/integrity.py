"""Checks that windows, rows and tiles of one rank fit together. For idle moments and tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


def check_tree(cache: UnifiedRadixCache, held: Iterable[torch.Tensor] = ()) -> None:
    """Every window of the tree has a tile, and every tile one owner. Synchronizes.

    Beside SGLang's own sanity_check(), which takes mapping 0 for a window. Walks the whole
    tree: milliseconds per thousand pages.

    held: tile ids that requests own, int64 tensors of any length; none while idle.

    Raises:
        AssertionError: names the pages or tiles: a node with a window whose rows are
            unmapped, a mapped page that is free or that no node with a window holds, a tile
            that is lost or owned twice.
    """
    allocator = cache.token_to_kv_pool_allocator
    page_size = allocator.page_size
    mapping = allocator.full_to_swa_index_mapping
    rows = cache.tree_core.walk_for_kv_canary(False, True).slot_indices
    slots = mapping[rows.to(mapping.device)].cpu()
    unmapped = rows[slots == 0] // page_size
    assert not unmapped.numel(), (
        f"nodes have windows without a tile on FULL pages {unmapped.unique().tolist()}"
    )
    windows = set((rows // page_size).unique().tolist())
    # The last entry is the padding row's.
    mapped = (mapping[:-1:page_size] > 0).nonzero().flatten().tolist()
    free = set(allocator.full_attn_allocator.get_all_free_pages().tolist())
    assert not free.intersection(mapped), (
        f"free FULL pages {sorted(free.intersection(mapped))} are mapped to tiles"
    )
    assert windows == set(mapped), (
        f"FULL pages {sorted(windows.symmetric_difference(mapped))} are mapped to tiles "
        f"and belong to no window, or the reverse"
    )
    allocator.check_tiles(held)
