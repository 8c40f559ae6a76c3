"""The c4 indexer: logits of compressed rows and the choice of the best ``index_topk``."""

from __future__ import annotations

from typing import Any

import torch

from sglang_cpu_ref.elementwise import row_sum
from sglang_cpu_ref.exact import grid_product

_KEYS_PER_PAGE = 64
# Query rows taken at a time: bounds the gathered keys of a long prefill.
_QUERY_BLOCK = 128


def fp8_paged_mqa_logits(
    q_fp8: torch.Tensor,
    kvcache_fp8: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    deep_gemm_metadata: Any,
    max_seq_len: int,
    clean_logits: bool = True,
) -> torch.Tensor:
    """Replaces ``fp8_paged_mqa_logits_torch``: sum_h w_h * relu(q_h . k) * k_scale.

    q_fp8: [N, 1, H, 128]; kvcache_fp8: [pages, 64, 1, 132] (128 e4m3 codes per key, all
    keys first, then one fp32 scale per key); weight: fp32 [N, H]; seq_lens: [N] compressed
    lengths; page_table: [N, pages per row]. Returns fp32 [N, max_seq_len], 0 beyond a
    row's length.
    """
    rows, _, heads, dim = q_fp8.shape
    logits = torch.zeros((rows, max_seq_len), dtype=torch.float32)
    flat = kvcache_fp8.view(kvcache_fp8.shape[0], -1)
    for start in range(0, rows, _QUERY_BLOCK):
        block = slice(start, min(start + _QUERY_BLOCK, rows))
        # Neighbouring query rows belong to few requests: score each distinct page list once.
        tables, owner = torch.unique(page_table[block], dim=0, return_inverse=True)
        for k in range(tables.shape[0]):
            mine = (owner == k).nonzero().squeeze(1) + start
            length = min(int(seq_lens[mine].max()), max_seq_len)
            if length == 0:
                continue
            keys, scales = _keys(flat, tables[k], length, dim)
            q = q_fp8[mine, 0].double().reshape(-1, dim)
            # e4m3 codes are multiples of 2**-9 up to 448: a sum of 128 products is exact.
            dots = grid_product(q, keys.t()).float().view(-1, heads, length).clamp_min(0.0)
            scores = row_sum(dots * weight[mine].unsqueeze(-1), dim=1) * scales
            beyond = torch.arange(length) >= seq_lens[mine].unsqueeze(1)
            logits[mine, :length] = scores.masked_fill_(beyond, 0.0)
    return logits


def _keys(flat: torch.Tensor, pages: torch.Tensor, length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``length`` keys of a page list: codes as float64 [length, dim], scales fp32 [length]."""
    used = pages[: (length + _KEYS_PER_PAGE - 1) // _KEYS_PER_PAGE].clamp_min(0).long()
    data = flat[used]
    split = _KEYS_PER_PAGE * dim
    codes = data[:, :split].contiguous().view(torch.float8_e4m3fn).reshape(-1, dim)
    scales = data[:, split:].contiguous().view(torch.float32).reshape(-1)
    return codes[:length].double(), scales[:length]


def topk_transform(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """Replaces ``topk_transform_paged``: the best rows of each query, ascending.

    scores: [N, width]; seq_lens: [N]; page_tables: [N, pages]. Writes ``out_page_indices``
    int32 [N, topk]: ``page * page_size + offset``, -1 padded, and the positions themselves into
    ``out_raw_indices``. Equal scores: the earlier row wins, whatever ``width`` is. (relu
    makes many scores exactly 0, and ``torch.topk`` breaks ties by the width.)
    """
    count, topk = out_page_indices.shape
    lengths = seq_lens.view(-1, 1)
    raw = torch.arange(topk).expand(count, -1)
    raw = raw.masked_fill(raw >= lengths, -1)
    crowded = (lengths.squeeze(1) > topk).nonzero().squeeze(1)
    if crowded.numel():
        beyond = torch.arange(scores.shape[1]) >= lengths[crowded]
        ranked = scores[crowded].masked_fill(beyond, float("-inf"))
        best = torch.sort(ranked, dim=1, descending=True, stable=True).indices[:, :topk]
        raw[crowded] = torch.sort(best, dim=1).values
    page = page_tables.long().gather(1, (raw.clamp_min(0) // page_size).clamp_max(page_tables.shape[1] - 1))
    rows = page * page_size + raw.clamp_min(0) % page_size
    out_page_indices.copy_(rows.masked_fill(raw < 0, -1))
    if out_raw_indices is not None:
        out_raw_indices.copy_(raw)
