"""Joins capture to the pools of one model runner."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_memory


def attach_capture(allocator: Any) -> None:
    """Give a tile allocator its planner, and its KV pool the writer; others stay as they are."""
    kvcache = allocator.get_kvcache()
    pool = getattr(kvcache, "capture_pool", None)
    if pool is None:
        return
    from sglang.srt.mem_cache.swa_bitexact.capture import TileWriter
    from sglang.srt.mem_cache.swa_bitexact.planner import CapturePlanner

    stride = get_memory().hicache_swa_offload_page_stride
    allocator.capture_planner = CapturePlanner(allocator, stride)
    kvcache.tile_writer = TileWriter(kvcache, pool)
