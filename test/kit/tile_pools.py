"""A tile allocator over small real pools: no tree, no scheduler, no model."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_bitexact.allocator import TileTokenToKVPoolAllocator

from kit.tile_cache import PAGE, RATIOS, small_pool

ROWS = 16 * PAGE


def tile_pools(*, tiles: int = 8) -> TileTokenToKVPoolAllocator:
    """16 FULL pages, ``tiles`` tiles, 4 request slots; inside a ``server_context``."""
    slots = ReqToTokenPool(size=4, max_context_len=ROWS, device="cpu", enable_memory_saver=False)
    kvcache = small_pool(ROWS, RATIOS)
    slots.register_on_alloc_rows(kvcache.clear_c4_req_states)
    return TileTokenToKVPoolAllocator(
        ROWS,
        tiles * PAGE,
        page_size=PAGE,
        dtype=torch.float8_e4m3fn,
        device="cpu",
        kvcache=kvcache,
        need_sort=False,
        req_to_token_pool=slots,
    )
