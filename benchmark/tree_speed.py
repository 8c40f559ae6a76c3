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
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kit.tile_cache import TileCache, server_context, tree_params
from kit.tile_pools import PAGE, tile_pools
from kit.tile_requests import TileRequest, prefill

_SYSTEMS, _SYSTEM_PAGES, _OWN_PAGES = 8, 4, 2
# More than the 128 tokens that the off tree computes again.
_TAIL = 200
_NODES = (1_000, 10_000, 100_000)
CALLS = ("match", "insert", "publish")
_POOLS: dict[str, Any] = {"ratios": (128,), "head": (4, 4)}


def _prompt(number: int, own_pages: int = _OWN_PAGES) -> array[int]:
    """The tokens of one prompt; without own pages, a system prompt and a started page."""
    system, own = number % _SYSTEMS, _SYSTEMS + number
    tokens = array("q", range(system * _SYSTEM_PAGES * PAGE, (system + 1) * _SYSTEM_PAGES * PAGE))
    start = own * _SYSTEM_PAGES * PAGE
    tokens.extend(range(start, start + own_pages * PAGE + _TAIL))
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
        self.seconds: dict[str, list[float]] = {call: [] for call in CALLS}
        tree = cache.tree
        self._time(tree, "match_prefix", "match")
        self._time(tree, "insert", "insert")
        # The insert, with the mapping of the tile before it.
        self._time(tree.tile_publisher or tree, "insert", "publish")

    def _time(self, owner: Any, method: str, name: str) -> None:
        call = getattr(owner, method)

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments)
            self.seconds[name].append(time.perf_counter() - begin)
            return result

        setattr(owner, method, timed)

    def serve(self, number: int, own_pages: int = _OWN_PAGES) -> None:
        """One request, from match to end."""
        tokens = _prompt(number, own_pages)
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
    return SimpleNamespace(
        allocator=allocator,
        req_to_token_pool=allocator._req_to_token_pool,
        tree=UnifiedRadixCache(params=tree_params(allocator, core, swa_gates_prefix_match=False)),
        controller=None,
    )


def measure(
    core: str, nodes: tuple[int, ...] = _NODES, samples: int = 500, *, branches: bool = False
) -> dict[str, Any]:
    """Median seconds at each size of the off tree: of ``samples`` matches of prompts that are there, of as
    many inserts of new ones, and of their publishing, which with the switch on first maps the tile.

    Each system prompt comes first as a prompt of its own, so that both trees have the same nodes. With
    ``branches`` none does: a tile at the branch point then makes a node that only the on tree has.
    """
    prompts = nodes[-1] + samples * len(nodes)
    pages = prompts * _OWN_PAGES + 1000
    rows: list[dict[str, Any]] = []
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

        if not branches:
            for tree in trees.values():
                for system in range(_SYSTEMS):
                    tree.serve(system, own_pages=0)
        for size in nodes:
            while trees["off"].nodes() < size:
                for _ in range(max(1, (size - trees["off"].nodes()) // 4)):
                    serve()
            print(f"{size} nodes: {done} prompts", file=sys.stderr)
            count = {side: tree.nodes() for side, tree in trees.items()}
            for tree in trees.values():
                for seconds in tree.seconds.values():
                    seconds.clear()
            for number in range(samples):
                for side in ("off", "on") if number % 2 else ("on", "off"):
                    found = trees[side].look(number * done // samples)
                    assert found == (_SYSTEM_PAGES + _OWN_PAGES) * PAGE, f"{side} found {found} tokens"
            matches = {side: tree.seconds["match"][:] for side, tree in trees.items()}
            for _ in range(samples):
                serve()
            rows.append(
                {
                    "nodes": count,
                    "match": _compared(matches),
                    **{
                        call: _compared({side: tree.seconds[call] for side, tree in trees.items()})
                        for call in ("insert", "publish")
                    },
                }
            )
    growth = {call: {side: rows[-1][call][side] / rows[0][call][side] for side in trees} for call in CALLS}
    return {"core": core, "samples": samples, "sizes": rows, "growth": growth}


def _compared(seconds: dict[str, list[float]]) -> dict[str, float]:
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    return {**medians, "ratio": medians["on"] / medians["off"]}
