"""The calls of dsv4_tiles on a CPU: each run of neighbouring rows is one copy of its bytes.

The rows of a tile lie in a ring, or in a step's flat rows, as one run or two. Indexing in
torch would go row by row, into a temporary first. Copies go through NumPy views of the
bytes: a slice costs a fraction of torch's, and a tile needs one per layer and stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang.kernels.ops.kvcache.dsv4_tiles import RingTable

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Run(NamedTuple):
    """Neighbouring rows ``rows`` of tile ``tile`` that are neighbours elsewhere too.

    there: where these are. in_ring: of a capture, in the ring and not in the flat rows.
    """

    tile: int
    rows: slice
    there: slice
    in_ring: bool


class Runs(list[Run]):
    """The runs of some tiles of ``rows`` rows each, and what each layer asks of them again."""

    def __init__(self, found: Iterable[Run], rows: int) -> None:
        super().__init__(found)
        self.rows = rows

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """The lowest and the highest tile id."""
        return min(run.tile for run in self), max(run.tile for run in self)

    @cached_property
    def ends(self) -> tuple[int, int]:
        """One behind the last row outside the ring, and in it; of runs that are not coded, the first."""
        ends = [0, 0]
        for run in self:
            ends[run.in_ring] = max(ends[run.in_ring], run.there.stop)
        return ends[0], ends[1]

    @cached_property
    def places(self) -> list[tuple[int | tuple[int, slice], slice, bool]]:
        """(index into a layer's tiles, there, in_ring) of each run; a whole tile needs no slice of rows."""
        return [
            (
                tile if rows.stop - rows.start == self.rows else (tile, rows),
                there,
                in_ring,
            )
            for tile, rows, there, in_ring in self
        ]


def runs(
    tile_ids: torch.Tensor, addresses: torch.Tensor, *, coded: bool = False
) -> Runs:
    """The fewest runs that make up some tiles; ids and addresses as in scatter_tables().

    coded: addresses as in capture_layer(), those below 0 are ring rows. Without it, rows of
    either side are in runs with ``in_ring`` False.

    Example, four rows per tile, coded:
        ids [5, 7], addresses [[-29, -30, 100, 101], [4, 5, 6, 9]] ->
            Run(5, slice(0, 2), slice(28, 30), True)
            Run(5, slice(2, 4), slice(100, 102), False)
            Run(7, slice(0, 3), slice(4, 7), False)
            Run(7, slice(3, 4), slice(9, 10), False)

    Raises:
        IndexError: an address is below 0, and not coded.
    """
    ids, table = tile_ids.numpy(), addresses.numpy()
    number = table.shape[1]
    change = table[:, 1:] - table[:, :-1]
    starts = table[:, 0].tolist()
    if min(starts, default=0) >= 0 and (change == 1).all():
        # As good as always: every tile is one run, and nothing is coded.
        whole = slice(0, number)
        return Runs(
            (
                Run(tile, whole, slice(start, start + number), False)
                for tile, start in zip(ids.tolist(), starts, strict=True)
            ),
            number,
        )
    in_ring = table < 0
    if not coded and in_ring.any():
        raise IndexError(f"ring row {table.min()}; expected 0 or more")
    begins = np.ones_like(in_ring)
    # Ring row r is coded -1 - r: the one behind it is one less.
    begins[:, 1:] = change != np.where(in_ring[:, 1:], -1, 1)
    # From -1 to 0 is a step of one, out of the ring into the flat rows.
    begins[:, 1:] |= in_ring[:, 1:] != in_ring[:, :-1]
    first = np.flatnonzero(begins)
    items, rows = np.divmod(first, number)
    address = table.flat[first]
    found = zip(
        ids[items].tolist(),
        rows.tolist(),
        np.diff(first, append=table.size).tolist(),
        np.where(address < 0, -1 - address, address).tolist(),
        (address < 0).tolist(),
        strict=True,
    )
    return Runs(
        (
            Run(tile, slice(row, row + n), slice(start, start + n), inside)
            for tile, row, n, start, inside in found
        ),
        number,
    )


def byte_rows(buffer: torch.Tensor) -> Bytes:
    """The same memory in bytes: the last dimension is ``itemsize`` times as wide."""
    rows: Bytes = buffer.view(torch.uint8).numpy()
    return rows


def capture_layer_cpu(
    tiles: torch.Tensor, flat: torch.Tensor, ring: torch.Tensor, found: Runs
) -> None:
    """capture_layer() of dsv4_tiles. Raises IndexError where an id or address is out of range."""
    _check_tiles(found, len(tiles))
    _check_rows("ring", found.ends[1], len(ring))
    _check_rows("flat", found.ends[0], len(flat))
    to, of_ring = byte_rows(tiles), byte_rows(ring)
    of_flat = byte_rows(flat) if flat.dtype == tiles.dtype else None
    for place, there, in_ring in found.places:
        if in_ring:
            to[place] = of_ring[there]
        elif of_flat is not None:
            to[place] = of_flat[there]
        else:
            tiles[place] = flat[there]


def gather_tiles_cpu(tiles: torch.Tensor, rings: RingTable, found: Runs) -> None:
    """gather_tiles() of dsv4_tiles. Raises IndexError where an id or address is out of range."""
    _check_tiles(found, tiles.shape[1])
    _check_rows("ring", found.ends[0], min(map(len, rings.byte_rows)))
    for layer, ring in zip(byte_rows(tiles), rings.byte_rows, strict=True):
        for place, there, _ in found.places:
            layer[place] = ring[there]


def scatter_cpu(entries: Sequence[tuple[Bytes, Bytes]], found: Runs) -> None:
    """scatter_tables() of dsv4_tiles: (tiles, ring) of each layer.

    Raises IndexError where an id or address is out of range.
    """
    _check_tiles(found, min(len(tiles) for tiles, _ in entries))
    _check_rows("ring", found.ends[0], min(len(ring) for _, ring in entries))
    for tiles, ring in entries:
        for place, there, _ in found.places:
            ring[there] = tiles[place]


# A slice that is out of range is cut short without an error. Checked before any write.


def _check_tiles(found: Runs, tiles: int) -> None:
    for tile in found.tiles:
        if not 0 <= tile < tiles:
            raise IndexError(f"tile id {tile}; expected 0 to {tiles - 1}")


def _check_rows(kind: str, end: int, size: int) -> None:
    if end > size:
        raise IndexError(f"{kind} row {end - 1}; expected 0 to {size - 1}")
