"""Decides, from scheduler state alone, what each step captures, and accounts for the tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.swa_bitexact.allocator import TileTokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_bitexact.placement import extend_boundaries, on_grid
from sglang.srt.mem_cache.swa_bitexact.tile_table import (
    CapturePlan,
    RequestTiles,
    TileCapture,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


@dataclass
class TileCounters:
    """Since start-up. planned = captured + dropped; returned: of aborted, retracted or
    finished requests, and off-grid ones that a later boundary replaced."""

    captured: int = 0
    dropped: int = 0
    returned: int = 0


class CapturePlanner:
    """Plans the captures of a scheduler's steps; one per scheduler.

    Every rank plans the same: it looks at lengths, and at how many tiles are free, which
    follows from the plans. It never looks at what a device holds.
    """

    def __init__(self, allocator: TileTokenToKVPoolAllocator, stride: int) -> None:
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.stride = stride
        self.counters = TileCounters()

    def plan_extend(self, batch: ScheduleBatch) -> CapturePlan | None:
        """The captures of a prefill batch whose slots are assigned; None if there are none.

        Takes tiles. Where fewer are free than wanted, the deepest boundaries get them.
        """
        captures: list[TileCapture] = []
        first_row = 0
        for req, start, length in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            boundaries = extend_boundaries(
                start,
                start + length,
                max(start + length, len(req.full_untruncated_fill_ids)),
                page_size=self.page_size,
                stride=self.stride,
                branch_at=req.swa_branching_seqlen,
            )
            captures += self._captures(req, boundaries, start, first_row, decode=False)
            first_row += length
        return self._take(captures)

    def plan_decode(self, batch: ScheduleBatch) -> CapturePlan | None:
        """The captures of a decode step: requests whose new length is a boundary."""
        at_boundary = batch.seq_lens_cpu % self.page_size == 0
        if not at_boundary.any():
            return None
        captures: list[TileCapture] = []
        for row in at_boundary.nonzero().flatten().tolist():
            # Rows beyond the requests are beams, whose slots the tree never sees.
            if row < len(batch.reqs):
                boundary = int(batch.seq_lens_cpu[row])
                captures += self._captures(
                    batch.reqs[row], (boundary,), boundary - 1, row, decode=True
                )
        return self._take(captures)

    def mixed(self, extend: ScheduleBatch, decode: ScheduleBatch) -> CapturePlan | None:
        """The plan of a mixed step: the decode batch's rows lie behind the prefill's flat rows."""
        return joined(
            extend.swa_capture_plan, decode.swa_capture_plan, extend.extend_num_tokens
        )

    def _captures(
        self,
        req: Req,
        boundaries: tuple[int, ...],
        start: int,
        first_row: int,
        *,
        decode: bool,
    ) -> list[TileCapture]:
        # What will not be published needs no tile.
        if not boundaries or req.skip_radix_cache_insert:
            return []
        if req.swa_tiles is None:
            req.swa_tiles = RequestTiles()
        owner, slot = req.swa_tiles, int(req.kv.req_pool_idx)
        return [
            TileCapture(owner, boundary, slot, start, first_row, decode)
            for boundary in boundaries
            if boundary not in owner.tiles
        ]

    def _take(self, captures: list[TileCapture]) -> CapturePlan | None:
        wanted = len(captures)
        count = min(wanted, self.allocator.tiles_available)
        self.counters.captured += count
        self.counters.dropped += wanted - count
        if count == 0:
            return None
        # Stable, so that every rank drops the same ones.
        captures = sorted(captures, key=lambda capture: -capture.boundary)[:count]
        tile_ids = self.allocator.alloc_tiles(count)
        assert tile_ids is not None, f"{count} tiles are free and were not handed out"
        for capture, tile_id in zip(captures, tile_ids.split(1), strict=True):
            capture.owner.tiles[capture.boundary] = tile_id
            capture.owner.in_flight.add(capture.boundary)
        return CapturePlan(tuple(captures), tile_ids)

    def finish(self, plan: CapturePlan) -> None:
        """The step's result is being processed: nothing of it will write a tile any more.

        Returns the tiles of requests that were released meanwhile (a zombie step), and the
        off-grid tile that a decode capture replaces.
        """
        back: list[torch.Tensor] = []
        for owner, boundary, *_, decode in plan.captures:
            owner.in_flight.discard(boundary)
            if owner.released:
                back += _pop(owner, boundary)
            elif decode:
                back += _pop(owner, owner.off_grid)
                kept = on_grid(boundary, page_size=self.page_size, stride=self.stride)
                owner.off_grid = None if kept else boundary
        self._return(back)

    def release(self, req: Req) -> None:
        """The request gives its slot up: its tiles go back, those in flight when they land."""
        owner = req.swa_tiles
        if owner is None:
            return
        req.swa_tiles = None
        owner.released = True
        settled = [b for b in owner.tiles if b not in owner.in_flight]
        self._return([tile for b in settled for tile in _pop(owner, b)])

    def _return(self, tiles: list[torch.Tensor]) -> None:
        if tiles:
            self.counters.returned += len(tiles)
            self.allocator.free_tiles(torch.cat(tiles))


def _pop(owner: RequestTiles, boundary: int | None) -> list[torch.Tensor]:
    """The tile of ``boundary``, removed from the table; none if it was published or is gone."""
    tile = None if boundary is None else owner.tiles.pop(boundary, None)
    return [] if tile is None else [tile]


def joined(
    extend: CapturePlan | None, decode: CapturePlan | None, extend_tokens: int
) -> CapturePlan | None:
    """Both plans as one; row r of the decode step is flat row ``extend_tokens + r``."""
    if decode is None:
        return extend
    moved = tuple(
        c._replace(first_row=c.first_row + extend_tokens) for c in decode.captures
    )
    if extend is None:
        return CapturePlan(moved, decode.tile_ids)
    return CapturePlan(
        extend.captures + moved, torch.cat((extend.tile_ids, decode.tile_ids))
    )
