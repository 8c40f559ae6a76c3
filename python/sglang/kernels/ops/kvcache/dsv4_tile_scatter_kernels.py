"""Triton kernels that write tiles into rings, of words as in dsv4_tile_kernels.

A program moves a block of rows x columns of one tile, layer and stream. Widths are
read from the table, so that streams of different width share a launch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.kvcache.dsv4_tile_kernels import BLOCK, WORDS, row_bytes

if TYPE_CHECKING:
    from sglang.kernels.ops.kvcache.dsv4_tiles import TileTable


@triton.jit
def _scatter_block(
    tiles,  # pointer to [num_tiles + 1, ROWS, width] words
    ring,  # pointer to [ring_rows, width] words
    tile_ids_ptr,
    addresses_ptr,
    width,
    ROWS: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Axis 0 of the grid: tiles x blocks of rows x BLOCKS_PER_ROW.
    BLOCK_ROWS: tl.constexpr = BLOCK // BLOCK_WIDTH
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    rows = tl.program_id(0) // BLOCKS_PER_ROW
    item = rows // ROW_BLOCKS
    row = rows % ROW_BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    first = tl.program_id(0) % BLOCKS_PER_ROW * BLOCK_WIDTH
    column = first + tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = (row < ROWS) & (column < width)

    tile = tl.load(tile_ids_ptr + item)
    address = tl.load(addresses_ptr + item * ROWS + row, mask=row < ROWS, other=0)
    held = tl.load(tiles + (tile * ROWS + row) * width + column, mask=inside)
    tl.store(ring + address * width + column, held, mask=inside)


@triton.jit
def _scatter_table_kernel(
    tile_pointers_ptr,  # int64 [entries], each the address of one layer's tiles
    ring_pointers_ptr,  # int64 [entries], each the address of one layer's ring
    widths_ptr,  # int64 [entries], words per row
    tile_ids_ptr,  # int64 [N]
    addresses_ptr,  # int64 [N, ROWS]
    ROWS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,  # of the widest entry: others leave some idle
    BLOCK_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(1)
    _scatter_block(
        tl.cast(tl.load(tile_pointers_ptr + entry), tl.pointer_type(WORD)),
        tl.cast(tl.load(ring_pointers_ptr + entry), tl.pointer_type(WORD)),
        tile_ids_ptr,
        addresses_ptr,
        tl.load(widths_ptr + entry),
        ROWS,
        BLOCKS_PER_ROW,
        BLOCK_WIDTH,
        BLOCK,
    )


@triton.jit
def _scatter_layer_kernel(
    tiles_ptr,  # [num_tiles + 1, ROWS, WIDTH] words
    tile_ids_ptr,  # int64 [N]
    ring_ptr,  # [ring_rows, WIDTH] words
    addresses_ptr,  # int64 [N, ROWS]
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _scatter_block(
        tl.cast(tiles_ptr, tl.pointer_type(WORD)),
        tl.cast(ring_ptr, tl.pointer_type(WORD)),
        tile_ids_ptr,
        addresses_ptr,
        WIDTH,
        ROWS,
        BLOCKS_PER_ROW,
        BLOCK_WIDTH,
        BLOCK,
    )


def scatter_tables_triton(
    table: TileTable, tile_ids: torch.Tensor, addresses: torch.Tensor
) -> None:
    """scatter_tables() of dsv4_tiles as one launch, for at least one tile."""
    blocks, constants = _scatter_blocks(tile_ids, table.rows, table.max_width)
    _scatter_table_kernel[(blocks, len(table.widths))](
        table.tile_pointers,
        table.ring_pointers,
        table.widths,
        tile_ids.contiguous(),
        addresses.contiguous(),
        WORD=WORDS[table.word],
        **constants,
    )


def scatter_layer_triton(
    tiles: torch.Tensor,
    tile_ids: torch.Tensor,
    ring: torch.Tensor,
    addresses: torch.Tensor,
) -> None:
    """scatter_layer() of dsv4_tiles as one launch, for at least one tile."""
    word = math.gcd(8, row_bytes(tiles), tiles.data_ptr(), ring.data_ptr())
    width = row_bytes(tiles) // word
    blocks, constants = _scatter_blocks(tile_ids, tiles.shape[1], width)
    _scatter_layer_kernel[(blocks,)](
        tiles.view(torch.uint8),
        tile_ids.contiguous(),
        ring.view(torch.uint8),
        addresses.contiguous(),
        WIDTH=width,
        WORD=WORDS[word],
        **constants,
    )


def _scatter_blocks(
    tile_ids: torch.Tensor, rows: int, width: int
) -> tuple[int, dict[str, int]]:
    """Axis 0 of the grid, and the constants of _scatter_block that go with it.

    Example, one tile: 128 rows of 128 words in blocks of 8 x 128 are 16 blocks;
    4 rows of 2,048 words in blocks of 1 x 1,024 are 8.
    """
    block_width = min(triton.next_power_of_2(width), BLOCK)
    blocks_per_row = triton.cdiv(width, block_width)
    blocks = triton.cdiv(rows, BLOCK // block_width) * blocks_per_row
    return tile_ids.shape[0] * blocks, {
        "ROWS": rows,
        "BLOCKS_PER_ROW": blocks_per_row,
        "BLOCK_WIDTH": block_width,
        "BLOCK": BLOCK,
        "num_warps": 4,
    }
