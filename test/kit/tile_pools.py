"""A tile allocator over small real pools: no tree, no scheduler, no model."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_bitexact.allocator import TileTokenToKVPoolAllocator

PAGE = 256
WINDOW = 128
RATIOS = (0, 4, 128, 4)
ROWS = 16 * PAGE
HEAD = (448, 64)


def tile_pools(
    *,
    tiles: int = 8,
    ratios: tuple[int, ...] = RATIOS,
    pages: int = ROWS // PAGE,
    context: int = 8192,
    head: tuple[int, int] = HEAD,
    stock: bool = False,
) -> TileTokenToKVPoolAllocator:
    """``pages`` FULL pages, ``tiles`` tiles, 4 request slots; inside a ``server_context``.

    context: most tokens of a request. head: the nope and rope halves of a window row's width, in
    elements; small ones are for runs in which many tiles matter and their bytes do not. stock: SGLang's
    own allocator, as with the switch off.
    """
    slots = ReqToTokenPool(size=4, max_context_len=context, device="cpu", enable_memory_saver=False)
    kvcache = small_pool(pages * PAGE, ratios, head)
    slots.register_on_alloc_rows(kvcache.clear_c4_req_states)
    return (SWATokenToKVPoolAllocator if stock else TileTokenToKVPoolAllocator)(
        pages * PAGE,
        tiles * PAGE,
        page_size=PAGE,
        dtype=torch.float8_e4m3fn,
        device="cpu",
        kvcache=kvcache,
        need_sort=False,
        req_to_token_pool=slots,
    )


def small_pool(rows: int, ratios: tuple[int, ...], head: tuple[int, int] = HEAD) -> DeepSeekV4TokenToKVPool:
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
        qk_nope_head_dim=head[0],
        qk_rope_head_dim=head[1],
        indexer_head_dim=128,
        layer_num=len(ratios),
        start_layer=0,
        end_layer=len(ratios),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=list(ratios),
        sliding_window=WINDOW,
    )
