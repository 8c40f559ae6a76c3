"""Joins metrics and the start-up line to one scheduler, once everything is there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.swa_bitexact.metrics import TileMetrics
from sglang.srt.mem_cache.swa_bitexact.startup_line import (
    TilePoolFacts,
    geometry_text,
    startup_line,
    stride_advice,
)
from sglang.srt.runtime_context import get_memory, get_parallel

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.metrics_reporter import (
        SchedulerMetricsReporter,
    )
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

logger = logging.getLogger(__name__)


def attach_observe(
    cache: UnifiedRadixCache, reporter: SchedulerMetricsReporter
) -> None:
    """Set ``reporter.tile_metrics`` if metrics are on; the first rank logs what the start gave."""
    if reporter.enable_metrics:
        reporter.tile_metrics = TileMetrics(cache, reporter.metrics_collector)
    if get_parallel().tp_rank == 0:
        logger.info("%s", describe(cache))


def describe(cache: UnifiedRadixCache) -> str:
    """The start-up line of ``cache``'s pools."""
    pool = cache.token_to_kv_pool_allocator.capture_pool
    layout, memory = pool.layout, get_memory()
    layers = {name: len(stream.layers) for name, stream in layout.streams.items()}
    host = identity = storage = None
    tiles, rows = pool.num_tiles, cache.token_to_kv_pool_allocator.size_full
    if (group := cache.host_pool_group) is not None:
        tiles = group.get_pool(PoolName.SWA).size // layout.page_size
        rows = group.size
        host = TilePoolFacts(tiles, memory.hicache_swa_host_tile_fraction)
        identity = group.anchor_entry.host_pool.storage_format_tag
        storage = memory.hicache_storage_backend
    return startup_line(
        geometry_text(
            window_layers=layers["window"],
            window=layout.window.rows,
            state_layers=layers.get("c4_state", 0),
            indexer_layers=layers.get("indexer_state", 0),
            page_size=layout.page_size,
            stride=memory.hicache_swa_offload_page_stride,
        ),
        layout.nbytes,
        TilePoolFacts(pool.num_tiles, memory.hicache_swa_device_tile_fraction),
        host,
        storage=storage,
        identity=identity,
        advice=(stride_advice(tiles, rows // layout.page_size, layout.page_size),),
    )
