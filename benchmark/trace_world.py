"""A trace against the real tree, allocator, planner, publisher and HiCache; nothing computes.

One block of 512 tokens of the trace is one page of the cache. The requests run one after the other,
in chunks as on a server, and end with their prompt: a trace has no ids for answers.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from kit.tile_cache import TileCache, server_context
from kit.tile_pools import PAGE, tile_pools
from kit.tile_requests import TileRequest, prefill
from make_trace import BLOCK
from trace_policies import Policy, TraceRequest

# One layer, and rows of 16 bytes: a tile of 2 KiB, where V4-Flash has 6.2 MiB.
_RATIOS, _HEAD = (128,), (4, 4)
_TILE_BYTES = PAGE // 2 * sum(_HEAD) * 2


@dataclass(frozen=True)
class Sizes:
    """Pages and tiles on the device and on the host."""

    device_pages: int
    device_tiles: int
    host_pages: int
    host_tiles: int


def tokens_of(request: TraceRequest) -> array[int]:
    """Tokens that are equal exactly where the blocks are; a started block is a started page.

    Example: 600 trace tokens are one page and 44 tokens.
    """
    rest = request.tokens % BLOCK
    started = np.array(request.ids[: request.blocks + (rest > 0)], dtype=np.int64)
    tokens = (1 + started[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
    length = request.blocks * PAGE + min(PAGE - 1, -(-rest * PAGE // BLOCK))
    return array("q", tokens[:length].tobytes())


class _Request(TileRequest):
    """A tile's bytes stay as they are."""

    def fill(self, boundary: int, tile_id: torch.Tensor) -> None:
        self.cache.taken.append(boundary)


class World(TileCache):
    """The cache of one run, and what is counted.

    taken: boundaries of the tiles that the request now running was given.
    """

    def __init__(self, args: Any, sizes: Sizes, *, core: str, context: int, policy: Policy) -> None:
        allocator = tile_pools(
            tiles=sizes.device_tiles, ratios=_RATIOS, pages=sizes.device_pages, context=context, head=_HEAD
        )
        assert allocator.capture_pool.layout.nbytes == _TILE_BYTES, "the tile's bytes decide how many the host has"
        super().__init__(args, core=core, publishes=True, allocator=allocator)
        self.planner = allocator.capture_planner
        self.planner.stride = policy.stride
        self.host_windows = self.tree.host_pool_group.get_pool(PoolName.SWA)
        assert self.host_windows.size // PAGE == sizes.host_tiles, (
            f"{self.host_windows.size // PAGE} host tiles, {sizes.host_tiles} asked for"
        )
        self.taken: list[int] = []
        self.device_taken = self.host_taken = 0
        self.seconds: dict[str, list[float]] = {"match": [], "insert": []}
        self.tree.match_prefix = self._timed("match", self.tree.match_prefix)
        self.tree.insert = self._timed("insert", self.tree.insert)
        self.host_windows.alloc = self._counted(self.host_windows.alloc, "host_taken")
        allocator.swa_attn_allocator.alloc = self._counted(allocator.swa_attn_allocator.alloc, "device_taken")

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments, **keywords)
            self.seconds[name].append(time.perf_counter() - begin)
            return result

        return timed

    def _counted(self, alloc: Callable[[int], Any], counter: str) -> Callable[[int], Any]:
        def counted(need_size: int) -> Any:
            slots = alloc(need_size)
            if slots is not None:
                setattr(self, counter, getattr(self, counter) + need_size // PAGE)
            return slots

        return counted

    def serve(self, tokens: array[int], *, number: int, chunk: int) -> int:
        """One request, from match to end; the tokens that it reused."""
        self.taken = []
        request = _Request(self, tokens, seed=number).admit()
        reused = done = request.req.prefix_len
        while done < len(tokens):
            end = min(len(tokens), done + chunk)
            self.allocator.evict_to_free_tokens(self.tree, -(-(end - done) // PAGE) * PAGE)
            plan = prefill(self, (request, end))
            request.take_restores()
            if plan is not None:
                self.planner.finish(plan)
            if end < len(tokens):
                request.checkpoint()
            done = end
        request.finish()
        self.settle()
        return reused

    def used(self) -> tuple[int, int, int, int]:
        """Device pages, device tiles, host pages and host tiles that are taken now."""
        group, allocator = self.tree.host_pool_group, self.allocator
        return (
            allocator.full_attn_allocator.num_pages - allocator.full_available_size() // PAGE,
            allocator.capture_pool.num_tiles - allocator.tiles_available,
            (group.size - group.available_size()) // PAGE,
            (self.host_windows.size - self.host_windows.available_size()) // PAGE,
        )


def replay(
    trace: list[TraceRequest],
    policy: Policy,
    sizes: Sizes,
    *,
    core: str,
    chunk: int,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """One policy's figures; counts are the same in every run. chunk: tokens of a prefill step."""
    page_bytes = (PAGE // 128) * sum(_HEAD) * 2
    tile_share = (sizes.host_tiles + 0.5) * _TILE_BYTES / (sizes.host_pages * page_bytes)
    longest = max(len(request.ids) for request in trace)
    arguments = {
        "hicache_ratio": (sizes.host_pages + 0.5) / sizes.device_pages,
        "hicache_swa_host_tile_fraction": tile_share / (1 + tile_share),
    }
    superseded: set[int] = set()
    peak = (0, 0, 0, 0)
    with (
        server_context(**arguments) as args,
        policy.applied(),
        World(args, sizes, core=core, context=(longest + 2) * PAGE, policy=policy) as world,
    ):
        for number, request in enumerate(trace):
            reused = world.serve(tokens_of(request), number=number, chunk=chunk)
            # Every reuse point of this path but the deepest.
            points = sorted({reused, *world.taken} - {0})
            superseded.update(request.ids[point // PAGE - 1] for point in points[:-1])
            peak = tuple(max(a, b) for a, b in zip(peak, world.used(), strict=True))
            progress(number + 1)
        world.check()
        _, device_tiles, _, host_tiles = world.used()
        counters, reuse = world.planner.counters, world.tree.restore_queue.receipts.counters
        return {
            "nominal_blocks": reuse.nominal_tokens // PAGE,
            "effective_blocks": reuse.effective_tokens // PAGE,
            "tiles": counters.captured,
            "dropped": counters.dropped,
            "superseded": len(superseded),
            "evicted_device": world.device_taken - counters.returned - device_tiles,
            "evicted_host": world.host_taken - host_tiles,
            "peak": dict(zip(("device_pages", "device_tiles", "host_pages", "host_tiles"), peak, strict=True)),
            "seconds": {name: quantiles(values) for name, values in world.seconds.items()},
        }


def quantiles(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    median, p99 = np.quantile(values, (0.5, 0.99))
    return {"calls": len(values), "median": float(median), "p99": float(p99)}
