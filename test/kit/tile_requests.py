"""Requests that publish into a TileCache as a scheduler's do: real Req, match, lock, checkpoint, release.

No model computes: the rows are allocated, and a captured tile gets random bytes of its own.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import cast

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.swa_bitexact.restore import RestorePlan
from sglang.srt.mem_cache.swa_bitexact.tile_table import CapturePlan, RequestTiles
from sglang.srt.sampling.sampling_params import SamplingParams

from kit.tile_cache import Tile, TileCache
from kit.tile_pools import PAGE


class TileRequest:
    """One request of ``cache``, from its match to its end; the cache has a planner attached.

    seed: what its tiles are filled from. captured: copies of the tiles that it was given, by boundary.
    """

    def __init__(self, cache: TileCache, tokens: array[int], *, seed: int) -> None:
        self.cache = cache
        self.seed = seed
        self.req = Req(
            rid=f"{seed}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1 << 20),
        )
        self.captured: dict[int, Tile] = {}

    @property
    def rows(self) -> torch.Tensor:
        """The FULL rows of everything that it holds, int64."""
        kv = self.req.kv
        return self.cache.req_to_token_pool.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len].long()

    # Admission -----------------------------------------------------------------

    def match(self, *, for_reuse: bool = True) -> TileRequest:
        """The match that an admission begins with; what is reused on the device is ``req.prefix_len``."""
        self.req.init_next_round_input(self.cache.tree, for_reuse=for_reuse)
        return self

    def admit(self, *, loads: bool = True) -> TileRequest:
        """Match, load what the host has if ``loads``, and lock; what is reused is ``req.prefix_len``."""
        tree, req = self.cache.tree, self.match().req
        if loads and (req.host_hit_length or req.swa_host_hit_length):
            tree.load_back_threshold = 0
            loaded, req.last_node = tree.init_load_back(
                InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
            )
            req.prefix_len += loaded
            req.kv.cache_protected_len = req.prefix_len
        req.lock = tree.lock(req.last_node)
        return self

    # Steps ---------------------------------------------------------------------

    def extend(self, end: int, *captures: int, in_flight: bool = False) -> TileRequest:
        """Compute up to ``end``; with a tile at each boundary in ``captures``."""
        self.take_rows(end)
        for boundary in captures:
            self.capture(boundary, in_flight=in_flight)
        return self

    def decode(self, end: int, *captures: int) -> TileRequest:
        """Generate tokens up to ``end``: position p gets the token p + 1,000,000."""
        known = len(self.req.origin_input_ids) + len(self.req.output_ids)
        self.req.output_ids.extend(range(1_000_000 + known, 1_000_000 + end + 1))
        return self.extend(end, *captures)

    def take_rows(self, end: int) -> None:
        """A slot and its prefix if it is the first step, queueing its restore, and rows up to ``end``."""
        cache, req = self.cache, self.req
        slots = cache.req_to_token_pool
        new = not req.kv.holds_kv
        assert slots.alloc([req]) is not None, "no request slot left"
        if new:
            prefix = cache.tree.path_device_indices(req.last_node)[: req.prefix_len]
            slots.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), prefix.to(torch.int32))
            req.kv.kv_allocated_len = req.prefix_len
        allocated = -(-req.kv.kv_allocated_len // PAGE) * PAGE
        pages = -(-(end - allocated) // PAGE) if end > allocated else 0
        if pages:
            rows = cache.allocator.full_attn_allocator.alloc(pages * PAGE)
            assert rows is not None, "no FULL rows left"
            assert not cache.allocator.full_to_swa_index_mapping[rows].any(), "FULL rows come with a mapping"
            slots.write((req.kv.req_pool_idx, slice(allocated, allocated + pages * PAGE)), rows.to(torch.int32))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = end
        cache.tree.restore_swa_windows([req], torch.tensor([req.kv.req_pool_idx]))

    def take_restores(self) -> RestorePlan | None:
        """The restores that were queued since they were taken last, as the batch takes them."""
        loads = self.cache.controller is not None and self.cache.tree.ready_to_load_host_cache() >= 0
        return self.cache.tree.restore_queue.take(layer_wise=loads)

    def capture(self, boundary: int, *, in_flight: bool = False) -> None:
        """Take a tile for ``boundary`` and fill it; ``in_flight``: the step's result is not processed."""
        if self.req.swa_tiles is None:
            self.req.swa_tiles = RequestTiles()
        tile_id = self.cache.allocator.alloc_tiles(1)
        assert tile_id is not None, "no tile left"
        self.fill(boundary, tile_id)
        self.req.swa_tiles.tiles[boundary] = tile_id
        if in_flight:
            self.req.swa_tiles.in_flight.add(boundary)

    def fill(self, boundary: int, tile_id: torch.Tensor) -> None:
        """Random bytes into the tile of ``boundary``."""
        self.cache.fill(int(tile_id), self.seed * 100_000 + boundary)
        self.captured[boundary] = self.cache.tile(int(tile_id))

    # Ends ----------------------------------------------------------------------

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
        """The end of a request that is aborted."""
        release_kv_cache(self.req, self.cache.tree, checkpoint=False)
        return self

    def retract(self) -> TileRequest:
        """Its slot is taken away; it may be admitted again."""
        self.abort().req.reset_for_retract()
        return self


def prefill(cache: TileCache, *parts: tuple[TileRequest, int]) -> CapturePlan | None:
    """One prefill step of (request, end), captured as the cache's planner plans it."""
    for request, end in parts:
        request.take_rows(end)
    batch = SimpleNamespace(
        reqs=[request.req for request, _ in parts],
        prefix_lens=[request.req.prefix_len for request, _ in parts],
        extend_lens=[end - request.req.prefix_len for request, end in parts],
        tree_cache=cache.tree,
    )
    plan = cache.allocator.capture_planner.plan_extend(cast(ScheduleBatch, batch))
    owners = {id(request.req.swa_tiles): request for request, _ in parts}
    for capture in plan.captures if plan is not None else ():
        owners[id(capture.owner)].fill(capture.boundary, capture.owner.tiles[capture.boundary])
    return plan
