"""What a reuse point takes of the host's memory: of the real pools, in bytes.

    python benchmark/host_memory.py [--json]

A tree of V4-Flash's geometry with HiCache: the bytes of its host pools per tile, beside the tile's own.
Where pools are resident from the start, as here, writing tiles to them makes the process grow by what is
kept beside them alone: nodes, locks, digests. That is measured too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["SGLANG_PLATFORM"] = "cpu_ref"
os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test"))

import psutil

from geometry import FLASH
from paired import peak_memory, script

_TILES = 12
_POOLS = ("window", "c4_state", "indexer_state")


def measure() -> dict[str, Any]:
    """Write tiles to the host, and count."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    from kit.tile_cache import TileCache, server_context, tokens_from

    with (
        server_context(hicache_ratio=8.0) as args,
        TileCache(args, ratios=FLASH.ratios, tiles=_TILES, publishes=False) as cache,
    ):
        group = cache.tree.host_pool_group
        names = {
            "window": PoolName.SWA,
            "c4_state": PoolName.DEEPSEEK_V4_C4_STATE,
            "indexer_state": PoolName.DEEPSEEK_V4_C4_INDEXER_STATE,
        }
        tiles = _count(group.get_pool(PoolName.SWA))
        pools = {name: _nbytes(group.get_pool(pool)) for name, pool in names.items()}
        process = psutil.Process()
        before = process.memory_info().rss
        for number in range(_TILES):
            tokens = tokens_from(number * 1_000, 1)
            cache.publish_random(tokens, 256, number)
        cache.settle()
        grown = process.memory_info().rss - before
        return {
            "tile_bytes": cache.allocator.capture_pool.layout.nbytes,
            "host_tiles": tiles,
            "host_bytes_per_tile": sum(pools.values()) / tiles,
            "host_bytes_by_pool": pools,
            "rss_growth_per_tile": grown / _TILES,
            "peak_memory_bytes": peak_memory(),
        }


def _nbytes(pool: Any) -> int:
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, list) else [pool.kv_buffer]
    return int(sum(buffer.nbytes for buffer in buffers))


def _count(pool: Any) -> int:
    return int(pool.size // 256)


def show(result: dict[str, Any]) -> None:
    print(
        f"a tile is {result['tile_bytes']:,} B; the host pools of {result['host_tiles']} tiles take "
        f"{result['host_bytes_per_tile']:,.0f} B each; writing one made the process grow by "
        f"{result['rss_growth_per_tile']:,.0f} B more"
    )


if __name__ == "__main__":
    script(__doc__, measure, show)
