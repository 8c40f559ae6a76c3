"""Sparse attention over the unified KV pool, and the index streams it reads.

The sums over keys are exact (see ``exact.py``), so neither the order of a token's
keys nor which of them come from the ring, the compressed rows or this chunk
changes its output: prefill equals decode, and any chunk split equals any other.
Tokens are taken in blocks that share one gathered set of rows; a row that a token
does not list has weight zero for it, which adds exactly nothing.
"""

from __future__ import annotations

import torch

from sglang_cpu_ref.elementwise import exp
from sglang_cpu_ref.exact import grid_product, pow2, row_exponent, to_grid

# Bits of the three operands. Scores sum over the head dimension, 512 = 2**9:
# 22 + 20 + 9 <= 53. Outputs sum over a token's keys, at most 2**12: 21 + 20 + 12 = 53.
_QUERY_BITS, _KEY_BITS, _WEIGHT_BITS = 22, 20, 21
MAX_KEYS_PER_TOKEN = 1 << 12
# Neighbouring prefill tokens share most of their window: one gather serves a block.
_PREFILL_BLOCK = 64


def check_context(context_len: int, window: int, index_topk: int) -> None:
    """Refuse a model whose tokens could attend to more rows than can be summed exactly.

    A token lists its window, and ``index_topk`` c4 rows or all c128 rows of its context.

    Example: window=128, index_topk=512, context_len=16_384 -> 128 + max(512, 128) = 640.

    Raises:
        ValueError: more than ``MAX_KEYS_PER_TOKEN``.
    """
    rows = window + max(index_topk, context_len // 128)
    if rows > MAX_KEYS_PER_TOKEN:
        raise ValueError(
            f"a token of {context_len} tokens of context attends to {rows} rows; the CPU platform sums "
            f"{MAX_KEYS_PER_TOKEN} exactly. Start with --context-length {(MAX_KEYS_PER_TOKEN - window) * 128}."
        )


def prefill(
    *,
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indices_prefix: torch.Tensor,
    kv_indptr_prefix: torch.Tensor,
    kv_extend: torch.Tensor,
    kv_indices_extend: torch.Tensor,
    kv_indptr_extend: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """Replaces ``unified_kv_kernels.runtime.prefill``.

    q: [T, H, 512] bf16. unified_kv: [rows, 512] bf16. kv_extend: [N, 512] bf16, this
    chunk's rows. ``kv_indices_*`` are flat per-token row lists (-1: no row) cut by
    ``kv_indptr_*`` [T + 1]. attn_sink: [H]. Returns [T, H, 512] bf16.
    """
    out = torch.empty_like(q)
    for start in range(0, q.shape[0], _PREFILL_BLOCK):
        tokens = slice(start, min(start + _PREFILL_BLOCK, q.shape[0]))
        prefix, in_prefix = _gather(unified_kv, kv_indices_prefix, kv_indptr_prefix, tokens)
        extend, in_extend = _gather(kv_extend, kv_indices_extend, kv_indptr_extend, tokens)
        out[tokens] = attend(
            q[tokens],
            torch.cat((prefix, extend)),
            torch.cat((in_prefix, in_extend), dim=1),
            attn_sink,
            softmax_scale,
        )
    return out


def decode(
    *,
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    kv_splits: int | None = None,
) -> torch.Tensor:
    """Replaces ``unified_kv_kernels.runtime.decode``: one list of pool rows per token.

    q: [T, H, 512] bf16. unified_kv: [rows, 512] bf16. kv_indices: flat row lists (-1: no
    row), cut by kv_indptr [T + 1]. attn_sink: [H]. Returns [T, H, 512] bf16. ``kv_splits``
    chooses a parallelisation on a GPU and has no effect on a value here.
    """
    out = torch.empty_like(q)
    # One token at a time: tokens of different requests share no rows.
    for t in range(q.shape[0]):
        tokens = slice(t, t + 1)
        rows, member = _gather(unified_kv, kv_indices, kv_indptr, tokens)
        out[tokens] = attend(q[tokens], rows, member, attn_sink, softmax_scale)
    return out


def _gather(
    source: torch.Tensor, indices: torch.Tensor, indptr: torch.Tensor, tokens: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ``source`` that any token of the block lists, and who lists them.

    Returns ([U, D], bool [tokens, U]). A token lists a row at most once.
    """
    bounds = indptr[tokens.start : tokens.stop + 1].long()
    listed = indices[int(bounds[0]) : int(bounds[-1])].long()
    token = torch.repeat_interleave(torch.arange(bounds.shape[0] - 1), bounds.diff())
    if bool((listed < 0).any()):
        token, listed = token[listed >= 0], listed[listed >= 0]
    wanted = torch.zeros(source.shape[0], dtype=torch.bool)
    wanted[listed] = True
    rows = wanted.nonzero().squeeze(1)
    column = torch.empty(source.shape[0], dtype=torch.int64)
    column[rows] = torch.arange(rows.shape[0])
    member = torch.zeros((bounds.shape[0] - 1, rows.shape[0]), dtype=torch.bool)
    member[token, column[listed]] = True
    return source[rows], member


def attend(
    q: torch.Tensor,
    rows: torch.Tensor,
    member: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """softmax(q k^T * scale, with a sink in the denominator) k, keys limited by ``member``.

    q: [T, H, D]; rows: [U, D], key and value at once (MLA); member: bool [T, U];
    attn_sink: [H]. Returns [T, H, D] in the dtype of q. A token with no key gets 0.

    A token that lists a non-finite row becomes NaN, and no other token does. The backend
    refuses contexts whose tokens could list more than ``MAX_KEYS_PER_TOKEN`` rows.
    """
    tokens, heads, dim = q.shape
    if rows.shape[0] == 0:
        return torch.zeros_like(q)
    longest = int(member.sum(dim=1).max())
    assert longest <= MAX_KEYS_PER_TOKEN, longest
    finite = rows.isfinite().all(dim=1)
    poisoned = None
    if not bool(finite.all()):
        poisoned = (member & ~finite).any(dim=1)
        rows = rows.masked_fill(~finite.unsqueeze(1), 0.0)

    key_exponent = row_exponent(rows).view(1, -1)
    keys = to_grid(rows, _KEY_BITS)
    queries = to_grid(q.reshape(tokens * heads, dim), _QUERY_BITS)
    scores = grid_product(queries, keys.t()).mul_(softmax_scale).float()

    absent = ~member.repeat_interleave(heads, dim=0)
    scores.masked_fill_(absent, float("-inf"))
    sink = attn_sink[:heads].float().repeat(tokens).unsqueeze(1)
    # A finite floor: a token without keys and a sink of -inf must not give inf - inf.
    peak = torch.maximum(scores.amax(dim=1, keepdim=True), sink).clamp_min(-1e30)
    weights = exp(scores.sub_(peak)).masked_fill_(absent, 0.0)

    total = (weights.double() * 2.0**_WEIGHT_BITS).round_().sum(dim=1, keepdim=True)
    total = total * 2.0**-_WEIGHT_BITS + exp(sink - peak).double()
    # A value row lies on its own grid; weights times the row's scale share one grid
    # per query, so that all products of a sum do.
    shared = to_grid(weights.double() * pow2(key_exponent), _WEIGHT_BITS).mul_(pow2(-key_exponent))
    out = (grid_product(shared, keys) / total.clamp_min(1e-30)).view(tokens, heads, dim)
    if poisoned is not None:
        out[poisoned] = float("nan")
    return out.to(q.dtype)


def store_swa_into_unified(
    *,
    kv: torch.Tensor,
    state_slot: torch.Tensor,
    positions: torch.Tensor,
    unified_kv: torch.Tensor,
    win: int,
    ring_stride: int,
    final_pos: torch.Tensor | None = None,
    kv_rope: torch.Tensor | None = None,
    unified_kv_rope: torch.Tensor | None = None,
) -> None:
    """Replaces ``dsv4_unified_kv_store.store_swa_into_unified``: a byte move.

    Writes row ``slot * ring_stride + position % ring_stride`` of ``unified_kv`` for
    each row of ``kv`` [N, D] whose position is within ``win`` of ``final_pos`` [N]
    (all rows if it is None), and the rope half likewise under fp8.
    """
    count = kv.shape[0]
    position = positions[:count].long()
    target = state_slot[:count].long() * ring_stride + position % ring_stride
    if final_pos is not None:
        kept = position > final_pos[:count].long() - win
        target, kv = target[kept], kv[kept]
        kv_rope = None if kv_rope is None else kv_rope[kept]
    unified_kv[target] = kv
    if kv_rope is not None and unified_kv_rope is not None:
        unified_kv_rope[target] = kv_rope
