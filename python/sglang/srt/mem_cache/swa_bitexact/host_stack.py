"""HiCache's host pools of the tiles, beside DeepSeek-V4's own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    PoolHitPolicy,
    PoolName,
    SidecarPoolSpec,
)
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.memory_pool_host import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
)
from sglang.srt.mem_cache.pool_host.base import ranks_per_host
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.swa_bitexact.evict import evict_tiles
from sglang.srt.mem_cache.swa_bitexact.storage_digests import StorageDigests
from sglang.srt.mem_cache.swa_bitexact.tile_budget import (
    check_host_memory,
    check_host_tiles,
    host_bytes_per_ratio,
    host_tiles,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.mem_cache.swa_bitexact.allocator import TileTokenToKVPoolAllocator
    from sglang.srt.mem_cache.swa_bitexact.capture_pool import CapturePool
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

logger = logging.getLogger(__name__)

# The tile's streams that have a host pool of their own, at the window's indices.
_STATE_POOLS = (
    ("c4_state", PoolName.DEEPSEEK_V4_C4_STATE),
    ("indexer_state", PoolName.DEEPSEEK_V4_C4_INDEXER_STATE),
)
# The copy kernels of the ``kernel`` backend move words of this size.
_COPY_WORD = 16


class TileStackStrategy(assembler._DeepSeekV4Strategy):
    """DeepSeek-V4's host stack with a mirror of the capture pool.

    Three pools, moved together because they share indices: the windows (PoolName.SWA) and, where
    there are ratio-4 layers, c4 and c4-indexer state.
    """

    def matches(self, kvcache: Any, components: set[ComponentType]) -> bool:
        return (
            super().matches(kvcache, components)
            and kvcache.capture_pool is not None
            and ComponentType.SWA in components
        )

    def build(
        self,
        *,
        cache: UnifiedRadixCache,
        kvcache: DeepSeekV4TokenToKVPool,
        params: CacheInitParams,
        storage_backend: str | None = None,
        storage_backend_extra_config: dict[str, Any] | None = None,
        prefetch_threshold: int = 256,
        model_name: str | None = None,
        **others: Any,
    ) -> assembler.StackBuildResult:
        """DeepSeek-V4's stack, and the tiles' host pools in its group.

        Allocates and pins host memory. The storage backend is attached last:
        it is given all pools at once, and its keys carry the identity of what is stored.

        Raises:
            NotImplementedError: the rings are fp8.
            LaunchError: the tiles do not fit. Besides, what attaching the backend raises.
        """
        from sglang.srt.mem_cache.swa_bitexact.identity import storage_identity

        pool = kvcache.capture_pool
        if pool.layout.window_rope is not None:
            raise NotImplementedError(
                "HiCache of bit-exact reuse found fp8 rings, whose windows have two rows per "
                "token; it mirrors bf16 rings only. Unset SGLANG_DSV4_UNIFIED_KV_FP8, or "
                "start without --enable-hierarchical-cache."
            )
        result = super().build(cache=cache, kvcache=kvcache, params=params, **others)
        group, controller = result.host_pool_group, result.cache_controller
        count = _host_tile_count(group, pool)
        for entry in _pool_entries(
            cache, kvcache, params.token_to_kv_pool_allocator, count
        ):
            controller.register_host_pool_entry(entry)
            if entry.name != PoolName.SWA:
                result.sidecars.append(
                    SidecarPoolSpec(
                        pool_name=entry.name,
                        indices_from_pool=PoolName.SWA,
                        hit_policy=PoolHitPolicy.TRAILING_PAGES,
                    )
                )
        result.component_host_pools[ComponentType.SWA] = group.get_pool(PoolName.SWA)
        result.pools_desc += " + tiles"
        group.anchor_entry.host_pool.storage_format_tag = storage_identity(
            pool.layout, kvcache, page_size=params.page_size
        )
        controller.tile_digests = StorageDigests(
            group,
            layout=get_memory().hicache_mem_layout,
            allocator_type=assembler._get_allocator_type(),
        )
        if storage_backend is not None:
            controller.attach_storage_backend(
                storage_backend=storage_backend,
                prefetch_threshold=prefetch_threshold,
                model_name=model_name,
                storage_backend_extra_config=storage_backend_extra_config,
                host_pools=group.entries,
            )
        return result


def register_tile_stack() -> None:
    """Let SGLang find the strategy, ahead of its own; further calls change nothing."""
    known = (type(strategy) for strategy in assembler._STRATEGIES)
    if TileStackStrategy not in known:
        assembler.register_stack_strategy(TileStackStrategy())


def bytes_per_ratio(params: CacheInitParams) -> int:
    """Host bytes that the stack takes for each 1.0 of --hicache-ratio, before it is built."""
    allocator = params.token_to_kv_pool_allocator
    kvcache = allocator.get_kvcache()
    mappings = assembler._resolve_deepseek_v4_layer_mappings(kvcache)
    regions = [
        assembler._dsv4_compressed_region_buffers(kvcache, ratio)
        for ratio, layers in ((4, mappings.c4), (128, mappings.c128))
        if layers
    ]
    if mappings.c4:
        regions += [
            (region.device_buffers, region.item_bytes)
            for region in assembler._dsv4_indexer_regions(kvcache, params.page_size)
        ]
    per_page = sum(len(buffers) * item_bytes for buffers, item_bytes in regions)
    pages = -(-allocator.size_full // params.page_size)
    return host_bytes_per_ratio(
        pages * per_page, get_memory().hicache_swa_host_tile_fraction
    )


def check_host_pools(params: CacheInitParams) -> None:
    """Refuse, by a LaunchError, host pools that do not fit: SGLang would fail where it makes them."""
    memory = get_memory()
    if memory.hicache_size > 0:
        rows = int(memory.hicache_size * 1e9)
        needed = host_bytes_per_ratio(rows, memory.hicache_swa_host_tile_fraction)
    else:
        needed = int(memory.hicache_ratio * bytes_per_ratio(params))
    check_host_memory(
        needed,
        available_bytes=available_host_memory_bytes(allow_cgroup_fallback=True),
        ranks=ranks_per_host(),
    )


def _host_tile_count(group: HostPoolGroup, pool: CapturePool) -> int:
    """Host tiles beside the pools that ``group`` has; checked, and warned of."""
    memory = get_memory()
    full_bytes = sum(_host_bytes(entry.host_pool) for entry in group.entries)
    fraction, tile_bytes = memory.hicache_swa_host_tile_fraction, pool.layout.nbytes
    count = host_tiles(full_bytes, fraction, tile_bytes)
    for warning in check_host_tiles(
        count,
        tile_bytes=tile_bytes,
        full_bytes=full_bytes,
        fraction=fraction,
        device_tiles=pool.num_tiles,
        available_bytes=available_host_memory_bytes(allow_cgroup_fallback=True),
        ranks=ranks_per_host(),
        stride=memory.hicache_swa_offload_page_stride,
    ):
        logger.warning("Bit-exact reuse: %s", warning)
    return count


def _host_bytes(host_pool: Any) -> int:
    """Bytes of a host pool's buffers; the anchor is logical and has none."""
    buffers = host_pool.kv_buffer
    if buffers is None:
        return 0
    return sum(b.nbytes for b in (buffers if isinstance(buffers, list) else [buffers]))


def _pool_entries(
    cache: UnifiedRadixCache,
    kvcache: DeepSeekV4TokenToKVPool,
    allocator: TileTokenToKVPoolAllocator,
    count: int,
) -> list[PoolEntry]:
    """The host pools of ``count`` tiles: the windows, and the states that exist."""
    pool = kvcache.capture_pool
    mappings = assembler._resolve_deepseek_v4_layer_mappings(kvcache)
    shape = {
        "num_host_pages": count,
        "layout": get_memory().hicache_mem_layout,
        "allocator_type": assembler._get_allocator_type(),
    }
    windows = pool.window_buffers()
    _check_copyable(windows, pool.layout.window.layer_bytes)
    entries = [
        assembler.build_pool_entry(
            name=PoolName.SWA,
            host_pool=DeepSeekV4PagedHostPool(
                pool_name=str(PoolName.SWA),
                device_buffers=windows,
                item_bytes=pool.layout.window.layer_bytes,
                slot_page_size=allocator.page_size,
                page_aligned_only=True,
                **shape,
            ),
            device_pool=pool,
            layer_mapping=mappings.full,
            transfer_layer_id_max=mappings.transfer_layer_id_max,
            host_evict_fn=lambda slots: cache.evict_host(slots, ComponentType.SWA),
            device_evict_fn=lambda slots: _evict_for_tiles(cache, allocator, slots),
            device_alloc_fn=allocator.alloc_tile_slots,
            device_free_fn=allocator.swa_attn_allocator.free,
        )
    ]
    for stream, name in _STATE_POOLS:
        geometry = pool.layout.streams.get(stream)
        if geometry is None:
            continue
        # The n-th state pool is loaded for the n-th of these layers.
        assert list(geometry.layers) == mappings.c4_state_global_layers, (
            f"{stream} tiles hold layers {geometry.layers}, HiCache transfers {mappings.c4_state_global_layers}"
        )
        states = pool.state_tiles(stream)
        _check_copyable(
            [state.kv_score_buffer.kv_score for state in states], geometry.layer_bytes
        )
        entries.append(
            assembler.build_pool_entry(
                name=name,
                host_pool=DeepSeekV4StateHostPool(
                    pool_name=str(name),
                    state_pools=states,
                    swa_page_size=allocator.page_size,
                    **shape,
                ),
                device_pool=None,
                layer_mapping=mappings.c4_state,
                transfer_layer_id_max=mappings.transfer_layer_id_max,
            )
        )
    return entries


def _check_copyable(buffers: list[torch.Tensor], item_bytes: int) -> None:
    """The ``kernel`` backend addresses tile t of a buffer at t * item_bytes, word by word."""
    assert item_bytes % _COPY_WORD == 0, (
        f"a layer's part of a tile is {item_bytes} B, no multiple of {_COPY_WORD}"
    )
    for buffer in buffers:
        assert buffer.is_contiguous() and buffer.data_ptr() % _COPY_WORD == 0, (
            f"a layer's tiles have strides {buffer.stride()} and begin at "
            f"{buffer.data_ptr()}; expected contiguous, at a multiple of {_COPY_WORD}"
        )


def _evict_for_tiles(
    cache: UnifiedRadixCache, allocator: TileTokenToKVPoolAllocator, slots: int
) -> None:
    """Evict windows until tiles for ``slots`` SWA slots are free, as far as the tree has any.

    Only the tiles that are missing. Stock would look at free request slots here, see plenty,
    and evict nothing.
    """
    missing = slots // allocator.page_size - allocator.tiles_available
    if missing > 0:
        evict_tiles(cache, missing)
