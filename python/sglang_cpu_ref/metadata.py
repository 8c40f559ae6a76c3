"""Per-forward attention metadata: lengths, page tables and slots of the compressed rows."""

from __future__ import annotations

import torch


def page_table_from_req_to_token(
    req_to_token: torch.Tensor, req_rows: torch.Tensor, max_seq_len: int, page_size: int
) -> torch.Tensor:
    """Replaces ``attn_glue_hip.page_table_from_req_to_token``: page ids, int32 [N, pages].

    req_to_token: [slots, max context] token rows; req_rows: [N] slots.
    """
    pages = req_to_token[:, :max_seq_len:page_size][req_rows.long()]
    return pages.div(page_size, rounding_mode="floor").to(torch.int32)


def init_compression_metadata(
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    raw_out_loc: torch.Tensor,
    page_table: torch.Tensor | None = None,
    page_size: int = 0,
    compute_page_indices: bool = True,
) -> tuple[torch.Tensor | None, ...]:
    """Replaces ``metadata_kernel.init_compression_metadata``.

    Per row (a token of a prefill, a request of a decode): for ratio 4 and then 128, the
    slot that the token completes (0 if none), its group's first position, the number of
    whole groups, and that number but at least 1; last, the rows of all c128 groups
    [N, width], -1 padded (None unless ``compute_page_indices``).
    """
    lens = seq_lens.to(torch.int32)
    writes = raw_out_loc.shape[0]
    columns: list[torch.Tensor | None] = []
    for ratio in (4, 128):
        completes = lens[:writes] % ratio == 0
        groups = lens // ratio
        columns += [
            torch.where(completes, raw_out_loc.long() // ratio, 0),
            (positions.to(torch.int32) & ~(ratio - 1)),
            groups,
            groups.clamp_min(1),
        ]
    if not compute_page_indices:
        return (*columns, None)
    assert page_table is not None
    per_page = page_size // 128
    rows = page_table.to(torch.int32).unsqueeze(-1) * per_page + torch.arange(per_page, dtype=torch.int32)
    rows = rows.flatten(1)
    beyond = torch.arange(rows.shape[1]) >= (lens // 128).unsqueeze(1)
    return (*columns, rows.masked_fill_(beyond, -1))


def sparse_buffers(
    *,
    c4_topk_lengths_clamp1: torch.Tensor,
    c4_topk_lengths_raw: torch.Tensor,
    c1_topk_lengths_clamp1: torch.Tensor | None,
    c2_topk_lengths_clamp1: torch.Tensor | None,
    index_topk: int,
    page_index_align: int,
) -> dict[str, torch.Tensor]:
    """Replaces ``attn_glue_hip.sparse_buffers``: lengths cut to the top-k, and -1 filled tables.

    The ratio-1 and ratio-2 inputs belong to DeepSeek-V4.1, which unified_kv refuses.
    """
    if c1_topk_lengths_clamp1 is not None or c2_topk_lengths_clamp1 is not None:
        raise NotImplementedError("the CPU reference serves DeepSeek-V4, not V4.1 (compress ratios 1 and 2)")
    rows = c4_topk_lengths_clamp1.shape[0]
    width = -(-index_topk // page_index_align) * page_index_align
    return {
        "c4_sparse_topk_lengths": c4_topk_lengths_clamp1.clamp_max(index_topk),
        "c4_sparse_topk_lengths_raw": c4_topk_lengths_raw.clamp_max(index_topk),
        "c4_sparse_page_indices": torch.full((rows, width), -1, dtype=torch.int32),
    }
