"""The stock SWA allocator in ring mode, with the capture pool as its paged SWA pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, EvictParams
from sglang.srt.mem_cache.swa_bitexact.capture_pool import CapturePool
from sglang.srt.mem_cache.swa_bitexact.layout import TileLayout

# Frees that are kept for later at most; requests without a boundary only ever free.
_FREES_BEFORE_COUNT = 256


class TileTokenToKVPoolAllocator(SWATokenToKVPoolAllocator):
    """FULL pages as ever; SWA pages are tiles, mapped only where one was published.

    A FULL page is handed out unmapped. Where a tile ends at B, publish maps the page
    [B - P, B) to it; freeing that page gives the tile back, freeing any other gives nothing.
    What stock asks of the SWA side keeps its meaning, request slots: swa_available_size,
    the prefill budget, size_swa. The tiles have figures of their own.

    Which tiles a free gives back is known to the device only. What was freed is looked at when
    tiles run short, are counted, or many frees have come together: only then does the host
    wait for the device.
    """

    def __init__(self, size: int, size_swa: int, **kwargs: Any) -> None:
        # SWA slots of freed pages, not looked at yet: 0 where a page had no tile.
        self._freed_slots: list[torch.Tensor] = []
        super().__init__(size, size_swa, **kwargs)
        kvcache = self.get_kvcache()
        layout = TileLayout.of_pool(kvcache, self.page_size)
        with kvcache.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.capture_pool = CapturePool(
                layout, self.swa_attn_allocator.num_pages, self.device
            )
        kvcache.capture_pool = self.capture_pool
        self._page_offsets = torch.arange(self.page_size, device=self.device)

    # Tiles ---------------------------------------------------------------------

    @property
    def tiles_available(self) -> int:
        """Free tiles. Synchronizes if something was freed since it was last counted."""
        self._collect_freed()
        return self.swa_attn_allocator.available_size() // self.page_size

    def tiles_up_to(self, count: int) -> int:
        """``count``, or the number of free tiles if fewer are free; counts only if it must."""
        if self.swa_attn_allocator.available_size() >= count * self.page_size:
            return count
        return min(count, self.tiles_available)

    def tiles_evictable(self, tree_cache: BasePrefixCache) -> int:
        """Tiles that the tree would give up: those of unlocked nodes."""
        return tree_cache.swa_evictable_size() // self.page_size

    def alloc_tiles(self, count: int) -> torch.Tensor | None:
        """``count`` tile ids, int64 [count] on the device, or None if fewer are free.

        Which tiles they are is known to the device only.
        """
        slots = self.alloc_tile_slots(count * self.page_size)
        return None if slots is None else slots[:: self.page_size] // self.page_size

    def alloc_tile_slots(self, need_size: int) -> torch.Tensor | None:
        """Whole tiles as the SWA slots that stand for them, int64 [need_size]; None if short."""
        if self.swa_attn_allocator.available_size() < need_size:
            self._collect_freed()
        return self.swa_attn_allocator.alloc(need_size)

    def _collect_freed(self) -> None:
        if self._freed_slots:
            slots, self._freed_slots = torch.cat(self._freed_slots), []
            super()._release_swa(slots)

    def free_tiles(self, tile_ids: torch.Tensor) -> None:
        """Give tiles back that no FULL page is mapped to; each of them once."""
        self.swa_attn_allocator.free_page_ids(tile_ids)

    def map_tile(self, full_page: torch.Tensor, tile_id: torch.Tensor) -> None:
        """Map one page's FULL indices, int64 [page_size], to the tile, int64 [1]."""
        slots = torch.add(self._page_offsets, tile_id, alpha=self.page_size)
        # One operation: assigning by index first broadcasts, expands and checks.
        self.full_to_swa_index_mapping.index_copy_(0, full_page, slots)

    def check_tiles(self, held: Iterable[torch.Tensor]) -> None:
        """Every tile is free, mapped to one FULL page, or in ``held``, exactly once. Synchronizes.

        held: tile ids that requests own, int64 tensors of any length.

        Raises:
            AssertionError: names the tiles that are lost or have several owners.
        """
        self._collect_freed()
        slots = self.full_to_swa_index_mapping[: -1 : self.page_size]
        owned = [
            self.swa_attn_allocator.get_all_free_pages(),
            slots[slots > 0] // self.page_size,
            *held,
        ]
        count = torch.bincount(
            torch.cat([ids.cpu() for ids in owned]),
            minlength=self.capture_pool.num_tiles + 1,
        )
        lost = (count[1:] == 0).nonzero().flatten() + 1
        shared = (count > 1).nonzero().flatten()
        assert not lost.numel() and not shared.numel() and not count[0], (
            f"lost tiles {lost.tolist()}, tiles with several owners {shared.tolist()}"
        )

    # What stock drops in ring mode ---------------------------------------------

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Give back the tiles mapped to any page touched by ``free_index``, in any order."""
        if free_index.numel():
            self._free_mapped(free_index // self.page_size * self.page_size)

    def free_swa_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """free_swa() for a run of a kv row that begins at a page boundary."""
        assert start_pos % self.page_size == 0, (
            f"segment start {start_pos} is no multiple of {self.page_size}"
        )
        if free_index.numel():
            self._free_mapped(free_index[:: self.page_size])

    def _free_mapped(self, page_starts: torch.Tensor) -> None:
        # Read now: a later action of the same group may map the page to another tile.
        slots = self.full_to_swa_index_mapping[page_starts]
        self.clear_full_to_swa_mapping(self._expand_to_full_pages(page_starts))
        if self.free_group is None:
            self._release_swa(slots)
        else:
            self.swa_free_group.append(slots)

    def _release_swa(self, swa_indices: torch.Tensor) -> None:
        self._freed_slots.append(swa_indices)
        if len(self._freed_slots) == _FREES_BEFORE_COUNT:
            self._collect_freed()

    def evict_to_free_tokens(
        self, tree_cache: BasePrefixCache | None, num_tokens: int
    ) -> None:
        """Evict FULL rows for ``num_tokens``; a shortage of request slots evicts no tile."""
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return
        shortfall = num_tokens - self.full_available_size()
        if shortfall > 0:
            tree_cache.evict_for_alloc(EvictParams(num_tokens=shortfall))

    def alloc_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self._unmapped(super().alloc_extend(*args, **kwargs))

    def alloc_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self._unmapped(super().alloc_decode(*args, **kwargs))

    def _unmapped(self, indices: torch.Tensor | None) -> torch.Tensor | None:
        """With SGLANG_DEBUG_MEMORY_POOL: what is handed out must not carry a tile."""
        if indices is not None and self.full_attn_allocator.debug_mode:
            pages = indices // self.page_size * self.page_size
            fresh = pages[indices == pages]
            mapped = self.full_to_swa_index_mapping[fresh]
            assert not mapped.any(), (
                f"FULL pages {fresh[mapped > 0].tolist()} are handed out with tiles "
                f"{(mapped[mapped > 0] // self.page_size).tolist()}: their free lost the tile"
            )
        return indices

    def clear(self) -> None:
        self._freed_slots = []
        super().clear()

    def resize(self, config: Any) -> None:
        super().resize(config)
        # The storage of the tiles stays: only FULL pools are resized after start-up.
        self.swa_attn_allocator.num_pages = self.capture_pool.num_tiles
        self.swa_attn_allocator.size = self.capture_pool.num_tiles * self.page_size
        self.clear()
