"""Which state rows belong to which window: the contract for whoever moves them elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.mem_cache.swa_bitexact.layout import STATE_STREAMS

if TYPE_CHECKING:
    from sglang.srt.mem_cache.swa_bitexact.capture_pool import CapturePool


class SwaStateCoupling(NamedTuple):
    """Where one compressor's overlap rows of a window are.

    swa_page_size, ring_size: a window at SWA slots [s - swa_page_size, s) is coupled with the
    ring_size rows that row() gives for its last ring_size slots. layer_id: global. is_indexer:
    the c4 indexer's compressor, else c4 attention's. buffer: [rows, width], of the tiles'
    dtype, contiguous; the storage itself, not a copy.

    Contract: rows and window are one thing. They are written together at capture, freed
    together with the SWA page, and of no use alone. Who stores a window stores all coupled
    rows; who brings one back brings all of them, before its SWA page is mapped, or drops the
    window and lets its tokens be computed again.
    """

    swa_page_size: int
    ring_size: int
    layer_id: int
    is_indexer: bool
    buffer: torch.Tensor

    def row(self, swa_slot: int) -> int:
        """The row of ``buffer`` that is coupled with one SWA slot.

        Example, swa_page_size 256, ring_size 4: the page of tile 3 is slots 768 to 1,023; its
        last four, 1,020 to 1,023, are coupled with rows 12, 13, 14, 15.
        """
        page, offset = divmod(swa_slot, self.swa_page_size)
        return page * self.ring_size + offset % self.ring_size


def state_couplings(pool: CapturePool) -> list[SwaStateCoupling]:
    """One entry per coupled state buffer: c4 attention's layers, ascending, then the indexer's."""
    return [
        SwaStateCoupling(
            swa_page_size=pool.layout.page_size,
            ring_size=tiles.ring_size,
            layer_id=layer_id,
            is_indexer=name == "indexer_state",
            buffer=tiles.kv_score_buffer.kv_score,
        )
        for name in STATE_STREAMS
        if name in pool.layout.streams
        for layer_id, tiles in zip(
            pool.layout.streams[name].layers, pool.state_tiles(name), strict=True
        )
    ]
