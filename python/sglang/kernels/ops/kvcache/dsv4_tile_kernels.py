"""Triton kernels that fill tiles: rows move as unsigned words, never as floats.

Words keep every bit (fp8 codes, NaN payloads), and a backend that lacks a float type
can still move it. Arguments are trusted: dsv4_tiles checks shapes and dtypes; ids and
addresses are checked by nobody, because only the device knows them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from sglang.kernels.ops.kvcache.dsv4_tiles import RingTable

# The casts of capture_layer, by (flat dtype, tile dtype).
CASTS = {
    (torch.float32, torch.bfloat16): "narrow",
    (torch.bfloat16, torch.float32): "widen",
}
# Words per program: 8 KiB of what V4 stores.
BLOCK = 1024
WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@triton.jit
def _round_to_bfloat16(bits):
    # float32 bits to bfloat16 bits, nearest even; in integers, because the interpreter
    # truncates where it casts. A NaN must not be rounded: it would become infinite.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def _capture_kernel(
    tiles_ptr,  # [num_tiles + 1, ROWS, WIDTH] words
    tile_ids_ptr,  # int64 [N]
    flat_ptr,  # [tokens, WIDTH] FLAT_WORDs, rows flat_stride apart
    ring_ptr,  # [ring_rows, WIDTH] words
    addresses_ptr,  # int64 [N, ROWS]
    flat_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    FLAT_WORD: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (ROWS * WIDTH + BLOCK - 1) // BLOCK
    item = tl.program_id(0) // BLOCKS
    offset = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = offset < ROWS * WIDTH
    row = offset // WIDTH
    column = offset % WIDTH
    tiles = tl.cast(tiles_ptr, tl.pointer_type(WORD))
    flat = tl.cast(flat_ptr, tl.pointer_type(FLAT_WORD))
    ring = tl.cast(ring_ptr, tl.pointer_type(WORD))

    address = tl.load(addresses_ptr + item * ROWS + row, mask=inside, other=0)
    from_ring = address < 0
    value = tl.load(
        flat + address * flat_stride + column,
        mask=inside & (address >= 0),
        other=0,
    )
    if CAST == "narrow":
        value = _round_to_bfloat16(value)
    if CAST == "widen":
        value = value.to(tl.uint32) << 16
    held = tl.load(
        ring + (-1 - address) * WIDTH + column, mask=inside & from_ring, other=0
    )
    tile = tl.load(tile_ids_ptr + item)
    tl.store(
        tiles + tile * (ROWS * WIDTH) + offset,
        tl.where(from_ring, held, value),
        mask=inside,
    )


@triton.jit
def _gather_kernel(
    tiles_ptr,  # [layers, num_tiles + 1, ROWS, WIDTH] words
    tile_ids_ptr,  # int64 [N]
    ring_pointers_ptr,  # int64 [layers], each the address of [ring rows, WIDTH] words
    addresses_ptr,  # int64 [N, ROWS]
    layer_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (ROWS * WIDTH + BLOCK - 1) // BLOCK
    item = tl.program_id(0) // BLOCKS
    layer = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = offset < ROWS * WIDTH
    row = offset // WIDTH
    column = offset % WIDTH
    tiles = tl.cast(tiles_ptr, tl.pointer_type(WORD))
    ring = tl.cast(tl.load(ring_pointers_ptr + layer), tl.pointer_type(WORD))

    tile = tl.load(tile_ids_ptr + item)
    address = tl.load(addresses_ptr + item * ROWS + row, mask=inside, other=0)
    in_tile = tiles + layer * layer_stride + tile * (ROWS * WIDTH) + offset
    in_ring = ring + address * WIDTH + column
    tl.store(in_tile, tl.load(in_ring, mask=inside), mask=inside)


def capture_layer_triton(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    flat: torch.Tensor,
    ring: torch.Tensor,
    addresses: torch.Tensor,
) -> None:
    """capture_layer() of dsv4_tiles as one launch, for at least one tile.

    A NaN rounded to bfloat16 becomes 0x7FC0; all other values are those of torch.
    """
    cast = CASTS.get((flat.dtype, tiles.dtype), "")
    if cast:
        word, flat_word = tiles.itemsize, flat.itemsize
    else:
        word = flat_word = math.gcd(
            8,
            row_bytes(tiles),
            flat.stride(0) * flat.itemsize,
            *(t.data_ptr() for t in (tiles, flat, ring)),
        )
    rows, width = tiles.shape[1], row_bytes(tiles) // word
    _capture_kernel[_grid(tile_ids, rows, width)](
        tiles.view(torch.uint8),
        tile_ids.contiguous(),
        flat.view(torch.uint8),
        ring.view(torch.uint8),
        addresses.contiguous(),
        flat.stride(0) * flat.itemsize // flat_word,
        ROWS=rows,
        WIDTH=width,
        WORD=WORDS[word],
        FLAT_WORD=WORDS[flat_word],
        CAST=cast,
        BLOCK=BLOCK,
        num_warps=4,
    )


def gather_tiles_triton(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    rings: RingTable,
    addresses: torch.Tensor,
) -> None:
    """gather_tiles() of dsv4_tiles as one launch, for at least one tile."""
    word = math.gcd(rings.alignment, row_bytes(tiles), tiles.data_ptr())
    layers, _, rows, _ = tiles.shape
    width = row_bytes(tiles) // word
    _gather_kernel[(*_grid(tile_ids, rows, width), layers)](
        tiles.view(torch.uint8),
        tile_ids.contiguous(),
        rings.pointers,
        addresses.contiguous(),
        tiles.stride(0) * tiles.itemsize // word,
        ROWS=rows,
        WIDTH=width,
        WORD=WORDS[word],
        BLOCK=BLOCK,
        num_warps=4,
    )


def row_bytes(tiles: torch.Tensor) -> int:
    """Bytes of one row of ``tiles``."""
    return tiles.shape[-1] * tiles.itemsize


def _grid(tile_ids: torch.Tensor, rows: int, width: int) -> tuple[int]:
    return (tile_ids.shape[0] * triton.cdiv(rows * width, BLOCK),)
