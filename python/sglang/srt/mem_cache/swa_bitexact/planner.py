"""Decides, from scheduler state alone, what each step captures, and accounts for the tiles."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.swa_bitexact.allocator import TileTokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_bitexact.evict import evict_tiles
from sglang.srt.mem_cache.swa_bitexact.placement import extend_boundaries, on_grid
from sglang.srt.mem_cache.swa_bitexact.tile_table import (
    CapturePlan,
    RequestTiles,
    TileCapture,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

logger = logging.getLogger(__name__)


@dataclass
class TileCounters:
    """Since start-up. planned = captured + dropped; returned: of aborted, retracted or
    finished requests, and decode tiles that a later boundary replaced, which are superseded
    as well."""

    captured: int = 0
    dropped: int = 0
    returned: int = 0
    superseded: int = 0


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

        Takes tiles, enters them in ``req.swa_tiles`` (made here) and counts. Where fewer are
        free than wanted, older carriers leave the device; if that is not enough, every
        request's last boundary comes first.
        """
        captures: list[TileCapture] = []
        first_row = 0
        for req, start, length in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            end = start + length
            boundaries = extend_boundaries(
                start,
                end,
                max(end, len(req.full_untruncated_fill_ids)),
                page_size=self.page_size,
                stride=self.stride,
                branch_at=req.swa_branching_seqlen,
            )
            captures += self._captures(
                req, boundaries, start, end, first_row, decode=False
            )
            first_row += length
        return self._take(captures, batch.tree_cache)

    def plan_decode(self, batch: ScheduleBatch) -> CapturePlan | None:
        """The captures of a decode step: requests whose new length is a boundary.

        Takes tiles as plan_extend() does. Where too few are free, a request's older decode
        tile makes room for its newer one first.
        """
        at_boundary = batch.seq_lens_cpu % self.page_size == 0
        if not at_boundary.any():
            return None
        captures: list[TileCapture] = []
        for row in at_boundary.nonzero().flatten().tolist():
            # Rows beyond the requests are beams, whose slots the tree never sees.
            if row < len(batch.reqs):
                boundary = int(batch.seq_lens_cpu[row])
                captures += self._captures(
                    batch.reqs[row],
                    (boundary,),
                    boundary - 1,
                    boundary,
                    row,
                    decode=True,
                )
        return self._take(captures, batch.tree_cache)

    def plan_mixed(
        self, extend: ScheduleBatch, decode: ScheduleBatch
    ) -> CapturePlan | None:
        """Both batches' plans as one: row r of ``decode`` is flat row r behind ``extend``'s."""
        first, second = extend.swa_capture_plan, decode.swa_capture_plan
        if second is None:
            return first
        moved = tuple(
            c._replace(first_row=c.first_row + extend.extend_num_tokens)
            for c in second.captures
        )
        if first is None:
            return CapturePlan(moved, second.tile_ids)
        return CapturePlan(
            first.captures + moved, torch.cat((first.tile_ids, second.tile_ids))
        )

    def _captures(
        self,
        req: Req,
        boundaries: tuple[int, ...],
        start: int,
        end: int,
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
            TileCapture(
                owner,
                boundary,
                slot,
                start,
                first_row,
                at_end=boundary == end,
                decode=decode,
            )
            for boundary in boundaries
            if boundary not in owner.tiles
        ]

    def _take(
        self, captures: list[TileCapture], cache: UnifiedRadixCache
    ) -> CapturePlan | None:
        """Take tiles, enter them in their owners' tables, count; None without any."""
        wanted = len(captures)
        count = self.allocator.tiles_up_to(wanted)
        if count < wanted:
            self._give_up_superseded(captures, wanted - count)
            count = self.allocator.tiles_up_to(wanted)
        if count < wanted:
            evict_tiles(cache, wanted - count)
            count = self.allocator.tiles_up_to(wanted)
        self.counters.captured += count
        # A request's last boundary before its others, the deepest first; stable, so that
        # every rank drops the same ones.
        last: dict[int, int] = {}
        for c in captures:
            last[id(c.owner)] = max(c.boundary, last.get(id(c.owner), 0))
        captures.sort(key=lambda c: (c.boundary < last[id(c.owner)], -c.boundary))
        captures, dropped = captures[:count], captures[count:]
        self._drop(dropped)
        if not captures:
            return None
        tile_ids = self.allocator.alloc_tiles(count)
        assert tile_ids is not None, f"{count} tiles are free and were not handed out"
        for capture, tile_id in zip(captures, tile_ids.split(1), strict=True):
            capture.owner.tiles[capture.boundary] = tile_id
            capture.owner.in_flight.add(capture.boundary)
        return CapturePlan(tuple(captures), tile_ids)

    def _give_up_superseded(self, captures: list[TileCapture], missing: int) -> None:
        """Return up to ``missing`` older decode tiles of requests that capture a newer one."""
        back: list[torch.Tensor] = []
        for owner, *_, decode in captures:
            if decode and len(back) < missing:
                back += self._oldest_decoded(owner)
        self.counters.superseded += len(back)
        self._return(back)

    def _oldest_decoded(self, owner: RequestTiles) -> list[torch.Tensor]:
        while owner.decoded:
            boundary = owner.decoded.pop(0)
            # A published one is the tree's, and no longer in the table.
            if tile := _pop(owner, boundary):
                owner.dropped[boundary] = True
                return tile
        return []

    def _drop(self, captures: list[TileCapture]) -> None:
        """Enter captures without a tile in their owners' tables; log at 1, 2, 4, 8, ... of them."""
        for capture in captures:
            capture.owner.dropped[capture.boundary] = capture.decode
        before = self.counters.dropped
        self.counters.dropped += len(captures)
        if before.bit_length() < self.counters.dropped.bit_length():
            logger.warning(
                "Bit-exact reuse: tiles are short, %d reuse points dropped so far. Raise "
                "--hicache-swa-device-tile-fraction or --hicache-swa-offload-page-stride.",
                self.counters.dropped,
            )

    def finish(self, plan: CapturePlan) -> None:
        """The step's result is being processed: its captures are settled; once is enough.

        Returns the tiles of requests that were released meanwhile (a zombie step), and the
        off-grid tile that a decode capture replaces. Under overlap the device may not be done
        yet: whoever is given a tile next must write it on the forward stream, or wait for it.
        """
        back: list[torch.Tensor] = []
        for owner, boundary, *_, decode in plan.captures:
            if boundary not in owner.in_flight:
                continue
            owner.in_flight.remove(boundary)
            if owner.released:
                back += _pop(owner, boundary)
            elif decode:
                if owner.decoded and not self.keeps(owner.decoded[-1]):
                    older = _pop(owner, owner.decoded.pop())
                    self.counters.superseded += len(older)
                    back += older
                owner.decoded.append(boundary)
        self._return(back)

    def keeps(self, boundary: int) -> bool:
        """Whether ``boundary`` has a tile wherever in a request it lies."""
        return on_grid(boundary, page_size=self.page_size, stride=self.stride)

    def release(self, req: Req) -> None:
        """The request gives its slot up: its tiles go back, those in flight when they land.

        Takes ``req.swa_tiles`` away and counts what is returned.
        """
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


def _pop(owner: RequestTiles, boundary: int) -> list[torch.Tensor]:
    """The tile of ``boundary``, removed from the table; none if it was published or is gone."""
    tile = owner.tiles.pop(boundary, None)
    return [] if tile is None else [tile]
