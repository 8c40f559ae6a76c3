"""The Triton kernel that writes tiles into rings, of words as in dsv4_tile_kernels.

A program moves a block of rows x columns of one tile, layer and stream. Widths are
read from the table, so that streams of different width share a launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.kvcache.dsv4_tile_kernels import BLOCK, WORDS

if TYPE_CHECKING:
    from sglang.kernels.ops.kvcache.dsv4_tiles import TileTable


@triton.jit
def _scatter_kernel(
    tile_pointers_ptr,  # int64 [entries], each the address of [tiles, ROWS, width] words
    ring_pointers_ptr,  # int64 [entries], each the address of [ring rows, width] words
    widths_ptr,  # int64 [entries], words per row
    tile_ids_ptr,  # int64 [N]
    addresses_ptr,  # int64 [N, ROWS]
    ROWS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,  # of the widest entry: others leave some idle
    BLOCK_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Axis 0 of the grid: tiles x blocks of rows x BLOCKS_PER_ROW. Axis 1: entries.
    BLOCK_ROWS: tl.constexpr = BLOCK // BLOCK_WIDTH
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    entry = tl.program_id(1)
    tiles = tl.cast(tl.load(tile_pointers_ptr + entry), tl.pointer_type(WORD))
    ring = tl.cast(tl.load(ring_pointers_ptr + entry), tl.pointer_type(WORD))
    width = tl.load(widths_ptr + entry)
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


def scatter_tables_triton(
    table: TileTable, tile_ids: torch.Tensor, addresses: torch.Tensor
) -> None:
    """scatter_tables() of dsv4_tiles as one launch, for at least one tile.

    Blocks per tile, by example: 128 rows of 128 words in blocks of 8 x 128 are 16; 4 rows of
    2,048 words in blocks of 1 x 1,024 are 8.
    """
    block_width = min(triton.next_power_of_2(table.max_width), BLOCK)
    blocks_per_row = triton.cdiv(table.max_width, block_width)
    blocks = triton.cdiv(table.rows, BLOCK // block_width) * blocks_per_row
    _scatter_kernel[(tile_ids.shape[0] * blocks, len(table.widths))](
        table.tile_pointers,
        table.ring_pointers,
        table.widths,
        tile_ids.contiguous(),
        addresses.contiguous(),
        ROWS=table.rows,
        WORD=WORDS[table.word],
        BLOCKS_PER_ROW=blocks_per_row,
        BLOCK_WIDTH=block_width,
        BLOCK=BLOCK,
        num_warps=4,
    )
