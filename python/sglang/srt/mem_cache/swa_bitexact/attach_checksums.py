"""Joins the debug checksums to the pools, the tree and its HiCache controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.swa_bitexact.checksum import TileChecksums

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


def attach_checksums(cache: UnifiedRadixCache) -> None:
    """Let writer, reader and, if there is one, the HiCache controller call the same checks.

    Call with the tree, and again once HiCache has its pools.
    """
    kvcache = cache.token_to_kv_pool_allocator.get_kvcache()
    # Neither attribute is there yet while the tree is being made.
    group = getattr(cache, "host_pool_group", None)
    controller = getattr(cache, "cache_controller", None)
    entries = () if group is None else group.entries
    host_pools = {entry.name: entry.host_pool for entry in entries}
    checksums = TileChecksums(kvcache.capture_pool, host_pools)
    kvcache.tile_writer.checksums = kvcache.tile_reader.checksums = checksums
    if controller is not None:
        controller.tile_checksums = checksums
