"""Requests that publish into a TileCache as a scheduler's do: real Req, match, lock, checkpoint, release.

No model computes: the rows are allocated, and a captured tile gets random bytes of its own.
"""

from __future__ import annotations

from array import array

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.swa_bitexact.tile_table import RequestTiles
from sglang.srt.sampling.sampling_params import SamplingParams

from kit.tile_cache import Tile, TileCache
from kit.tile_pools import PAGE


class TileRequest:
    """One request of ``cache``, from its match to its end; the cache has a planner attached.

    captured: copies of the tiles that it was given, by boundary.
    """

    def __init__(self, cache: TileCache, tokens: array[int], *, seed: int, extra_key: str | None = None) -> None:
        self.cache = cache
        self.seed = seed
        self.req = Req(
            rid=f"{seed}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1 << 20),
            extra_key=extra_key,
        )
        self.captured: dict[int, Tile] = {}

    def admit(self, *, for_reuse: bool = True) -> TileRequest:
        """Match, and lock what was found; its length is ``req.prefix_len``."""
        tree, req = self.cache.tree, self.req
        req.init_next_round_input(tree, for_reuse=for_reuse)
        req.lock = tree.lock(req.last_node)
        return self

    def extend(self, end: int, *captures: int) -> TileRequest:
        """Compute up to ``end``; with a tile at each boundary in ``captures``."""
        cache, req = self.cache, self.req
        start = req.prefix_len
        slots = cache.req_to_token_pool
        new = not req.kv.holds_kv
        slots.alloc([req])
        if new:
            prefix = cache.tree.path_device_indices(req.last_node)[:start]
            slots.write((req.kv.req_pool_idx, slice(0, start)), prefix.to(torch.int32))
            req.kv.kv_allocated_len = start
        if new:
            cache.tree.restore_swa_windows([req], torch.tensor([req.kv.req_pool_idx]))
        allocated = -(-req.kv.kv_allocated_len // PAGE) * PAGE
        pages = -(-(end - allocated) // PAGE) if end > allocated else 0
        if pages:
            rows = cache.allocator.full_attn_allocator.alloc(pages * PAGE)
            assert rows is not None, "no FULL rows left"
            assert not cache.allocator.full_to_swa_index_mapping[rows].any(), "FULL rows come with a mapping"
            slots.write((req.kv.req_pool_idx, slice(allocated, allocated + pages * PAGE)), rows.to(torch.int32))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = end
        for boundary in captures:
            self.capture(boundary)
        return self

    def capture(self, boundary: int) -> None:
        """Take a tile for ``boundary`` and fill it."""
        if self.req.swa_tiles is None:
            self.req.swa_tiles = RequestTiles()
        tile_id = self.cache.allocator.alloc_tiles(1)
        assert tile_id is not None, "no tile left"
        self.cache.fill(int(tile_id), self.seed * 100_000 + boundary)
        self.captured[boundary] = self.cache.tile(int(tile_id))
        self.req.swa_tiles.tiles[boundary] = tile_id

    def checkpoint(self) -> TileRequest:
        """What the scheduler does after a chunk or a prefill that goes on to decode."""
        checkpoint_kv_cache(self.req, self.cache.tree)
        return self

    def finish(self) -> TileRequest:
        """The end of a request that is done."""
        self.req.finished_reason = FINISH_LENGTH(length=1)
        release_kv_cache(self.req, self.cache.tree, checkpoint=True)
        return self

    def abort(self) -> TileRequest:
        """The end of a request that is aborted or retracted."""
        release_kv_cache(self.req, self.cache.tree, checkpoint=False)
        return self
