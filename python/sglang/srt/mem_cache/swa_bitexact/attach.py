"""Joins capture to the pools of one model runner."""

from __future__ import annotations

from sglang.srt.mem_cache.swa_bitexact.allocator import TileTokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_bitexact.capture import TileWriter
from sglang.srt.mem_cache.swa_bitexact.planner import CapturePlanner
from sglang.srt.runtime_context import get_memory


def attach_capture(allocator: TileTokenToKVPoolAllocator) -> None:
    """Set ``allocator.capture_planner``, which the scheduler asks, and its KV pool's
    ``tile_writer``, which the attention backend asks."""
    stride = get_memory().hicache_swa_offload_page_stride
    allocator.capture_planner = CapturePlanner(allocator, stride)
    kvcache = allocator.get_kvcache()
    kvcache.tile_writer = TileWriter(kvcache, allocator.capture_pool)
