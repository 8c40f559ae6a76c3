"""The tiles on the device: plain storage, addressed by SWA page id."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.mem_cache.deepseek_v4_compress_state import KVAndScore
from sglang.srt.mem_cache.swa_bitexact.layout import (
    STATE_STREAMS,
    TileLayout,
    TileStream,
)

# The allocator's padding page, never handed out: its state rows are a cleared slot's.
CLEARED_TILE = 0


class StateTiles(NamedTuple):
    """One layer's state rows in the shape in which SGLang's state host pool reads a pool."""

    ring_size: int
    kv_score_buffer: KVAndScore


class CapturePool:
    """Storage for ``num_tiles`` tiles; tile ids are the page ids 1..num_tiles.

    The stock allocator hands the ids out as pages of its paged SWA pool, so a tile's window
    and state are found under one id, on the device and in every transfer. Id 0 is the
    allocator's padding page: it is never handed out, and holds what the overlap rows of a
    slot are before its first token.

    buffers: per stream of the layout, [layers, num_tiles + 1, rows, width], contiguous.
    """

    def __init__(self, layout: TileLayout, num_tiles: int, device: str) -> None:
        self.layout = layout
        self.num_tiles = num_tiles
        self.device = device
        self.buffers = {
            name: torch.zeros(self._shape(stream), dtype=stream.dtype, device=device)
            for name, stream in layout.streams.items()
        }
        self.clear_tile()

    def clear_tile(self) -> None:
        """Give the state rows of tile 0 SGLang's cleared values: kv 0, score -inf."""
        for name in STATE_STREAMS:
            if name in self.buffers:
                kv, score = self.buffers[name][:, CLEARED_TILE].chunk(2, dim=-1)
                kv.zero_()
                score.fill_(float("-inf"))

    def _shape(self, stream: TileStream) -> tuple[int, int, int, int]:
        return len(stream.layers), self.num_tiles + 1, stream.rows, stream.width

    @property
    def nbytes(self) -> int:
        """Bytes of the storage, the padding page included."""
        return (self.num_tiles + 1) * self.layout.nbytes

    def window_buffers(self) -> list[torch.Tensor]:
        """Per layer uint8 [num_tiles + 1, bytes of the layer's window]: views for a host pool.

        Under fp8 the nope rows of all layers come first, then the rope rows.
        """
        return [
            layer.view(torch.uint8).view(self.num_tiles + 1, -1)
            for name in ("window", "window_rope")
            if name in self.buffers
            for layer in self.buffers[name]
        ]

    def state_tiles(self, name: str) -> list[StateTiles]:
        """Per ratio-4 layer the rows of stream ``name`` as [(num_tiles + 1) * 4, width]."""
        stream = self.layout.streams.get(name)
        if stream is None:
            return []
        return [
            StateTiles(stream.rows, KVAndScore(layer.view(-1, stream.width)))
            for layer in self.buffers[name]
        ]

    def tile(self, tile_id: int) -> dict[str, torch.Tensor]:
        """A copy of one tile, [layers, rows, width] per stream. Synchronizes; for checks."""
        return {
            name: buffer[:, tile_id].clone() for name, buffer in self.buffers.items()
        }
