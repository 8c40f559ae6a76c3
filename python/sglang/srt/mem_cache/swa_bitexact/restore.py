"""Queues the restores of newly taken request slots, and executes them on the forward stream."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.kvcache.dsv4_tiles import (
    RingTable,
    TileTable,
    scatter_tables,
)
from sglang.srt.mem_cache.swa_bitexact.capture import ring_addresses, step_rows
from sglang.srt.mem_cache.swa_bitexact.capture_pool import CLEARED_TILE
from sglang.srt.mem_cache.swa_bitexact.layout import STATE_STREAMS, WINDOW_STREAMS
from sglang.srt.mem_cache.swa_bitexact.tile_table import StepRows
from sglang.srt.utils import is_pin_memory_available

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.swa_bitexact.allocator import TileTokenToKVPoolAllocator
    from sglang.srt.mem_cache.swa_bitexact.capture import TileWriter
    from sglang.srt.mem_cache.swa_bitexact.checksum import TileChecksums
    from sglang.srt.mem_cache.swa_bitexact.receipt import ReuseReceipts

# Times that are kept while nobody takes them.
_MOST_TIMES = 1024


@dataclass
class RestorePlan:
    """What one step restores before it reads any slot; made by the scheduler.

    slots, boundaries: the request slots just taken, and the length of the prefix that each
    reuses; those without one come last, with boundary 0. tile_ids: int64 [len(slots)] on the
    device, 0 where there is no prefix. layer_wise: a HiCache load is under way, so that a
    layer's part of a tile is there only once that layer was waited for. host_seconds: spent by
    the host on planning and launching it so far; of no copy.
    """

    slots: list[int]
    boundaries: list[int]
    tile_ids: torch.Tensor
    layer_wise: bool = False
    executed: bool = False
    host_seconds: float = 0.0
    # Per (slots, rows, ring rows): tile ids, ring rows and, on a CPU, their runs; filled in by
    # the first stream that needs them.
    rows: dict[tuple[int, int, int], StepRows] = field(default_factory=dict)

    @property
    def warm(self) -> int:
        """How many slots reuse a prefix."""
        return sum(boundary > 0 for boundary in self.boundaries)


class RestoreQueue:
    """The scheduler's side: which slots need their window and state, and from which tile."""

    def __init__(
        self,
        allocator: TileTokenToKVPoolAllocator,
        slots: ReqToTokenPool,
        receipts: ReuseReceipts,
    ) -> None:
        self._allocator = allocator
        self.receipts = receipts
        self._page_size = allocator.page_size
        self._req_to_token_pool = slots
        self._pin = is_pin_memory_available(slots.device)
        self._plan: RestorePlan | None = None

    def matched(self, params: MatchPrefixParams, result: MatchResult) -> None:
        """A tree match is done: one for reuse arms the request, a probe changes nothing.

        Admission may be refused after it; the next attempt matches, and arms, again.
        """
        if params.for_reuse and params.req is not None:
            params.req.swa_match = result

    def queue(self, reqs: list[Req], req_pool_indices: torch.Tensor) -> None:
        """Queue the restores of armed requests among ``reqs``, which just got these slots.

        A request is armed by the match before it takes a slot, and disarmed here: later
        chunks are left alone. Writes its receipt. Reads which tile the end of the prefix is
        mapped to; the request's lock keeps it there until the step was launched. No
        synchronization.

        Raises:
            AssertionError: a prefix does not end at a page boundary.
        """
        began = time.perf_counter()
        taken: list[tuple[int, int]] = []
        for req, slot in zip(reqs, req_pool_indices.tolist(), strict=True):
            result, req.swa_match = req.swa_match, None
            if result is None:
                continue
            assert req.prefix_len % self._page_size == 0, (
                f"request {req.rid} reuses {req.prefix_len} tokens, expected whole pages of "
                f"{self._page_size}: no tile ends there"
            )
            taken.append((slot, req.prefix_len))
            self.receipts.take(req, self.receipts.found(req.rid, result))
        if not taken:
            return
        taken.sort(key=lambda slot_and_prefix: slot_and_prefix[1] == 0)
        slots, boundaries = [list(column) for column in zip(*taken, strict=True)]
        self._plan = RestorePlan(slots, boundaries, self._tiles_at(slots, boundaries))
        self._plan.host_seconds = time.perf_counter() - began

    def take(self, *, layer_wise: bool) -> RestorePlan | None:
        """What was queued, for the batch that is being prepared."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.layer_wise = layer_wise
        return plan

    def _tiles_at(self, slots: list[int], boundaries: list[int]) -> torch.Tensor:
        """Tiles that the pages before ``boundaries`` are mapped to; the cleared one for 0."""
        last = [max(boundary - 1, 0) for boundary in boundaries]
        where = torch.tensor([slots, last, boundaries], dtype=torch.int64)
        if self._pin:
            where = where.pin_memory()
        device = self._req_to_token_pool.device
        slot, position, boundary = where.to(device, non_blocking=True)
        rows = self._req_to_token_pool.req_to_token[slot, position].long()
        tile_ids = self._allocator.full_to_swa_index_mapping[rows] // self._page_size
        return tile_ids.where(boundary > 0, CLEARED_TILE)


class TileReader:
    """The forward's side: writes tiles into the rings of one KV pool.

    Everything runs on the stream that computes the step, behind whatever the slots' former
    owners still had under way there.
    """

    # With SGLANG_SWA_DBG_CHECKSUM, what checks each copy.
    checksums: TileChecksums | None = None

    def __init__(self, writer: TileWriter) -> None:
        self._pool = writer.pool
        self._rings = writer.rings
        self._layer_index = writer.layer_index
        self._pin = is_pin_memory_available(self._pool.device)
        # Windows and states, each as one launch; by the name of their first stream.
        self._tables = {
            present[0]: TileTable(
                tuple((self._pool.buffers[name], self._rings[name]) for name in present)
            )
            for group in (WINDOW_STREAMS, STATE_STREAMS)
            if (present := [name for name in group if name in self._rings])
        }
        # The same a layer at a time, by stream and layer.
        self._by_layer = {
            (name, layer_id): TileTable(
                ((self._pool.buffers[name][i, None], RingTable((rings.buffers[i],))),)
            )
            for name, rings in self._rings.items()
            for layer_id, i in self._layer_index[name].items()
        }
        # The plan of the running step if it goes layer by layer, and its parts to come.
        self._running: RestorePlan | None = None
        self._to_come: set[tuple[str, int]] = set()
        # Of plans with a prefix that are launched, until the metrics take them.
        self.host_seconds: deque[float] = deque(maxlen=_MOST_TIMES)

    def restore(self, plan: RestorePlan) -> None:
        """Execute a plan once, before the first layer; calling again does nothing.

        Writes, per slot: the ring rows of [boundary - W, boundary) of every layer if there is
        a prefix, and the c4 and indexer rows of [boundary - 4, boundary) of every ratio-4
        layer. Without a prefix these are the cleared rows before position 0: the scheduler
        cleared them on its own stream, maybe before the former owner's last step wrote them.
        Two launches; with ``plan.layer_wise`` none, the copies then wait for restore_layer().

        Raises:
            AssertionError: the step before went layer by layer, and left layers out.
        """
        if plan.executed:
            return
        plan.executed = True
        began = time.perf_counter()
        assert not self._to_come, (
            f"the step before did not reach {sorted(self._to_come)}: its slots were not "
            f"restored there"
        )
        if plan.layer_wise and plan.warm:
            self._running = plan
            self._to_come = {
                (stream, layer)
                for stream, layers in self._layer_index.items()
                for layer in layers
            }
            return
        for stream, table in self._tables.items():
            scatter_tables(table, *self._rows(stream, plan))
        self._launched(plan, began, last=True)
        if self.checksums is not None:
            for stream, layers in self._layer_index.items():
                for layer_id in layers:
                    self._check(stream, layer_id, plan)

    def restore_layer(self, layer_id: int, *streams: str) -> None:
        """Restore one layer's part of ``streams``, if it is still to come.

        Call behind the wait for the layer's HiCache transfer, on the stream that reads the
        rings next.
        """
        if self._running is None:
            return
        began = time.perf_counter()
        for stream in streams:
            if (stream, layer_id) in self._to_come:
                self._to_come.remove((stream, layer_id))
                table = self._by_layer[stream, layer_id]
                scatter_tables(table, *self._rows(stream, self._running))
                if self.checksums is not None:
                    self._check(stream, layer_id, self._running)
        self._launched(self._running, began, last=not self._to_come)
        if not self._to_come:
            self._running = None

    def _launched(self, plan: RestorePlan, began: float, *, last: bool) -> None:
        plan.host_seconds += time.perf_counter() - began
        if last and plan.warm:
            self.host_seconds.append(plan.host_seconds)

    def _check(self, stream: str, layer_id: int, plan: RestorePlan) -> None:
        ring = self._rings[stream].buffers[self._layer_index[stream][layer_id]]
        tile_ids, addresses, _ = self._rows(stream, plan)
        assert self.checksums is not None
        self.checksums.restored(stream, layer_id, tile_ids, ring, addresses)

    def _rows(self, stream: str, plan: RestorePlan) -> StepRows:
        """Tile ids and ring rows of the slots to write; windows only where there is a prefix."""
        geometry = self._pool.layout.streams[stream]
        count = plan.warm if stream in WINDOW_STREAMS else len(plan.slots)
        key = (count, geometry.rows, geometry.ring_rows)
        if key not in plan.rows:
            on_host = ring_addresses(
                plan.slots[:count], plan.boundaries[:count], *key[1:], pin=self._pin
            )
            plan.rows[key] = step_rows(plan.tile_ids[:count], on_host, coded=False)
        return plan.rows[key]
