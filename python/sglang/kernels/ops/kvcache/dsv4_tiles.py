"""Move rows between the rings of request slots and tiles: pure copies, one launch each.

A tile buffer is [layers, num_tiles + 1, rows, width], contiguous. Ring tables list one
[ring_rows, width] buffer per layer, in the same order. Triton on an accelerator, torch
on a CPU; both copy the same bytes.

Ids and addresses are not read on the host, so that no call synchronizes: one out of
range is an error on a CPU, and a stray read or write on an accelerator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from sglang.kernels.ops.kvcache.dsv4_tile_kernels import (
    CASTS,
    capture_layer_triton,
    gather_tiles_triton,
    scatter_tiles_triton,
)


@dataclass(frozen=True)
class RingTable:
    """The ring buffers of one stream, one per layer: [any rows, width], contiguous.

    pointers: int64 [layers] on their device, so that one launch reaches all layers.
    alignment: 8, 4, 2 or 1, the most bytes to which each of them is aligned.
    """

    buffers: tuple[torch.Tensor, ...]
    pointers: torch.Tensor = field(init=False)
    alignment: int = field(init=False)

    def __post_init__(self) -> None:
        first = self.buffers[0]
        for layer, buffer in enumerate(self.buffers):
            if (
                buffer.shape[1:] != first.shape[1:]
                or buffer.dtype != first.dtype
                or not buffer.is_contiguous()
            ):
                raise ValueError(
                    f"ring of layer {layer} is {buffer.dtype} {tuple(buffer.shape)}, "
                    f"strides {buffer.stride()}; expected contiguous {first.dtype} "
                    f"[rows, {first.shape[1]}]"
                )
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        pointers = torch.tensor(addresses, dtype=torch.int64)
        object.__setattr__(self, "pointers", pointers.to(first.device))
        object.__setattr__(self, "alignment", math.gcd(8, *addresses))


def capture_layer(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    flat: torch.Tensor,
    ring: torch.Tensor,
    addresses: torch.Tensor,
) -> None:
    """Fill one layer's part of some tiles, from this step's flat rows and the ring.

    tiles: [num_tiles + 1, rows, width] of one layer, contiguous. tile_ids: int64 [N],
    each at most once. flat: [tokens, width], each row contiguous (a slice of columns
    will do), in the tiles' dtype; or float32 for bfloat16 tiles and the reverse, and
    then rows are cast as a store into the ring casts them: to nearest, ties to even.
    ring: [ring_rows, width] in the tiles' dtype, contiguous. addresses: int64
    [N, rows]: a >= 0 is row a of flat, a < 0 is row -1 - a of the ring.

    Writes the named tiles only, on the current stream. Ring rows must not have been
    overwritten by this step yet.

    Example, two rows per tile, tile_ids [5], addresses [[-30, 100]]:
        tiles[5, 0] = ring[29]
        tiles[5, 1] = flat[100]

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    _check(tiles, tile_ids, addresses, dims=3)
    _check_rows("ring", ring, tiles, (tiles.dtype,))
    _check_rows("flat", flat, tiles, _castable_to(tiles.dtype))
    if not ring.is_contiguous():
        raise ValueError(f"ring has strides {ring.stride()}; expected a contiguous one")
    if tile_ids.shape[0]:
        run = _capture_layer_torch if _on_cpu(tiles) else capture_layer_triton
        run(tiles, tile_ids, flat, ring, addresses)


def gather_tiles(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    rings: RingTable,
    addresses: torch.Tensor,
) -> None:
    """Fill some tiles from the rings, all layers.

    tiles: [layers, num_tiles + 1, rows, width], contiguous, in the rings' dtype.
    tile_ids: int64 [N], each at most once. addresses: int64 [N, rows], ring rows, the
    same in every layer.

    Writes the named tiles only, on the current stream.

    Example, two rows per tile, tile_ids [5], addresses [[7, 0]], every layer:
        tiles[layer, 5, 0] = ring[7]
        tiles[layer, 5, 1] = ring[0]

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    _check(tiles, tile_ids, addresses, dims=4)
    _check_rings(tiles, rings)
    if tile_ids.shape[0]:
        run = _gather_tiles_torch if _on_cpu(tiles) else gather_tiles_triton
        run(tiles, tile_ids, rings, addresses)


def scatter_tiles(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    rings: RingTable,
    addresses: torch.Tensor,
) -> None:
    """Write some tiles into the rings, all layers: the inverse of gather_tiles.

    A tile may be named several times; an address must not. Writes the addressed ring
    rows only, on the current stream.

    Raises:
        ValueError: a shape, dtype or stride is not as in gather_tiles.
    """
    _check(tiles, tile_ids, addresses, dims=4)
    _check_rings(tiles, rings)
    if tile_ids.shape[0]:
        run = _scatter_tiles_torch if _on_cpu(tiles) else scatter_tiles_triton
        run(tiles, tile_ids, rings, addresses)


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _capture_layer_torch(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    flat: torch.Tensor,
    ring: torch.Tensor,
    addresses: torch.Tensor,
) -> None:
    from_ring = addresses < 0
    rows = flat[addresses.clamp(min=0)].to(tiles.dtype)
    rows[from_ring] = ring[-1 - addresses[from_ring]]
    tiles[tile_ids] = rows


def _gather_tiles_torch(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    rings: RingTable,
    addresses: torch.Tensor,
) -> None:
    for layer, ring in enumerate(rings.buffers):
        tiles[layer, tile_ids] = ring[addresses]


def _scatter_tiles_torch(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    rings: RingTable,
    addresses: torch.Tensor,
) -> None:
    for layer, ring in enumerate(rings.buffers):
        ring[addresses] = tiles[layer, tile_ids]


def _castable_to(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype, *(source for source, target in CASTS if target == dtype))


def _check(
    tiles: torch.Tensor, tile_ids: torch.Tensor, addresses: torch.Tensor, *, dims: int
) -> None:
    if tiles.dim() != dims or not tiles.is_contiguous():
        raise ValueError(
            f"tiles are {tuple(tiles.shape)}, strides {tiles.stride()}; expected "
            f"{dims} contiguous dimensions, the last three [tiles, rows, width]"
        )
    expected = (*tile_ids.shape[:1], tiles.shape[-2])
    if tile_ids.dim() != 1 or tuple(addresses.shape) != expected:
        raise ValueError(
            f"{tuple(tile_ids.shape)} tile ids come with addresses "
            f"{tuple(addresses.shape)}; expected [N] ids and [N, {tiles.shape[-2]}] "
            f"addresses, one per row of a tile"
        )
    if tile_ids.dtype != torch.int64 or addresses.dtype != torch.int64:
        raise ValueError(
            f"tile ids are {tile_ids.dtype} and addresses {addresses.dtype}; "
            f"expected torch.int64"
        )


def _check_rows(
    name: str,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> None:
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


def _check_rings(tiles: torch.Tensor, rings: RingTable) -> None:
    _check_rows("ring", rings.buffers[0], tiles, (tiles.dtype,))
    if len(rings.buffers) != tiles.shape[0]:
        raise ValueError(
            f"tiles have {tiles.shape[0]} layers and the table {len(rings.buffers)} "
            f"rings; expected one ring per layer, in the same order"
        )
