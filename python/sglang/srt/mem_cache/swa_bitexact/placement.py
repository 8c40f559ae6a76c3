"""Which page boundaries get a tile: pure functions of lengths."""

from __future__ import annotations


def extend_boundaries(
    chunk_start: int,
    chunk_end: int,
    sequence_len: int,
    *,
    page_size: int,
    stride: int,
    branch_at: int | None = None,
) -> tuple[int, ...]:
    """Boundaries in (chunk_start, chunk_end] that a prefill chunk captures, ascending.

    A boundary is a multiple of ``page_size``. It is captured if its page number is a
    multiple of ``stride`` (0: no grid), if it is the last boundary of the sequence, whose
    known length is ``sequence_len``, or if it is ``branch_at``, where another request left
    this sequence's path beyond the last reuse point.

    A prompt of exactly k pages also gets k - 1: one token must be computed, so the same
    prompt can be reused up to there only.

    Example, page_size=256, stride=4, sequence_len=2_700, branch_at=768:
        chunk 0 to 2_048     -> (768, 1024, 2048)
        chunk 2_048 to 2_700 -> (2560,)          the last boundary of 2_700
        chunk 300 to 520     -> ()               512: no multiple of 4 pages, not the last
    sequence_len=1_024, stride=0, chunk 0 to 1_024 -> (768, 1024)

    A chunk may begin anywhere. With chunks of 512, stride=0 and sequence_len=1_100 the last
    boundary, 1_024, is captured by the second of three chunks.

    Raises:
        ValueError: the chunk ends before it starts or beyond the sequence, or ``branch_at``
            is no boundary.
    """
    if not 0 <= chunk_start <= chunk_end <= sequence_len:
        raise ValueError(
            f"chunk [{chunk_start}, {chunk_end}) of a sequence of {sequence_len}: expected "
            f"0 <= start <= end <= length"
        )
    if branch_at and branch_at % page_size:
        raise ValueError(
            f"branch_at is {branch_at}, expected a multiple of {page_size}"
        )
    wanted = {sequence_len // page_size * page_size}
    wanted.add((sequence_len - 1) // page_size * page_size)
    if branch_at:
        wanted.add(branch_at)
    if stride:
        step = page_size * stride
        wanted.update(range(chunk_start // step * step + step, chunk_end + 1, step))
    return tuple(sorted(b for b in wanted if chunk_start < b <= chunk_end))


def on_grid(boundary: int, *, page_size: int, stride: int) -> bool:
    """Whether a boundary is kept for its place; stride 2, page 256: 512 is, 768 is not."""
    return bool(stride) and boundary % (page_size * stride) == 0


def suggested_stride(
    context_tokens: int, *, tiles: int, pages: int, page_size: int
) -> int:
    """The densest grid whose tiles last as long in a cache as the rows that they belong to.

    A cache of ``tiles`` tiles and ``pages`` FULL pages, full of contexts of ``context_tokens``,
    has tiles * context / (pages * page_size) tiles for each of them. The last boundary
    and one branch point take two; the grid may take the rest, evenly over the context. 0, no
    grid, where nothing is left.

    Example, 14_623 tiles and 59_575 pages of 256 tokens: a context of 32_768 tokens has 31.4
    tiles, 29 of them whole and for the grid of its 128 pages -> 5. 4_096 tokens: 3.9 tiles, 1
    for the grid of 16 pages -> 16. 2_048 tokens: 1.96 tiles -> 0.

    Raises:
        ValueError: a size is not positive.
    """
    if min(context_tokens, tiles, pages, page_size) <= 0:
        raise ValueError(
            f"context of {context_tokens} tokens, {tiles} tiles, {pages} pages of "
            f"{page_size}: expected sizes above 0"
        )
    for_grid = tiles * context_tokens // (pages * page_size) - 2
    if for_grid < 1:
        return 0
    return max(1, -(-context_tokens // (page_size * for_grid)))
