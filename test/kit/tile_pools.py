"""A tile allocator over small real pools: no tree, no scheduler, no model."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_bitexact.allocator import TileTokenToKVPoolAllocator

PAGE = 256
WINDOW = 128
RATIOS = (0, 4, 128, 4)
ROWS = 16 * PAGE


def tile_pools(*, tiles: int = 8, ratios: tuple[int, ...] = RATIOS) -> TileTokenToKVPoolAllocator:
    """16 FULL pages, ``tiles`` tiles, 4 request slots; inside a ``server_context``."""
    slots = ReqToTokenPool(size=4, max_context_len=8192, device="cpu", enable_memory_saver=False)
    kvcache = small_pool(ROWS, ratios)
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


def small_pool(rows: int, ratios: tuple[int, ...]) -> DeepSeekV4TokenToKVPool:
    """A DeepSeek-V4 pool on unified_kv: ``rows`` FULL rows, one layer per entry of ``ratios``."""
    return DeepSeekV4TokenToKVPool(
        max_num_reqs=4,
        swa_size=8 * PAGE,
        c4_size=rows // 4,
        c128_size=rows // 128,
        c4_state_pool_size=64,
        c128_state_pool_size=640,
        page_size=PAGE,
        swa_page_size=PAGE,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=len(ratios),
        start_layer=0,
        end_layer=len(ratios),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=list(ratios),
        sliding_window=WINDOW,
    )
