"""SGLANG_SWA_DBG_CHECKSUM: follows the bytes of every tile, and raises where they change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from sglang.srt.mem_cache.hicache_storage import PoolName

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer
    from sglang.srt.mem_cache.swa_bitexact.capture_pool import CapturePool
    from sglang.srt.mem_cache.swa_bitexact.tile_table import CapturePlan

_STREAMS = {
    PoolName.SWA: "window",
    PoolName.DEEPSEEK_V4_C4_STATE: "c4_state",
    PoolName.DEEPSEEK_V4_C4_INDEXER_STATE: "indexer_state",
}


class _Record(NamedTuple):
    """boundary: where the tile ends, None if another process captured it. layers: a digest each."""

    boundary: int | None
    layers: tuple[int, ...]


class TileChecksums:
    """What a tile's bytes were at each station of its way, and whether they still are.

    For debugging: every check waits for the device, and every transfer becomes synchronous.
    A difference raises AssertionError with position, stream, layer and station. One that a
    storage thread finds makes that tile unusable, and is raised by the scheduler's next check.
    """

    def __init__(self, pool: CapturePool, host_pools: dict[PoolName, Any]) -> None:
        """host_pools: HiCache's, by name; empty without HiCache."""
        self._pool = pool
        self._host_pools = host_pools
        self._boundaries: dict[int, int | None] = {}
        self._on_host: dict[tuple[str, int], _Record] = {}
        self._in_storage: dict[tuple[str, str], _Record] = {}
        self._failure: AssertionError | None = None

    # Capture and restore ---------------------------------------------------------

    def captured(
        self,
        stream: str,
        layer_id: int,
        plan: CapturePlan,
        ring: torch.Tensor,
        flat: torch.Tensor | None = None,
    ) -> None:
        """One layer of a plan was captured: row by row, what the flat rows and the ring hold.

        ring: the layer's ring as the capture read it. flat: the step's rows; None if all come
        from the ring.
        """
        self._raise_pending()
        geometry = self._pool.layout.streams[stream]
        layer = geometry.layers.index(layer_id)
        for capture, tile_id in zip(plan.captures, plan.tile_ids.tolist(), strict=True):
            self._boundaries[tile_id] = capture.boundary
            for row in range(geometry.rows):
                position = capture.boundary - geometry.rows + row
                if flat is not None and position >= capture.chunk_start:
                    source = flat[capture.first_row + position - capture.chunk_start]
                else:
                    source = ring[
                        capture.slot * geometry.ring_rows
                        + position % geometry.ring_rows
                    ]
                found = self._pool.buffers[stream][layer, tile_id, row]
                if not _same_bytes(found, source.to(found.dtype)):
                    raise _changed("at capture", capture.boundary, stream, layer_id)

    def restored(
        self,
        stream: str,
        layer_id: int,
        tile_ids: torch.Tensor,
        ring: torch.Tensor,
        addresses: torch.Tensor,
    ) -> None:
        """One layer of tiles was written to these ring rows, int64 [tiles, rows]."""
        self._raise_pending()
        layer = self._pool.layout.streams[stream].layers.index(layer_id)
        for tile_id, rows in zip(tile_ids.tolist(), addresses, strict=True):
            if not _same_bytes(ring[rows], self._pool.buffers[stream][layer, tile_id]):
                boundary = self._boundaries.get(tile_id)
                raise _changed("at restore", boundary, stream, layer_id)

    # Tiers -----------------------------------------------------------------------

    def written(self, transfers: Sequence[PoolTransfer], done: Any) -> None:
        """Tiles were copied to the host; ``done``: the event of the copy."""
        done.synchronize()
        for stream, tile_id, host_index, host in self._pairs(transfers):
            record = _Record(self._boundaries.get(tile_id), _digests(host))
            self._compare(
                "from device to host", stream, record, self._tile(stream, tile_id)
            )
            self._on_host[stream, host_index] = record

    def loaded(self, transfers: Sequence[PoolTransfer], done: Any) -> None:
        """Tiles were copied from the host to the device."""
        done.synchronize()
        for stream, tile_id, host_index, host in self._pairs(transfers):
            record = self._on_host.get((stream, host_index))
            record = record or _Record(None, _digests(host))
            self._compare("in host memory", stream, record, _digests(host))
            self._compare(
                "from host to device", stream, record, self._tile(stream, tile_id)
            )
            self._boundaries[tile_id] = record.boundary

    def stored(self, transfers: Sequence[PoolTransfer]) -> None:
        """Tiles were written to storage. Runs on a storage thread."""
        for stream, key, host_index, host in self._keys(transfers):
            record = self._on_host.get((stream, host_index))
            record = record or _Record(None, _digests(host))
            self._compare("in host memory", stream, record, _digests(host))
            self._in_storage[stream, key] = record

    def fetched(
        self, transfers: Sequence[PoolTransfer], results: dict[Any, Sequence[bool]]
    ) -> None:
        """Tiles were read from storage; ``results``: per pool, which keys. On a storage thread.

        What another process stored has no digest here, and is taken as it is.
        """
        for transfer in transfers:
            read = results.get(transfer.name) or ()
            for got, (stream, key, host_index, host) in zip(
                read, self._keys([transfer]), strict=False
            ):
                if got:
                    record = self._in_storage.get((stream, key))
                    record = record or _Record(None, _digests(host))
                    self._compare(
                        "from storage to host", stream, record, _digests(host)
                    )
                    self._on_host[stream, host_index] = record

    # -----------------------------------------------------------------------------

    def _compare(
        self, station: str, stream: str, record: _Record, found: tuple[int, ...]
    ) -> None:
        layers = self._pool.layout.streams[stream].layers
        for layer_id, expected, digest in zip(
            layers, record.layers, found, strict=True
        ):
            if expected != digest:
                self._failure = _changed(station, record.boundary, stream, layer_id)
                raise self._failure

    def _raise_pending(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _tile(self, stream: str, tile_id: int) -> tuple[int, ...]:
        return _digests(self._pool.buffers[stream][:, tile_id])

    def _pairs(
        self, transfers: Sequence[PoolTransfer]
    ) -> Iterator[tuple[str, int, int, torch.Tensor]]:
        """(stream, tile id, host index, bytes on the host) of every tile that is moved."""
        page_size = self._pool.layout.page_size
        for transfer in transfers:
            stream = _STREAMS.get(transfer.name)
            if stream in self._pool.layout.streams:
                slots = transfer.device_indices[::page_size].tolist()
                for slot, index in zip(slots, self._indices(transfer), strict=True):
                    yield (
                        stream,
                        slot // page_size,
                        index,
                        self._host(transfer.name, index),
                    )

    def _keys(
        self, transfers: Iterable[PoolTransfer]
    ) -> Iterator[tuple[str, str, int, torch.Tensor]]:
        """(stream, storage key, host index, bytes on the host) of every tile of these."""
        for transfer in transfers:
            stream = _STREAMS.get(transfer.name)
            if stream in self._pool.layout.streams and transfer.keys:
                for key, index in zip(
                    transfer.keys, self._indices(transfer), strict=False
                ):
                    yield stream, key, index, self._host(transfer.name, index)

    def _indices(self, transfer: PoolTransfer) -> list[int]:
        return transfer.host_indices[:: self._pool.layout.page_size].tolist()

    def _host(self, name: PoolName, host_index: int) -> torch.Tensor:
        layers = len(self._pool.layout.streams[_STREAMS[name]].layers)
        return self._host_pools[name].get_data_page(host_index).view(layers, -1)


def _digests(layers: torch.Tensor) -> tuple[int, ...]:
    """xxh3 of each layer's bytes; [layers, ...] of any dtype, on any device."""
    rows = layers.cpu().contiguous().view(torch.uint8).flatten(1)
    return tuple(xxhash.xxh3_64_intdigest(row.numpy()) for row in rows)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    # As bytes, since a NaN is equal to nothing.
    return torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def _changed(
    station: str, boundary: int | None, stream: str, layer_id: int
) -> AssertionError:
    position = "unknown (captured by another process)" if boundary is None else boundary
    return AssertionError(
        f"SGLANG_SWA_DBG_CHECKSUM: {stream} rows changed {station}: position {position}, "
        f"layer {layer_id}"
    )
