"""What a tile consists of: pure geometry, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

# Overlapping compressors look back by one group: at a boundary, its last four rows.
STATE_ROWS = 4
WINDOW_STREAMS = ("window", "window_rope")
STATE_STREAMS = ("c4_state", "indexer_state")
_C128 = 128


class TileStream(NamedTuple):
    """One kind of row in a tile: ``rows`` rows of every layer in ``layers``.

    layers: global layer ids, ascending. width: elements of ``dtype`` per row. ring_rows:
    rows per request slot in the ring that the stream is captured from.
    """

    layers: tuple[int, ...]
    rows: int
    width: int
    dtype: torch.dtype
    ring_rows: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's part of a tile."""
        return self.rows * self.width * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return len(self.layers) * self.layer_bytes


@dataclass(frozen=True)
class TileLayout:
    """Geometry of a tile: the state of a sequence at a page boundary B.

    window: rows of positions [B - W, B) of every layer, as the ring holds them: one bf16
        row, or under fp8 the packed nope row, with window_rope beside it.
    c4_state, indexer_state: rows of positions [B - 4, B) of every ratio-4 layer.

    Rows are in ascending position, so a tile does not depend on a slot or a ring size. Only
    the layers of this pipeline stage are in it.

    Worked sizes, window 128, head dim 512, bf16 rows, fp32 state:
        V4-Flash, 43 layers, 21 of ratio 4:
            window 43 x 128 x 1,024 B     = 5,636,096
            state  21 x 4 x (8,192 + 2,048) B =   860,160
            tile                            6,496,256 B  (6.2 MiB)
        V4-Pro, 61 layers, 30 of ratio 4:
            61 x 131,072 + 30 x 40,960    = 9,224,192 B  (8.8 MiB)
    """

    page_size: int
    window: TileStream
    window_rope: TileStream | None
    c4_state: TileStream | None
    indexer_state: TileStream | None

    def __post_init__(self) -> None:
        if self.page_size % _C128:
            # The c128 compressors would hold a started block at a boundary, and a tile has
            # no room for it.
            raise ValueError(
                f"page size {self.page_size} is no multiple of {_C128}: c128 state would be "
                f"pending at a page boundary. Use --page-size 256."
            )
        if self.window.rows > self.page_size:
            raise ValueError(
                f"the window of {self.window.rows} rows is longer than a page of "
                f"{self.page_size}; a tile's window must end and begin in its own page."
            )

    @cached_property
    def streams(self) -> dict[str, TileStream]:
        """The streams that exist, by name, in a fixed order."""
        return {name: stream for name, stream in self._named() if stream is not None}

    def _named(self) -> Iterator[tuple[str, TileStream | None]]:
        yield "window", self.window
        yield "window_rope", self.window_rope
        yield "c4_state", self.c4_state
        yield "indexer_state", self.indexer_state

    @property
    def nbytes(self) -> int:
        """Bytes of one tile on one rank."""
        return sum(stream.nbytes for stream in self.streams.values())

    @classmethod
    def build(
        cls,
        *,
        page_size: int,
        window: int,
        ring_rows: int,
        state_ring_rows: int,
        ratios: Sequence[int],
        start_layer: int,
        window_width: int,
        window_dtype: torch.dtype,
        rope_width: int | None,
        state_width: int,
        indexer_state_width: int,
        state_dtype: torch.dtype,
    ) -> TileLayout:
        """From plain numbers. ``ratios``: compress ratios of this stage's layers, the first
        being layer ``start_layer``; ``rope_width``: bf16 elements of the rope half, fp8 only.
        """
        stage = range(start_layer, start_layer + len(ratios))
        overlapping = tuple(
            layer for layer, ratio in zip(stage, ratios, strict=True) if ratio == 4
        )

        def state(width: int) -> TileStream | None:
            if not overlapping:
                return None
            return TileStream(
                overlapping, STATE_ROWS, width, state_dtype, state_ring_rows
            )

        def rows(width: int, dtype: torch.dtype) -> TileStream:
            return TileStream(tuple(stage), window, width, dtype, ring_rows)

        return cls(
            page_size=page_size,
            window=rows(window_width, window_dtype),
            window_rope=None
            if rope_width is None
            else rows(rope_width, torch.bfloat16),
            c4_state=state(state_width),
            indexer_state=state(indexer_state_width),
        )

    @classmethod
    def of_pool(cls, pool: DeepSeekV4TokenToKVPool, page_size: int) -> TileLayout:
        """The layout of ``pool``'s own rings; the pool is in unified_kv mode."""
        rings = pool.unified_kv_pool
        start = pool.start_layer
        ratios = pool.compression_ratios[start : start + len(rings.kv_buffer)]
        overlapping = [start + i for i, ratio in enumerate(ratios) if ratio == 4]
        states = [pool.compress_state_pools[layer] for layer in overlapping]
        indexers = [pool.indexer_compress_state_pools[layer] for layer in overlapping]
        return cls.build(
            page_size=page_size,
            window=pool.unified_swa_window,
            ring_rows=pool.unified_swa_ring_size,
            state_ring_rows=states[0].ring_size if states else STATE_ROWS,
            ratios=ratios,
            start_layer=start,
            window_width=rings.kv_buffer[0].shape[1],
            window_dtype=rings.kv_buffer[0].dtype,
            rope_width=rings.rope_head_dim if rings.fp8 else None,
            state_width=states[0].last_dim if states else 0,
            indexer_state_width=indexers[0].last_dim if indexers else 0,
            state_dtype=states[0].kv_score_buffer.kv_score.dtype
            if states
            else torch.float32,
        )
