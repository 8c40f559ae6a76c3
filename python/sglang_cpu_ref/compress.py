"""The overlapping compressors: plan, pooling, and norm + rope + store.

Replacements of the JIT kernels behind ``kernels.ops.attention.dsv4.compress``. The
plans keep upstream's byte layout (16-byte CompressPlan and DecodePlan, 8-byte
WritePlan), because upstream's own code reads sequence lengths out of them.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_cpu_ref.elementwise import hadamard, rms_norm, row_sum, softmax
from sglang_cpu_ref.quantize import fp8_rows
from sglang_cpu_ref.rope import rotate_tail

_FLOAT_MIN = torch.finfo(torch.float32).min
# Windows pooled at a time: 64 of 128 rows of 1,024 floats are 32 MiB, as are 1,024 of 8 rows.
_POOL_BLOCK = {4: 1024, 128: 64}


def _as_bytes(columns: list[torch.Tensor]) -> torch.Tensor:
    """Columns [N] packed row-wise as little-endian int32 -> uint8 [N, 4 * columns]."""
    return torch.stack([c.to(torch.int32) for c in columns], dim=1).contiguous().view(torch.uint8)


def _ring_row(slot: torch.Tensor, position: torch.Tensor, ring_size: int) -> torch.Tensor:
    return slot.long() * ring_size + position % ring_size


def _check_request_ring(compress_ratio: int, use_req_ring: bool) -> None:
    if compress_ratio == 4 and not use_req_ring:
        raise NotImplementedError(
            "the CPU reference keeps c4 state in per-request rings only: start with "
            "SGLANG_HACK_FLASHMLA_BACKEND=unified_kv_triton"
        )


def plan_decode(
    compress_ratio: int,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    swa_page_size: int,
    ring_size: int,
    use_req_ring: bool = False,
) -> Any:
    """Replaces ``CompressorDecodePlan.generate``: a ``CompressorDecodePlan`` of uint8 [batch, 16].

    req_pool_indices, seq_lens: [batch] integers. Per request, as four int32: seq_len, the
    ring row of its last token, and the state pages (groups of ``compress_ratio`` ring rows)
    of the group before and of this one. The other arguments address paged state, which is
    refused, and are not read.
    """
    from sglang.kernels.ops.attention.dsv4.compress import CompressorDecodePlan

    _check_request_ring(compress_ratio, use_req_ring)
    last = seq_lens.long() - 1
    write = _ring_row(req_pool_indices, last, ring_size)
    before = _ring_row(req_pool_indices, (last - compress_ratio).clamp_min(0), ring_size)
    plan = _as_bytes([seq_lens, write, before // compress_ratio, write // compress_ratio])
    return CompressorDecodePlan(compress_ratio, plan)


def plan_prefill(
    compress_ratio: int,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    swa_page_size: int,
    ring_size: int,
    num_q_tokens: int,
    use_cuda_graph: bool = False,
    use_req_ring: bool = False,
) -> Any:
    """Replaces ``CompressorPrefillPlan.generate``: uint8 plans [compressions, 16] and [writes, 8].

    req_pool_indices, seq_lens, extend_lens: [batch] integers. The first plan holds seq_len,
    row | buffer_len << 16 and two state pages per compressing token, the second (row, ring
    row) per token to keep. The arguments of paged state and of graphs are not read.

    A token compresses if its position ends a group of ``compress_ratio``; the first
    ``buffer_len`` rows of its window lie in the state ring, the rest in this chunk.
    A token's row enters the ring if a later forward can still need it.

    Example, ratio 4, prefix 6, extend 7 (positions 6..12), ring 8: positions 7 and 11
    compress, with buffer_len 8 - 2 = 6 and 8 - 6 = 2; last_group = 12, so positions
    8..12 are written.
    """
    from sglang.kernels.ops.attention.dsv4.compress import CompressorPrefillPlan

    _check_request_ring(compress_ratio, use_req_ring)
    if num_q_tokens > 1 << 16:
        raise ValueError(
            f"{num_q_tokens} tokens in one prefill; a plan row holds 16 bits: lower --chunked-prefill-size"
        )
    overlap = compress_ratio == 4
    window = compress_ratio * (2 if overlap else 1)
    pad = ring_size - window + 2 if ring_size > window else 0

    seq, extend = seq_lens.long(), extend_lens.long()
    request = torch.repeat_interleave(torch.arange(seq.shape[0]), extend)
    row = torch.arange(request.shape[0])
    in_chunk = row - (extend.cumsum(0) - extend)[request]
    position = (seq - extend)[request] + in_chunk
    slot = req_pool_indices.long()[request]

    last_group = seq // compress_ratio * compress_ratio
    first_write = torch.minimum(last_group - (compress_ratio if overlap else 0), seq - pad)
    written = position >= first_write[request]
    write = _as_bytes([row[written], _ring_row(slot, position, ring_size)[written]])

    ends = (position + 1) % compress_ratio == 0
    position, slot, row, in_chunk = position[ends], slot[ends], row[ends], in_chunk[ends]
    buffer_len = window - (in_chunk + 1).clamp_max(window)
    buffered = buffer_len > 0
    before = _ring_row(slot, (position - compress_ratio).clamp_min(0), ring_size)
    page_0 = torch.where(buffered, before // compress_ratio, -1)
    page_1 = torch.where(buffered, _ring_row(slot, position, ring_size) // compress_ratio, request[ends])
    # ragged_id and buffer_len are uint16 each: one little-endian 32-bit column.
    plan = _as_bytes([position + 1, row | buffer_len << 16, page_0, page_1])
    return CompressorPrefillPlan(compress_ratio, plan, write, None)


def compress_forward(
    kv_score_buffer: torch.Tensor,
    kv_score_input: torch.Tensor,
    ape: torch.Tensor,
    plan: Any,
    *,
    head_dim: int,
    compress_ratio: int,
    out: torch.Tensor | None = None,
    is_online: bool = False,
) -> torch.Tensor:
    """Replaces ``compress_forward``: softmax-pooled rows, and the ring's new rows.

    kv_score_buffer: [pages, ratio, width] state ring. kv_score_input: [T, width] fp32,
    this forward's rows: kv then score, each preceded by its overlap half for ratio 4.
    ape: [window, head_dim]. Returns [plan rows, head_dim]; rows of a decode plan that
    end no group are zero. Side effect: writes ``kv_score_buffer``.

    Prefill reads the ring before it writes; decode writes its row first.
    """
    if is_online:
        raise NotImplementedError("the CPU reference has no online c128 compressor")
    columns = plan[1].view(torch.int32).long()
    ring = kv_score_buffer.view(-1, kv_score_buffer.shape[-1])
    if out is None:
        out = torch.zeros((columns.shape[0], head_dim), dtype=kv_score_input.dtype)
    if plan.is_decode:
        ring[columns[:, 1]] = kv_score_input.to(ring.dtype)
        chosen = (columns[:, 0] % compress_ratio == 0).nonzero().squeeze(1)
        source_row = chosen
        buffer_len = torch.full_like(chosen, ape.shape[0])
    else:
        chosen = torch.arange(columns.shape[0])
        source_row = columns[:, 1] & 0xFFFF
        buffer_len = columns[:, 1] >> 16
    for start in range(0, chosen.shape[0], _POOL_BLOCK[compress_ratio]):
        part = slice(start, start + _POOL_BLOCK[compress_ratio])
        rows = chosen[part]
        out[rows] = _pool(
            ring, kv_score_input, ape, columns[rows], source_row[part], buffer_len[part], head_dim, compress_ratio
        ).to(out.dtype)
    if not plan.is_decode:
        write = plan[2].view(torch.int32).long()
        ring[write[:, 1]] = kv_score_input[write[:, 0]].to(ring.dtype)
    return out


def _pool(
    ring: torch.Tensor,
    flat: torch.Tensor,
    ape: torch.Tensor,
    columns: torch.Tensor,
    source_row: torch.Tensor,
    buffer_len: torch.Tensor,
    head_dim: int,
    ratio: int,
) -> torch.Tensor:
    """Weighted mean of each window's rows -> fp32 [N, head_dim]."""
    window = ape.shape[0]
    step = torch.arange(window)
    overlap = window > ratio
    # Page 0 holds the overlap rows (the group before), page 1 the group itself.
    page = torch.where(step < window - ratio, columns[:, 2:3], columns[:, 3:4])
    buffered = step < buffer_len[:, None]
    ring_row = (page * ratio + step % ratio).clamp_min(0)
    flat_row = (source_row[:, None] - (window - 1) + step).clamp_min(0)
    rows = torch.where(buffered.unsqueeze(-1), ring[ring_row].to(flat.dtype), flat[flat_row]).float()
    if overlap:
        # Row layout: [kv overlap, kv, score overlap, score].
        early, late = rows[:, : window - ratio], rows[:, window - ratio :]
        kv = torch.cat((early[..., :head_dim], late[..., head_dim : 2 * head_dim]), dim=1)
        score = torch.cat((early[..., 2 * head_dim : 3 * head_dim], late[..., 3 * head_dim :]), dim=1)
        # The first group of a sequence has no group before it.
        first = (columns[:, 0] <= ratio)[:, None, None] & (step < window - ratio)[None, :, None]
        kv, score = kv.masked_fill(first, 0.0), score.masked_fill(first, _FLOAT_MIN)
    else:
        kv, score = rows[..., :head_dim], rows[..., head_dim:]
    return row_sum(kv * softmax(score + ape.float(), dim=1), dim=1)


def compress_norm_rope_store(
    kv: torch.Tensor,
    plan: Any,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float,
    freq_cis: torch.Tensor,
    out_loc: torch.Tensor,
    kvcache: torch.Tensor,
    page_size: int,
    use_fp4: bool = False,
    bf16_store: bool = False,
    kvcache_scale: torch.Tensor | None = None,
    rope_cache: tuple[torch.Tensor, torch.Tensor] | None = None,
    fp4_k_write_metadata: Any = None,
    layout: Any = "v4",
    fp8_2buff: bool = False,
    kvcache_rope: torch.Tensor | None = None,
) -> None:
    """Replaces ``compress_norm_rope_store`` for the bf16 rows and the fp8 index keys.

    kv: [plan rows, 512 or 128]. out_loc: [T] target slot per token. kvcache: uint8 view
    of the cache, [rows, 1024] bf16 rows (``bf16_store``) or [pages, page_size * 132]
    index pages (128 e4m3 bytes per key, then one fp32 scale per key). Writes ``kvcache``;
    the arguments behind ``bf16_store`` belong to layouts that are refused.
    """
    other = (kvcache_scale, rope_cache, fp4_k_write_metadata, kvcache_rope)
    is_v4 = str(getattr(layout, "value", layout)) == "v4"
    if use_fp4 or fp8_2buff or not is_v4 or any(argument is not None for argument in other):
        raise NotImplementedError("the CPU reference stores bf16 latents and fp8 index keys only")
    columns = plan[1].view(torch.int32).long()
    if plan.is_decode:
        rows = (columns[:, 0] % plan.compress_ratio == 0).nonzero().squeeze(1)
        token = rows
    else:
        rows = torch.arange(columns.shape[0])
        token = columns[:, 1] & 0xFFFF
    if rows.numel() == 0:
        return
    position = columns[rows, 0] - plan.compress_ratio
    value = rotate_tail(rms_norm(kv[rows], norm_weight, norm_eps), freq_cis, position)
    target = out_loc[token].long()
    if bf16_store:
        kvcache.view(torch.bfloat16).view(-1, value.shape[-1])[target] = value.to(torch.bfloat16)
        return
    codes, scale = fp8_rows(hadamard(value))
    page, offset = target // page_size, (target % page_size)[:, None]
    width = value.shape[-1]
    kvcache[page[:, None], offset * width + torch.arange(width)] = codes.view(torch.uint8)
    scale_at = page_size * width + offset * 4 + torch.arange(4)
    kvcache[page[:, None], scale_at] = scale.contiguous().view(torch.uint8)
