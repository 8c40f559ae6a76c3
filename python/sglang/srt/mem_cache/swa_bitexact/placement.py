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
