"""Move rows between the rings of request slots and tiles: pure copies, one launch each.

A tile buffer is [layers, num_tiles + 1, rows, width], contiguous. Ring tables list one
[ring_rows, width] buffer per layer, in the same order. Triton on an accelerator, NumPy
on a CPU; both copy the same bytes.

Ids and addresses are not read on the host, so that no call synchronizes: one out of
range is an error on a CPU, and a stray read or write on an accelerator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from sglang.kernels.ops.kvcache.dsv4_tile_checks import (
    castable_to,
    check_ids,
    check_ring,
    check_rings,
    check_rows,
    check_streams,
    check_tiles,
)
from sglang.kernels.ops.kvcache.dsv4_tile_kernels import (
    capture_layer_triton,
    gather_tiles_triton,
)
from sglang.kernels.ops.kvcache.dsv4_tile_rows import (
    Bytes,
    Runs,
    byte_rows,
    capture_layer_cpu,
    gather_tiles_cpu,
    runs,
    scatter_cpu,
)
from sglang.kernels.ops.kvcache.dsv4_tile_scatter_kernels import scatter_tables_triton


@dataclass(frozen=True)
class RingTable:
    """The ring buffers of one stream, one per layer: [any rows, width], contiguous.

    pointers: int64 [layers] on their device, so that one launch reaches all layers.
    alignment: 8, 4, 2 or 1, the most bytes to which each of them is aligned.
    byte_rows: on a CPU, each as uint8 [rows, bytes of a row].
    """

    buffers: tuple[torch.Tensor, ...]
    pointers: torch.Tensor = field(init=False)
    alignment: int = field(init=False)
    byte_rows: tuple[Bytes, ...] = field(init=False, repr=False)

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
        on_cpu = self.buffers if _on_cpu(first) else ()
        object.__setattr__(self, "byte_rows", tuple(map(byte_rows, on_cpu)))


@dataclass(frozen=True)
class TileTable:
    """The tiles and rings of several streams, so that one launch reaches all of them.

    streams: (tiles [layers, num_tiles + 1, rows, width], rings) per stream. All have
    the same rows; layers, width and dtype may differ, because rows move as bytes. The
    table holds addresses: make it once, of buffers that stay where they are.

    An entry is one layer of one stream. tile_pointers, ring_pointers, widths: int64
    [entries] on the tiles' device; widths in words. word: bytes of a word, the most to
    which every buffer and every row is aligned, at most 8. max_width: widest entry.
    byte_rows: on a CPU, the tiles and the ring of each entry, as uint8.

    Example, V4-Flash, 21 ratio-4 layers, fp32 state:
        TileTable(((c4_tiles, c4_rings), (indexer_tiles, indexer_rings)))
        42 entries, words of 8 bytes, widths 21 x 1024 and 21 x 256

    Raises:
        ValueError: there is no stream, rows or devices differ, or the rings of a
            stream are not those of its tiles.
    """

    streams: tuple[tuple[torch.Tensor, RingTable], ...]
    tile_pointers: torch.Tensor = field(init=False)
    ring_pointers: torch.Tensor = field(init=False)
    widths: torch.Tensor = field(init=False)
    word: int = field(init=False)
    max_width: int = field(init=False)
    byte_rows: tuple[tuple[Bytes, Bytes], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_streams(self.streams)
        layers = [layer for tiles, _ in self.streams for layer in tiles.unbind()]
        addresses = [layer.data_ptr() for layer in layers]
        row_bytes = [layer.shape[-1] * layer.itemsize for layer in layers]
        alignments = [rings.alignment for _, rings in self.streams]
        word = math.gcd(*alignments, *addresses, *row_bytes)
        widths = [nbytes // word for nbytes in row_bytes]
        ring_pointers = torch.cat([rings.pointers for _, rings in self.streams])
        device = ring_pointers.device
        for name, value in (
            ("tile_pointers", torch.tensor(addresses, dtype=torch.int64).to(device)),
            ("ring_pointers", ring_pointers),
            ("widths", torch.tensor(widths, dtype=torch.int64).to(device)),
            ("word", word),
            ("max_width", max(widths)),
            ("byte_rows", self._byte_rows() if device.type == "cpu" else ()),
        ):
            object.__setattr__(self, name, value)

    def _byte_rows(self) -> tuple[tuple[Bytes, Bytes], ...]:
        return tuple(
            entry
            for tiles, rings in self.streams
            for entry in zip(byte_rows(tiles), rings.byte_rows, strict=True)
        )

    @property
    def rows(self) -> int:
        """Rows of a tile, and so addresses per tile."""
        return self.streams[0][0].shape[2]


def capture_layer(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    flat: torch.Tensor,
    ring: torch.Tensor,
    addresses: torch.Tensor,
    found: Runs | None = None,
) -> None:
    """Fill one layer's part of some tiles, from this step's flat rows and the ring.

    tiles: [num_tiles + 1, rows, width] of one layer, contiguous. tile_ids: int64 [N],
    each at most once. flat: [tokens, width], each row contiguous (a slice of columns
    will do), in the tiles' dtype; or float32 for bfloat16 tiles and the reverse, and
    then rows are cast as a store into the ring casts them: to nearest, ties to even.
    ring: [ring_rows, width] in the tiles' dtype, contiguous. addresses: int64
    [N, rows]: a >= 0 is row a of flat, a < 0 is row -1 - a of the ring. found: on a CPU,
    the coded runs() of these, for who has them.

    Writes the named tiles only, on the current stream. Ring rows must not have been
    overwritten by this step yet.

    Example, two rows per tile, tile_ids [5], addresses [[-30, 100]]:
        tiles[5, 0] = ring[29]
        tiles[5, 1] = flat[100]

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    check_tiles(tiles, dims=3)
    check_ids(tiles.shape[1], tile_ids, addresses)
    check_ring(ring, tiles)
    check_rows("flat", flat, tiles, castable_to(tiles.dtype))
    if tile_ids.shape[0]:
        if _on_cpu(tiles):
            found = found or runs(tile_ids, addresses, coded=True)
            capture_layer_cpu(tiles, flat, ring, found)
        else:
            capture_layer_triton(tiles, tile_ids, flat, ring, addresses)


def gather_tiles(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    rings: RingTable,
    addresses: torch.Tensor,
    found: Runs | None = None,
) -> None:
    """Fill some tiles from the rings, all layers.

    tiles: [layers, num_tiles + 1, rows, width], contiguous, in the rings' dtype.
    tile_ids: int64 [N], each at most once. addresses: int64 [N, rows], ring rows, the
    same in every layer. found: on a CPU, the runs() of these, for who has them.

    Writes the named tiles only, on the current stream.

    Example, two rows per tile, tile_ids [5], addresses [[7, 0]], every layer:
        tiles[layer, 5, 0] = ring[7]
        tiles[layer, 5, 1] = ring[0]

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    check_tiles(tiles, dims=4)
    check_ids(tiles.shape[2], tile_ids, addresses)
    check_rings(tiles, rings)
    if tile_ids.shape[0]:
        if _on_cpu(tiles):
            gather_tiles_cpu(tiles, rings, found or runs(tile_ids, addresses))
        else:
            gather_tiles_triton(tiles, tile_ids, rings, addresses)


def scatter_tables(
    table: TileTable,
    tile_ids: torch.Tensor,
    addresses: torch.Tensor,
    found: Runs | None = None,
) -> None:
    """Write some tiles into the rings, all streams and layers of a table, in one launch.

    tile_ids: int64 [N]; a tile may be named several times. addresses: int64 [N, rows],
    ring rows, the same in every stream and layer; none may be named twice. found: on a
    CPU, the runs() of these, for who has them.

    Writes the addressed ring rows only, on the current stream, which must have waited for
    these tiles: while a load goes layer by layer, use a table per layer.

    Example, two rows per tile, tile_ids [5], addresses [[7, 0]], every stream and layer:
        ring[7] = tiles[layer, 5, 0]
        ring[0] = tiles[layer, 5, 1]

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    check_ids(table.rows, tile_ids, addresses)
    if tile_ids.shape[0]:
        if _on_cpu(table.tile_pointers):
            scatter_cpu(table.byte_rows, found or runs(tile_ids, addresses))
        else:
            scatter_tables_triton(table, tile_ids, addresses)


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
