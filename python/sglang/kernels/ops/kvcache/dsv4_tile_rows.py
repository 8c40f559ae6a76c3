"""The calls of dsv4_tiles on a CPU: each run of neighbouring rows is one copy of its bytes.

The rows of a tile lie in a ring, or in a step's flat rows, as one run or two. Indexing in
torch would go row by row, into a temporary first. Copies go through NumPy views of the
bytes: a slice costs a fraction of torch's, and a tile needs one per layer and stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang.kernels.ops.kvcache.dsv4_tiles import RingTable, TileTable

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Run(NamedTuple):
    """Neighbouring rows ``rows`` of tile ``tile`` that are neighbours elsewhere too.

    there: where they are in a ring if ``in_ring``, else in the flat rows.
    """

    tile: int
    rows: slice
    there: slice
    in_ring: bool


def runs(tile_ids: torch.Tensor, addresses: torch.Tensor) -> list[Run]:
    """The fewest runs that make up some tiles; ids and addresses as in capture_layer().

    Example, four rows per tile:
        ids [5, 7], addresses [[-29, -30, 100, 101], [4, 5, 6, 9]] ->
            Run(5, slice(0, 2), slice(28, 30), True)
            Run(5, slice(2, 4), slice(100, 102), False)
            Run(7, slice(0, 3), slice(4, 7), False)
            Run(7, slice(3, 4), slice(9, 10), False)
    """
    table = addresses.numpy()
    in_ring = table < 0
    begins = np.ones_like(in_ring)
    # Ring row r is coded -1 - r: the one behind it is one less.
    step = np.where(in_ring[:, 1:], -1, 1)
    begins[:, 1:] = table[:, 1:] - table[:, :-1] != step
    # From -1 to 0 is a step of one, out of the ring into the flat rows.
    begins[:, 1:] |= in_ring[:, 1:] != in_ring[:, :-1]
    flat_index = np.flatnonzero(begins)
    lengths = np.diff(flat_index, append=table.size)
    items, rows = np.divmod(flat_index, table.shape[1])
    ids, first = tile_ids.numpy()[items], table.flat[flat_index]
    return [
        Run(tile, slice(row, row + n), slice(start, start + n), inside)
        for tile, row, n, start, inside in zip(
            ids.tolist(),
            rows.tolist(),
            lengths.tolist(),
            np.where(first < 0, -1 - first, first).tolist(),
            (first < 0).tolist(),
            strict=True,
        )
    ]


def byte_rows(buffer: torch.Tensor) -> Bytes:
    """The same memory in bytes: the last dimension is ``itemsize`` times as wide."""
    rows: Bytes = buffer.view(torch.uint8).numpy()
    return rows


def capture_layer_cpu(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    flat: torch.Tensor,
    ring: torch.Tensor,
    addresses: torch.Tensor,
) -> None:
    """capture_layer() of dsv4_tiles. Raises IndexError where an id or address is out of range."""
    found = runs(tile_ids, addresses)
    _check(found, tiles=len(tiles), ring=len(ring), flat=len(flat))
    to, of_ring = byte_rows(tiles), byte_rows(ring)
    if flat.dtype == tiles.dtype:
        of_flat = byte_rows(flat)
        for tile, rows, there, in_ring in found:
            to[tile, rows] = (of_ring if in_ring else of_flat)[there]
        return
    for tile, rows, there, in_ring in found:
        if in_ring:
            to[tile, rows] = of_ring[there]
        else:
            tiles[tile, rows] = flat[there]


def gather_tiles_cpu(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    rings: RingTable,
    addresses: torch.Tensor,
) -> None:
    """gather_tiles() of dsv4_tiles. Raises IndexError where an id or address is out of range."""
    found = runs(tile_ids, addresses)
    for layer, ring in zip(byte_rows(tiles), rings.byte_rows, strict=True):
        _check(found, tiles=len(layer), ring=len(ring))
        for tile, rows, there, _ in found:
            layer[tile, rows] = ring[there]


def scatter_tables_cpu(
    table: TileTable, tile_ids: torch.Tensor, addresses: torch.Tensor
) -> None:
    """scatter_tables() of dsv4_tiles. Raises IndexError where an id or address is out of range."""
    _scatter(table.byte_rows, tile_ids, addresses)


def scatter_layer_cpu(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    ring: torch.Tensor,
    addresses: torch.Tensor,
) -> None:
    """scatter_layer() of dsv4_tiles. Raises IndexError where an id or address is out of range."""
    _scatter([(byte_rows(tiles), byte_rows(ring))], tile_ids, addresses)


def _scatter(
    entries: Iterable[tuple[Bytes, Bytes]],
    tile_ids: torch.Tensor,
    addresses: torch.Tensor,
) -> None:
    found = runs(tile_ids, addresses)
    for tiles, ring in entries:
        _check(found, tiles=len(tiles), ring=len(ring))
        for tile, rows, there, _ in found:
            ring[there] = tiles[tile, rows]


def _check(found: list[Run], *, tiles: int, ring: int, flat: int | None = None) -> None:
    """Nothing out of range: a slice would be cut short without an error. Before any write.

    flat: None where addresses are plain ring rows, none of them below 0.
    """
    for tile, _, there, in_ring in found:
        if not 0 <= tile < tiles:
            raise IndexError(f"tile id {tile}; expected 0 to {tiles - 1}")
        if flat is None and in_ring:
            raise IndexError(f"ring row {-1 - there.start}; expected 0 to {ring - 1}")
        size = ring if in_ring or flat is None else flat
        if there.stop > size:
            kind = "ring" if in_ring or flat is None else "flat"
            raise IndexError(f"{kind} row {there.stop - 1}; expected 0 to {size - 1}")
