"""Index streams of the unified KV pool: integer arithmetic, vectorised.

Replacements of ``unified_kv_kernels.runtime``'s builders, entry for entry equal to
their Triton kernels.
"""

from __future__ import annotations

import torch


def _indptr(lengths: torch.Tensor) -> torch.Tensor:
    """Exclusive prefix sum, int32 [N + 1]."""
    out = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32)
    torch.cumsum(lengths, dim=0, out=out[1:])
    return out


def build_prefill_indices(
    *,
    compress_ratio: int,
    state_slot: torch.Tensor,
    positions: torch.Tensor,
    chunk_start: torch.Tensor,
    cu_q: torch.Tensor,
    win: int,
    ring_stride: int,
    swa_pages: int,
    c128_page_indices: torch.Tensor | None,
    c4_sparse_page_indices: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows each prefill token attends to: (prefix, prefix_indptr, extend, extend_indptr).

    Per token t at position p of a chunk that starts at s: the prefix list holds the
    ring rows of positions [max(p - win + 1, 0), s), then the compressed rows; the
    extend list holds this chunk's rows of positions [max(p - win + 1, s), p]. All
    inputs are per token, [T]; page index tables are [>= T, width], -1 padded. int32.

    Example, win=4, ring_stride=4, slot 1, s=6, p=7: prefix = rows of positions 4, 5
    = 1*4 + 0, 1*4 + 1 = (4, 5); extend = rows cu_q, cu_q + 1.
    """
    count = state_slot.shape[0]
    position, start = positions[:count].long(), chunk_start.long()
    low = (position - win + 1).clamp_min(0)
    in_chunk = position - start
    extend_count = (in_chunk + 1).clamp_max(win)
    ring_count = (start - low).clamp(0, win)

    step = torch.arange(win)
    ring = state_slot.long()[:, None] * ring_stride + (low[:, None] + step) % ring_stride
    prefix, present = ring, step < ring_count[:, None]
    pages = {0: None, 4: c4_sparse_page_indices, 128: c128_page_indices}[compress_ratio]
    if pages is not None:
        compressed = pages[:count].long()
        prefix = torch.cat((ring, compressed + swa_pages), dim=1)
        present = torch.cat((present, compressed >= 0), dim=1)
    first = cu_q.long() + in_chunk - extend_count + 1
    extend = first[:, None] + step
    own = step < extend_count[:, None]
    return (
        prefix[present].to(torch.int32),
        _indptr(present.sum(dim=1)),
        extend[own].to(torch.int32),
        _indptr(extend_count),
    )


def build_decode_streams(
    *,
    state_slot: torch.Tensor,
    positions: torch.Tensor,
    swa_len: torch.Tensor,
    hca_len: torch.Tensor,
    csa_len: torch.Tensor,
    hca_page_indices: torch.Tensor,
    csa_width: int,
    win: int,
    ring_stride: int,
    swa_pages: int,
) -> tuple[torch.Tensor, ...]:
    """Rows each decode token attends to, for ratio 0, 128 and 4 layers.

    Returns (swa, swa_indptr, hca, hca_indptr, csa, csa_indptr), int32. Each stream
    has room for the widest token; a token's list starts with the ring rows of its
    window in ascending position. The compressed tail of ``csa`` is left for
    ``fill_compress_tail``, once per layer, as upstream does.
    """
    count = state_slot.shape[0]
    slot, position = state_slot.long(), positions[:count].long()
    window = (position + 1).clamp_max(win)
    step = torch.arange(win)
    rows = slot[:, None] * ring_stride + (position - window + 1)[:, None].add(step) % ring_stride
    own = step < window[:, None]

    def stream(tail: torch.Tensor | None, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        indptr = _indptr(swa_len if tail is None else swa_len + tail)
        out = torch.full((count * (win + width),), -1, dtype=torch.int32)
        target = indptr[:-1].long()[:, None] + step
        out[target[own]] = rows[own].to(torch.int32)
        return out, indptr

    swa, swa_indptr = stream(None, 0)
    hca, hca_indptr = stream(hca_len, hca_page_indices.shape[1])
    csa, csa_indptr = stream(csa_len, csa_width)
    fill_compress_tail(
        indices=hca,
        indptr=hca_indptr,
        prefix_len=swa_len,
        page_indices=hca_page_indices[:count],
        valid_len=hca_len,
        swa_pages=swa_pages,
    )
    return swa, swa_indptr, hca, hca_indptr, csa, csa_indptr


def fill_compress_tail(
    *,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    prefix_len: torch.Tensor,
    page_indices: torch.Tensor,
    valid_len: torch.Tensor,
    swa_pages: int,
) -> None:
    """Write each token's compressed rows behind its window, into ``indices``.

    Token n gets ``swa_pages + page_indices[n, :valid_len[n]]`` (-1 stays -1) from
    ``indptr[n] + prefix_len[n]`` on.
    """
    count, width = page_indices.shape
    if count == 0 or width == 0:
        return
    step = torch.arange(width)
    own = step < valid_len[:count, None]
    target = (indptr[:count].long() + prefix_len[:count].long())[:, None] + step
    rows = torch.where(page_indices >= 0, page_indices + swa_pages, -1)
    indices[target[own]] = rows[own].to(torch.int32)
