"""What the functions of dsv4_tiles refuse: shapes, dtypes and strides, read on the host.

Each check raises a ValueError that says what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.kvcache.dsv4_tile_kernels import CASTS

if TYPE_CHECKING:
    from sglang.kernels.ops.kvcache.dsv4_tiles import RingTable


def castable_to(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of flat rows that capture_layer takes for tiles of ``dtype``."""
    return (dtype, *(source for source, target in CASTS if target == dtype))


def check_tiles(tiles: torch.Tensor, *, dims: int) -> None:
    """Tiles have ``dims`` dimensions and are contiguous."""
    if tiles.dim() != dims or not tiles.is_contiguous():
        raise ValueError(
            f"tiles are {tuple(tiles.shape)}, strides {tiles.stride()}; expected "
            f"{dims} contiguous dimensions, the last three [tiles, rows, width]"
        )


def check_ids(rows: int, tile_ids: torch.Tensor, addresses: torch.Tensor) -> None:
    """int64 ids [N] come with int64 addresses [N, rows]."""
    expected = (*tile_ids.shape[:1], rows)
    if tile_ids.dim() != 1 or tuple(addresses.shape) != expected:
        raise ValueError(
            f"{tuple(tile_ids.shape)} tile ids come with addresses "
            f"{tuple(addresses.shape)}; expected [N] ids and [N, {rows}] "
            f"addresses, one per row of a tile"
        )
    if tile_ids.dtype != torch.int64 or addresses.dtype != torch.int64:
        raise ValueError(
            f"tile ids are {tile_ids.dtype} and addresses {addresses.dtype}; "
            f"expected torch.int64"
        )


def check_rows(
    name: str,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Rows are as wide as those of the tiles, each contiguous, in one of ``dtypes``."""
    width = tiles.shape[-1]
    if rows.dim() != 2 or rows.shape[1] != width or rows.stride(1) != 1:
        raise ValueError(
            f"{name} is {tuple(rows.shape)}, strides {rows.stride()}; expected "
            f"[rows, {width}] with contiguous rows. Pass {name}.contiguous() if only "
            f"the strides differ."
        )
    if rows.dtype not in dtypes:
        raise ValueError(
            f"{name} is {rows.dtype}; tiles of {tiles.dtype} take "
            f"{' or '.join(map(str, dtypes))}. Cast the rows first."
        )


def check_ring(ring: torch.Tensor, tiles: torch.Tensor) -> None:
    """A ring of one layer is contiguous, and its rows are as those of the tiles."""
    check_rows("ring", ring, tiles, (tiles.dtype,))
    if not ring.is_contiguous():
        raise ValueError(f"ring has strides {ring.stride()}; expected a contiguous one")


def check_rings(tiles: torch.Tensor, rings: RingTable) -> None:
    """There is a ring per layer of the tiles, and its rows are as theirs."""
    check_rows("ring", rings.buffers[0], tiles, (tiles.dtype,))
    if len(rings.buffers) != tiles.shape[0]:
        raise ValueError(
            f"tiles have {tiles.shape[0]} layers and the table {len(rings.buffers)} "
            f"rings; expected one ring per layer, in the same order"
        )


def check_streams(streams: Sequence[tuple[torch.Tensor, RingTable]]) -> None:
    """Streams of one table: equal rows, one device, each with its own rings."""
    if not streams:
        raise ValueError("a table of no streams; expected at least one (tiles, rings)")
    for tiles, rings in streams:
        check_tiles(tiles, dims=4)
        check_rings(tiles, rings)
    rows = [tiles.shape[2] for tiles, _ in streams]
    if len(set(rows)) > 1:
        raise ValueError(
            f"streams of one table have {rows} rows per tile; expected equal ones, "
            f"because they share their addresses"
        )
    devices = [t.device for tiles, rings in streams for t in (tiles, *rings.buffers)]
    if len(set(devices)) > 1:
        raise ValueError(
            f"tiles and rings of one table are on {sorted(set(map(str, devices)))}; "
            f"expected one device"
        )
