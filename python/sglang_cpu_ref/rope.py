"""Norm and rotary position embedding of queries, keys and attention outputs.

Prefill and decode must rotate with the same table: upstream's HIP decode kernel
reads a bfloat16 copy of it, its prefill kernel the float32 one, and the two differ.
Here both read float32 (``hooks.py`` registers the decode tables from it).
"""

from __future__ import annotations

import torch

from sglang_cpu_ref.elementwise import hadamard, rms_norm
from sglang_cpu_ref.quantize import fp8_rows


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate interleaved pairs of the last dimension; cos, sin: [..., dim / 2], fp32."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rotate_tail(
    x: torch.Tensor, freqs_cis: torch.Tensor, positions: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """``x`` [T, ..., D] with its last ``2 * freqs_cis.shape[-1]`` dims rotated; fp32.

    freqs_cis: [max position, rope_dim / 2] complex64. positions: [T].
    """
    table = torch.view_as_real(freqs_cis)[positions.long()]
    return _rotate_tail(x, table[..., 0], -table[..., 1] if inverse else table[..., 1])


def _rotate_tail(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = x.float()
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
    rope_dim = 2 * cos.shape[-1]
    tail = _rotate(x[..., -rope_dim:], cos.view(shape), sin.view(shape))
    return torch.cat((x[..., :-rope_dim], tail), dim=-1)


def fused_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor | None,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
    inverse: bool = False,
) -> None:
    """Replaces ``norm_rope.fused_rope_inplace``: rotates q [T, H, rope] and k in place."""
    for x in (q, k):
        if x is not None:
            x.copy_(rotate_tail(x, freqs_cis, positions, inverse))


def fused_norm_rope_inplace(
    kv: torch.Tensor, weight: torch.Tensor, eps: float, freq_cis: torch.Tensor, positions: torch.Tensor
) -> None:
    """Replaces ``norm_rope.fused_norm_rope_inplace``: kv [T, 512] normed and rotated in place."""
    kv.copy_(rotate_tail(rms_norm(kv, weight, eps), freq_cis, positions[: kv.shape[0]]))


def fused_q_norm_rope(
    q_input: torch.Tensor,
    q_output: torch.Tensor,
    eps: float | None,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Replaces ``norm_rope.fused_q_norm_rope``: q [T, H, 512]; ``eps`` None skips the norm."""
    q = q_input.float() if eps is None else rms_norm(q_input, None, eps)
    q_output.copy_(rotate_tail(q, freqs_cis, positions))


def fused_qk_norm_rope_swa_store(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    kv_norm_weight: torch.Tensor,
    q_rms_eps: float,
    kv_rms_eps: float,
    rope_head_dim: int,
    cos_cache: torch.Tensor,
    sin_cache: torch.Tensor,
    positions: torch.Tensor,
    swa_cache: torch.Tensor | None = None,
    swa_loc: torch.Tensor | None = None,
    swa_page_size: int = 1,
    q_out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    bf16_store: bool = False,
    fp8_2buff: bool = False,
    swa_rope_cache: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_rope_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Replaces the fused decode kernel: norms and rotates q and kv, stores kv in the ring.

    q: [T, H * 512]; kv: [T, 512], also normed and rotated in place; swa_cache [rows, 512]
    at rows ``swa_loc`` [T] (None: no store, as for target-verify). Returns q [T, H, 512],
    which is ``q_out`` if that is given. The other buffers belong to the fp8 layout.
    """
    packed = (swa_rope_cache, k_nope_out, k_rope_out, q_rope_out)
    if fp8_2buff or not bf16_store or any(buffer is not None for buffer in packed):
        raise NotImplementedError("the CPU reference keeps bf16 ring rows: unset SGLANG_DSV4_UNIFIED_KV_FP8")
    tokens, dim = kv.shape
    at = positions[:tokens].long()
    cos = cos_cache.view(cos_cache.shape[0], -1)[at].float()
    sin = sin_cache.view(sin_cache.shape[0], -1)[at].float()
    key = _rotate_tail(rms_norm(kv, kv_norm_weight, kv_rms_eps), cos, sin)
    query = _rotate_tail(rms_norm(q.view(tokens, -1, dim), q_norm_weight, q_rms_eps), cos, sin)
    kv.copy_(key)
    if swa_cache is not None and swa_loc is not None:
        swa_cache.view(-1, dim)[swa_loc[:tokens].long()] = kv
    if q_out is None:
        return query.to(dtype)
    q_out.copy_(query.view(q_out.shape))
    return q_out


def fused_q_indexer_rope_hadamard_quant(
    q_input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: float,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces the index-query kernel: rope, Hadamard transform, fp8 quantisation.

    q_input: [T, H, 128]; weight: [T, H]. Returns (e4m3 [T, H, 128], fp32 [T, H, 1]): the
    weight carries the query's scale.
    """
    codes, scale = fp8_rows(hadamard(rotate_tail(q_input, freqs_cis, positions)))
    return codes, weight.float().unsqueeze(-1) * weight_scale * scale
