"""Executes capture plans: copies rows into tiles, on the stream that computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.kernels.ops.kvcache.dsv4_tile_rows import runs
from sglang.kernels.ops.kvcache.dsv4_tiles import (
    RingTable,
    capture_layer,
    gather_tiles,
)
from sglang.srt.mem_cache.swa_bitexact.layout import STATE_STREAMS, WINDOW_STREAMS
from sglang.srt.mem_cache.swa_bitexact.tile_table import CapturePlan, StepRows
from sglang.srt.utils import is_pin_memory_available

if TYPE_CHECKING:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.mem_cache.swa_bitexact.capture_pool import CapturePool
    from sglang.srt.mem_cache.swa_bitexact.checksum import TileChecksums

Positions = np.ndarray[Any, np.dtype[np.int64]]


class TileWriter:
    """Copies what a plan names from one KV pool's rings, and a step's flat rows, into tiles.

    One per KV pool. It reads the rings' buffers directly: their window and state regions are
    never loaded by HiCache, so there is no layer transfer to wait for.
    """

    # With SGLANG_SWA_DBG_CHECKSUM, what checks each copy.
    checksums: TileChecksums | None = None

    def __init__(self, kvcache: DeepSeekV4TokenToKVPool, pool: CapturePool) -> None:
        self.pool = pool
        self._pin = is_pin_memory_available(pool.device)
        buffers = _ring_buffers(kvcache)
        self.rings = {
            name: RingTable(tuple(buffers[name][layer] for layer in stream.layers))
            for name, stream in pool.layout.streams.items()
        }
        self.layer_index = {
            name: {layer: i for i, layer in enumerate(stream.layers)}
            for name, stream in pool.layout.streams.items()
        }

    def window_rows(
        self,
        layer_id: int,
        kv: torch.Tensor,
        k_rope: torch.Tensor | None,
        plan: CapturePlan,
    ) -> None:
        """One layer's window rows of a prefill step; kv [tokens, width], k_rope under fp8.

        Before the step writes the ring, which still holds the rows before it. Nothing where
        windows_at_end() takes them all.
        """
        self._layer_rows("window", layer_id, kv, plan)
        if "window_rope" in self.rings:
            assert k_rope is not None, "fp8 rows come with their rope half"
            self._layer_rows("window_rope", layer_id, k_rope, plan)

    def state_rows(
        self,
        layer_id: int,
        kv_score: torch.Tensor,
        plan: CapturePlan,
        *,
        is_indexer: bool,
    ) -> None:
        """One compressor's overlap rows of a prefill step; kv_score [tokens, width] float32.

        Before the compressor transforms them in place and writes its state ring. Nothing where
        states_at_end() takes them all.
        """
        stream = "indexer_state" if is_indexer else "c4_state"
        self._layer_rows(stream, layer_id, kv_score, plan)

    def windows_at_end(self, plan: CapturePlan) -> None:
        """All layers' window rows, if every capture ends with its request's part of the step.

        After the step wrote the rings; one launch per stream. So ends every decode capture, and
        a chunk of prefill that stops on the grid.
        """
        self._all_layers(WINDOW_STREAMS, plan)

    def states_at_end(self, plan: CapturePlan) -> None:
        """The overlap rows of the same; one launch per stream."""
        self._all_layers(STATE_STREAMS, plan)

    def _layer_rows(
        self, stream: str, layer_id: int, flat: torch.Tensor, plan: CapturePlan
    ) -> None:
        if plan.at_end:
            return
        layer = self.layer_index[stream][layer_id]
        ring = self.rings[stream].buffers[layer]
        tile_ids, addresses, found = self._rows(stream, plan)
        capture_layer(
            self.pool.buffers[stream][layer], tile_ids, flat, ring, addresses, found
        )
        if self.checksums is not None:
            self.checksums.captured(stream, layer_id, plan, ring, flat)

    def _all_layers(self, streams: tuple[str, ...], plan: CapturePlan) -> None:
        if not plan.at_end:
            return
        for stream in streams:
            if stream in self.rings:
                tile_ids, addresses, found = self._rows(stream, plan)
                gather_tiles(
                    self.pool.buffers[stream],
                    tile_ids,
                    self.rings[stream],
                    addresses,
                    found,
                )
                if self.checksums is not None:
                    for layer_id, layer in self.layer_index[stream].items():
                        ring = self.rings[stream].buffers[layer]
                        self.checksums.captured(stream, layer_id, plan, ring)

    def _rows(self, stream: str, plan: CapturePlan) -> StepRows:
        geometry = self.pool.layout.streams[stream]
        key = (geometry.rows, geometry.ring_rows)
        if key not in plan.rows:
            on_host = row_addresses(plan, *key, pin=self._pin)
            plan.rows[key] = step_rows(plan.tile_ids, on_host, coded=not plan.at_end)
        return plan.rows[key]


def step_rows(
    tile_ids: torch.Tensor, on_host: torch.Tensor, *, coded: bool
) -> StepRows:
    """Ids, and the addresses on their device; on a CPU their runs(), which all layers share."""
    addresses = on_host.to(tile_ids.device, non_blocking=True)
    if tile_ids.device.type != "cpu":
        return StepRows(tile_ids, addresses, None)
    return StepRows(tile_ids, addresses, runs(tile_ids, addresses, coded=coded))


def row_addresses(
    plan: CapturePlan, rows: int, ring_rows: int, *, pin: bool = False
) -> torch.Tensor:
    """Where the ``rows`` rows before each boundary are: int64 [captures, rows] on the host.

    A position p of slot s lies in ring row s * ring_rows + p % ring_rows. Unless the plan is
    taken at the step's end, positions of this step are rows of its flat tensors, and ring rows
    are coded -1 - row.

    Example, rows=4, ring_rows=8, boundary 512, slot 3, chunk from 510 at flat row 100:
        positions 508, 509 -> ring rows 28, 29 -> -29, -30
        positions 510, 511 -> 100, 101
    """
    captures = plan.captures
    slots, boundaries = [c.slot for c in captures], [c.boundary for c in captures]
    if plan.at_end:
        return ring_addresses(slots, boundaries, rows, ring_rows, pin=pin)
    start = np.array([c.chunk_start for c in captures])[:, None]
    first = np.array([c.first_row for c in captures])[:, None]
    position = positions_before(boundaries, rows)
    in_ring = -1 - ring_rows_of(slots, position, ring_rows)
    return _on_host(np.where(position < start, in_ring, first + position - start), pin)


def ring_addresses(
    slots: list[int],
    boundaries: list[int],
    rows: int,
    ring_rows: int,
    *,
    pin: bool = False,
) -> torch.Tensor:
    """Ring rows of the ``rows`` positions before each boundary, int64 [slots, rows] on the host.

    Example, rows=4, ring_rows=8: slot 3, boundary 512 -> positions 508 to 511 -> rows 28, 29,
    30, 31. Boundary 0 -> positions -4 to -1 -> the same rows of slot 3, which the first block
    of a sequence reads as its overlap.
    """
    position = positions_before(boundaries, rows)
    return _on_host(ring_rows_of(slots, position, ring_rows), pin)


# In NumPy: per step and stream, an operation there costs a fraction of one of torch.


def positions_before(boundaries: list[int], rows: int) -> Positions:
    """The ``rows`` positions before each boundary, int64 [boundaries, rows]."""
    first = np.array(boundaries, dtype=np.int64)[:, None]
    return first + np.arange(-rows, 0)


def ring_rows_of(slots: list[int], position: Positions, ring_rows: int) -> Positions:
    """The ring row of each position, int64; one row of ``position`` per slot."""
    first = np.array([slot * ring_rows for slot in slots], dtype=np.int64)[:, None]
    return first + position % ring_rows


def _on_host(rows: Positions, pin: bool) -> torch.Tensor:
    tensor = torch.from_numpy(rows)
    return tensor.pin_memory() if pin else tensor


def _ring_buffers(
    kvcache: DeepSeekV4TokenToKVPool,
) -> dict[str, dict[int, torch.Tensor]]:
    """Ring tensors [rows, width] by stream and global layer id."""
    rings = kvcache.unified_kv_pool
    start = kvcache.start_layer

    def by_layer(buffers: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        return {start + i: buffer for i, buffer in enumerate(buffers)}

    def states(pools: list[Any]) -> dict[int, torch.Tensor]:
        return {
            layer: pool.kv_score_buffer.kv_score
            for layer, pool in enumerate(pools)
            if pool is not None and pool.ratio == 4
        }

    return {
        "window": by_layer(rings.kv_buffer),
        "window_rope": by_layer(rings.kv_buffer_rope),
        "c4_state": states(kvcache.compress_state_pools),
        "indexer_state": states(kvcache.indexer_compress_state_pools),
    }
