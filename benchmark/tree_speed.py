"""Match and insert on trees of growing size, switch on against off.

Both trees take the same requests in turns: prompts of six whole pages and a started one, of which four
pages are one of a few system prompts. Off is what a server without the switch builds: SGLang's ring
allocator, a tree whose windows gate nothing, no publisher. There are no host pools on either side.
"""

from __future__ import annotations

import statistics
import sys
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kit.tile_cache import TileCache, server_context
from kit.tile_pools import PAGE, WINDOW, tile_pools
from kit.tile_requests import TileRequest, prefill

_SYSTEMS, _SYSTEM_PAGES, _OWN_PAGES = 8, 4, 2
# More than the 128 tokens that the off tree computes again.
_TAIL = 200
_POOLS: dict[str, Any] = {"ratios": (128,), "head": (4, 4)}


def _prompt(number: int) -> array[int]:
    """The tokens of one prompt; with its number below _SYSTEMS times two, a system prompt's first and second."""
    system, own = number % _SYSTEMS, _SYSTEMS + number
    tokens = array("q", range(system * _SYSTEM_PAGES * PAGE, (system + 1) * _SYSTEM_PAGES * PAGE))
    start = own * _SYSTEM_PAGES * PAGE
    tokens.extend(range(start, start + _OWN_PAGES * PAGE + _TAIL))
    return tokens


class _Request(TileRequest):
    """A tile's bytes stay as they are."""

    def fill(self, boundary: int, tile_id: Any) -> None:
        pass


class _Tree:
    """One tree, and the seconds of its calls."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.newest = 0
        self.match_seconds: list[float] = []
        self.insert_seconds: list[float] = []
        tree = cache.tree
        tree.match_prefix = self._timed(tree.match_prefix, self.match_seconds)
        # The publisher's insert is the tree's, and what a tile needs around it.
        inserts = tree.tile_publisher or tree
        inserts.insert = self._timed(inserts.insert, self.insert_seconds)

    @staticmethod
    def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments)
            seconds.append(time.perf_counter() - begin)
            return result

        return timed

    def serve(self, number: int) -> None:
        """One request, from match to end."""
        tokens = _prompt(number)
        request = _Request(self.cache, tokens, seed=number).admit()
        if (planner := self.cache.allocator.capture_planner) is None:
            request.take_rows(len(tokens))
        else:
            plan = prefill(self.cache, (request, len(tokens)))
            assert plan is not None, "the last boundary gets a tile"
            planner.finish(plan)
            request.take_restores()
        request.finish()
        self.newest = max(self.newest, int(request.req.last_node))

    def look(self, number: int) -> int:
        """A match of a prompt that is there; the tokens that it found."""
        return int(_Request(self.cache, _prompt(number), seed=number).match().req.prefix_len)

    def nodes(self) -> int:
        """Nodes, up to one: they are numbered, none was ever deleted, and the newest prompt's are the last."""
        return self.newest


def _off_cache(pages: int, core: str) -> Any:
    """What TileRequest needs of a cache, around a stock tree."""
    allocator = tile_pools(pages=pages, stock=True, **_POOLS)
    params = CacheInitParams(
        req_to_token_pool=allocator._req_to_token_pool,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        disable=False,
        sliding_window_size=WINDOW,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
        swa_gates_prefix_match=False,
        tree_core_backend=core,
    )
    return SimpleNamespace(
        allocator=allocator,
        req_to_token_pool=params.req_to_token_pool,
        tree=UnifiedRadixCache(params=params),
        controller=None,
    )


def measure(core: str, nodes: tuple[int, ...] = (1_000, 10_000, 100_000), samples: int = 500) -> dict[str, Any]:
    """Medians at each size of the off tree, of ``samples`` matches and of as many inserts."""
    prompts = nodes[-1] + samples * len(nodes)
    pages = prompts * _OWN_PAGES + 1000
    rows = []
    with server_context(hicache_swa_offload_page_stride=0) as args:
        pools = tile_pools(pages=pages, tiles=prompts + 100, **_POOLS)
        on = TileCache(args, core=core, publishes=True, hicache=False, allocator=pools)
        trees = {"off": _Tree(_off_cache(pages, core)), "on": _Tree(on)}
        done = 0

        def serve() -> None:
            nonlocal done
            # In turns, and in turns first.
            for side in ("off", "on") if done % 2 else ("on", "off"):
                trees[side].serve(done)
            done += 1

        for size in nodes:
            while trees["off"].nodes() < size:
                for _ in range(max(1, (size - trees["off"].nodes()) // 4)):
                    serve()
            print(f"{size} nodes: {done} prompts", file=sys.stderr)
            for tree in trees.values():
                tree.match_seconds.clear()
                tree.insert_seconds.clear()
            count = {side: tree.nodes() for side, tree in trees.items()}
            for number in range(samples):
                for side in ("off", "on") if number % 2 else ("on", "off"):
                    found = trees[side].look(number * done // samples)
                    assert found == (_SYSTEM_PAGES + _OWN_PAGES) * PAGE, f"{side} found {found} tokens"
            matches = {side: list(tree.match_seconds) for side, tree in trees.items()}
            for _ in range(samples):
                serve()
            rows.append(
                {
                    "nodes": count,
                    "match": _compared(matches),
                    "insert": _compared({side: tree.insert_seconds for side, tree in trees.items()}),
                }
            )
    growth = {
        call: {side: rows[-1][call][side] / rows[0][call][side] for side in trees} for call in ("match", "insert")
    }
    return {"core": core, "samples": samples, "sizes": rows, "growth": growth}


def _compared(seconds: dict[str, list[float]]) -> dict[str, float]:
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    return {**medians, "ratio": medians["on"] / medians["off"]}
