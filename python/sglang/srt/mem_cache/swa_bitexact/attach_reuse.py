"""Joins publish and restore to the tree of one scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.swa_bitexact.publish import TilePublisher
from sglang.srt.mem_cache.swa_bitexact.receipt import ReuseReceipts
from sglang.srt.mem_cache.swa_bitexact.restore import RestoreQueue, TileReader

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


def attach_reuse(cache: UnifiedRadixCache) -> None:
    """Set ``cache.tile_publisher`` and ``cache.restore_queue``, which its own methods ask, and
    its KV pool's ``tile_reader``, which the model runner asks."""
    allocator = cache.token_to_kv_pool_allocator
    cache.tile_publisher = TilePublisher(cache)
    cache.restore_queue = RestoreQueue(
        allocator, cache.req_to_token_pool, ReuseReceipts(cache)
    )
    kvcache = allocator.get_kvcache()
    kvcache.tile_reader = TileReader(kvcache.tile_writer)
