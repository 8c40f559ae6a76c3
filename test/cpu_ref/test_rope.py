"""Norm and rotary kernels, against upstream's Triton kernels and a float64 formula."""

from __future__ import annotations

import torch

from kit.numbers import assert_bf16_close, randn, rope_table
from kit.pristine import pristine
from sglang_cpu_ref import rope

_EPS = 1e-6
# Triton's interpreter truncates where it stores bfloat16; the kernels take float32 as well.
_ORACLE_DTYPE = torch.float32
_TABLE = rope_table(3000)
_POSITIONS = torch.tensor([0, 1, 777, 2048, 2999])


def _formula(x: torch.Tensor, weight: torch.Tensor | None, norm: bool, inverse: bool = False) -> torch.Tensor:
    """float64: RMS norm, then rotation of the last 64 dims as complex pairs. x: [T, ..., D]."""
    x = x.double()
    if norm:
        x = x / (x.square().mean(-1, keepdim=True) + _EPS).sqrt()
    if weight is not None:
        x = x * weight.double()
    head, tail = x[..., :-64], torch.view_as_complex(x[..., -64:].reshape(*x.shape[:-1], 32, 2))
    turn = _TABLE[_POSITIONS].to(torch.complex128)
    turn = turn.conj() if inverse else turn
    tail = tail * turn.view(turn.shape[0], *[1] * (x.dim() - 2), 32)
    return torch.cat((head, torch.view_as_real(tail).flatten(-2)), dim=-1)


def test_key_norm_and_rope():
    kv, weight = randn(1, 5, 512), randn(2, 512)
    expected = _formula(kv, weight, norm=True)
    rope.fused_norm_rope_inplace(kv, weight, _EPS, _TABLE, _POSITIONS)
    assert_bf16_close(kv, expected)


def test_query_norm_and_rope():
    q = randn(3, 5, 4, 512)
    for eps, norm in ((_EPS, True), (None, False)):
        out = torch.empty_like(q)
        rope.fused_q_norm_rope(q, out, eps, _TABLE, _POSITIONS)
        assert_bf16_close(out, _formula(q, None, norm))


def test_inverse_rope_against_formula():
    x = randn(4, 5, 4, 64)
    expected = _formula(x, None, norm=False, inverse=True)
    rope.fused_rope_inplace(x, None, _TABLE, _POSITIONS, inverse=True)
    assert_bf16_close(x, expected)


def test_rope_against_upstream_kernel():
    theirs, ours = randn(4, 5, 4, 64, dtype=_ORACLE_DTYPE), randn(4, 5, 4, 64, dtype=_ORACLE_DTYPE)
    pristine("sglang.kernels.ops.attention.dsv4.rope").apply_rotary_emb_triton(
        theirs, _TABLE, positions=_POSITIONS, inverse=True
    )
    rope.fused_rope_inplace(ours, None, _TABLE, _POSITIONS, inverse=True)
    assert torch.allclose(ours, theirs, rtol=2.0**-20, atol=1e-6)


def test_fused_decode_kernel_against_upstream_kernel():
    cos = torch.view_as_real(_TABLE)[..., 0].contiguous()[:, None, None]
    sin = torch.view_as_real(_TABLE)[..., 1].contiguous()[:, None, None]
    where = torch.tensor([3, 1, 7, 0, 9], dtype=torch.int32)

    def call(function):
        q, kv = randn(5, 5, 4 * 512, dtype=_ORACLE_DTYPE), randn(6, 5, 512, dtype=_ORACLE_DTYPE)
        cache = torch.zeros(10, 512, dtype=_ORACLE_DTYPE)
        out = function(
            q=q,
            kv=kv,
            q_norm_weight=None,
            kv_norm_weight=randn(7, 512),
            q_rms_eps=_EPS,
            kv_rms_eps=_EPS,
            rope_head_dim=64,
            cos_cache=cos,
            sin_cache=sin,
            positions=_POSITIONS,
            swa_cache=cache,
            swa_loc=where,
            swa_page_size=1,
            dtype=_ORACLE_DTYPE,
            bf16_store=True,
        )
        return out, kv, cache

    theirs = call(pristine("sglang.kernels.ops.attention.fused_qk_norm_rope_store").fused_qk_norm_rope_swa_store)
    ours = call(rope.fused_qk_norm_rope_swa_store)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=2.0**-20, atol=1e-6)
    assert torch.equal(ours[2][where.long()], ours[1])


def test_decode_kernel_equals_prefill_kernels_bit_for_bit():
    """A key or query has the same bits whether prefill or decode computed it."""
    q, kv, weight = randn(8, 5, 4 * 512), randn(9, 5, 512), randn(10, 512)
    prefill_kv, prefill_q = kv.clone(), torch.empty(5, 4, 512, dtype=torch.bfloat16)
    rope.fused_norm_rope_inplace(prefill_kv, weight, _EPS, _TABLE, _POSITIONS)
    rope.fused_q_norm_rope(q.view(5, 4, 512), prefill_q, _EPS, _TABLE, _POSITIONS)
    table = torch.view_as_real(_TABLE)
    cos, sin = (table[..., k].contiguous()[:, None, None] for k in (0, 1))
    decode_q = rope.fused_qk_norm_rope_swa_store(
        q, kv, None, weight, _EPS, _EPS, 64, cos, sin, _POSITIONS, bf16_store=True
    )
    assert torch.equal(kv, prefill_kv)
    assert torch.equal(decode_q, prefill_q)


def test_index_query_quantisation():
    """The codes times their scale give the rotated, transformed query back, within e4m3's step."""
    q, weight = randn(11, 5, 4, 128), randn(12, 5, 4)
    codes, weights = rope.fused_q_indexer_rope_hadamard_quant(q, weight, 0.5, _TABLE, _POSITIONS)
    parity = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)]).double()
    expected = _formula(q, None, norm=False) @ parity * 128**-0.5
    scale = expected.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    assert ((codes.double() * scale - expected).abs() <= 2.0**-4 * expected.abs() + scale * 2.0**-9).all()
    assert torch.allclose(weights.double(), weight.double().unsqueeze(-1) * 0.5 * scale, rtol=1e-5)
