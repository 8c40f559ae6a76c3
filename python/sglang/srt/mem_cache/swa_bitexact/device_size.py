"""How many tiles the device holds: a share of KV memory, decided with all other pool sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.dsv4.unified_kv_gate import is_unified_kv_fp8
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DSV4_FP8_NOPE_ROW_BYTES
from sglang.srt.mem_cache.swa_bitexact.layout import STATE_ROWS, TileLayout
from sglang.srt.mem_cache.swa_bitexact.tile_budget import (
    check_device_tiles,
    device_tiles,
    tiles_per_step,
)
from sglang.srt.model_executor.pool_configurator import (
    DSV4PoolConfigurator,
    _get_dsv4_compress_state_dtype_sizes,
)
from sglang.srt.runtime_context import get_memory, get_schedule

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig

# What SGLANG_DSV4_COMPRESS_STATE_DTYPE can mean, by the c4 state's bytes per element.
_STATE_DTYPES = {4: torch.float32, 2: torch.bfloat16}


class TilePoolConfigurator(DSV4PoolConfigurator):
    """DeepSeek-V4's pool sizes with ``--hicache-swa-device-tile-fraction`` of KV memory for tiles.

    In ring mode stock sizes a paged SWA pool that nothing uses; its size becomes the number of
    tiles, one page each, so that allocator, host pools and resize find it where they look.
    """

    def __init__(self, kvc: KVCacheConfigurator) -> None:
        super().__init__(kvc)
        self.tile_bytes = self._layout(kvc.layer_info.start_layer).nbytes
        self.tile_fraction = get_memory().hicache_swa_device_tile_fraction
        self._compressed_bytes_per_token = self.bytes_per_full_token
        # Memory that is divided by this leaves the fraction free for the tiles.
        self.bytes_per_full_token /= 1 - self.tile_fraction

    def _layout(self, start_layer: int) -> TileLayout:
        fp8 = is_unified_kv_fp8()
        return TileLayout.build(
            page_size=self.page_size,
            window=self.sliding_window_size,
            ring_rows=self._swa_ring_size,
            state_ring_rows=self.ring_sizes.get(4, STATE_ROWS),
            ratios=self.stage_compress_ratios,
            start_layer=start_layer,
            window_width=DSV4_FP8_NOPE_ROW_BYTES if fp8 else self.attn_head_dim,
            window_dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16,
            rope_width=self.qk_rope_head_dim if fp8 else None,
            state_width=4 * self.attn_head_dim,
            indexer_state_width=4 * self.indexer_head_dim,
            state_dtype=_STATE_DTYPES[_get_dsv4_compress_state_dtype_sizes()[0]],
        )

    def _get_swa_tokens(self, full_token: int, page_size: int) -> int:
        tiles = device_tiles(
            full_token * self._compressed_bytes_per_token,
            self.tile_fraction,
            self.tile_bytes,
        )
        return tiles * page_size

    def finalize_with_max_running_requests(
        self, config: MemoryPoolConfig
    ) -> MemoryPoolConfig:
        config = super().finalize_with_max_running_requests(config)
        stride = get_memory().hicache_swa_offload_page_stride
        tiles = config.swa_max_total_num_tokens // self.page_size
        check_device_tiles(
            tiles,
            tile_bytes=self.tile_bytes,
            fraction=self.tile_fraction,
            max_running_requests=config.max_running_requests,
            step_tiles=tiles_per_step(
                get_schedule().chunked_prefill_size,
                page_size=self.page_size,
                stride=stride,
            ),
            stride=stride,
        )
        return config
