"""Hyper-connections, against upstream's Triton ports and a float64 formula."""

from __future__ import annotations

import torch

from kit.numbers import assert_bf16_close, randn
from kit.pristine import pristine
from sglang_cpu_ref import hyper

_STREAMS, _HIDDEN, _EPS = 4, 256, 1e-6
_MIXES = (2 + _STREAMS) * _STREAMS


def _weights(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fn = randn(1, rows, _STREAMS * _HIDDEN, dtype=torch.float32) / 32
    return fn, torch.tensor([0.7, 0.5, 0.9]), randn(2, rows, dtype=torch.float32)


def test_sinkhorn_against_upstream_kernel():
    mixes, (_, scale, base) = randn(3, 7, _MIXES, dtype=torch.float32), _weights(_MIXES)
    theirs = pristine("sglang.kernels.ops.layernorm.mhc")._hc_split_sinkhorn_triton(
        mixes.unsqueeze(1), scale, base, _STREAMS, 20, _EPS
    )
    ours = hyper.split_sinkhorn(mixes, scale, base, _STREAMS, 20, _EPS, post_mult=2.0)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other.squeeze(1), rtol=1e-5, atol=1e-6)


def test_sinkhorn_is_doubly_stochastic():
    mixes, (_, scale, base) = randn(4, 5, _MIXES, dtype=torch.float32), _weights(_MIXES)
    _, _, comb = hyper.split_sinkhorn(mixes, scale, base, _STREAMS, 20, _EPS, post_mult=2.0)
    ones = torch.ones(5, _STREAMS)
    assert torch.allclose(comb.sum(1), ones, atol=1e-4) and torch.allclose(comb.sum(2), ones, atol=1e-3)


def _formula_pre(x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor):
    """float64 hyper-connection read: (post, comb, input); x [T, streams, hidden]."""
    flat = x.double().flatten(1)
    mixes = flat @ fn.double().t() / (flat.square().mean(1, keepdim=True) + _EPS).sqrt()
    pre, post, comb = mixes.split([_STREAMS, _STREAMS, _STREAMS**2], dim=1)
    bases = base.double().split([_STREAMS, _STREAMS, _STREAMS**2])
    pre = torch.sigmoid(pre * scale[0].double() + bases[0]) + _EPS
    post = 2 * torch.sigmoid(post * scale[1].double() + bases[1])
    comb = (comb * scale[2].double() + bases[2]).view(-1, _STREAMS, _STREAMS).softmax(2) + _EPS
    comb = comb / (comb.sum(1, keepdim=True) + _EPS)
    for _ in range(19):
        comb = comb / (comb.sum(2, keepdim=True) + _EPS)
        comb = comb / (comb.sum(1, keepdim=True) + _EPS)
    return post, comb, torch.einsum("ts,tsh->th", pre, x.double())


def test_pre_and_post_against_formula():
    x, (fn, scale, base) = randn(5, 6, _STREAMS, _HIDDEN), _weights(_MIXES)
    arguments = (x, fn, scale, base, _EPS, _EPS, _EPS, 2.0, 20)
    post, comb, read = hyper.mhc_pre(*arguments)
    expected_post, expected_comb, expected_read = _formula_pre(x, fn, scale, base)
    assert torch.allclose(post.squeeze(-1).double(), expected_post, rtol=1e-5)
    assert torch.allclose(comb.double(), expected_comb, rtol=1e-4, atol=1e-6)
    assert_bf16_close(read, expected_read)

    weight = randn(6, _HIDDEN)
    normed = hyper.mhc_pre(*arguments, norm_weight=weight, norm_eps=_EPS)[2]
    d = read.double()
    assert_bf16_close(normed, d / (d.square().mean(-1, keepdim=True) + _EPS).sqrt() * weight.double())

    out = randn(7, 6, _HIDDEN)
    expected = expected_post.unsqueeze(-1) * out.double().unsqueeze(1)
    expected = expected + torch.einsum("tji,tjh->tih", expected_comb, x.double())
    assert_bf16_close(hyper.mhc_post(out, x, post, comb), expected)


def test_head_against_upstream_kernel_and_formula():
    x, (fn, _, base) = randn(8, 5, _STREAMS, _HIDDEN), _weights(_STREAMS)
    scale = torch.tensor([0.7])
    flat = x.double().flatten(1)
    mixes = flat @ fn.double().t() / (flat.square().mean(1, keepdim=True) + _EPS).sqrt()
    pre = torch.sigmoid(mixes * scale.double() + base.double()) + _EPS
    arguments = {"hc_fn": fn, "hc_scale": scale, "hc_base": base, "norm_eps": _EPS, "hc_eps": _EPS}
    assert_bf16_close(hyper.fused_hc_head(x, **arguments), torch.einsum("ts,tsh->th", pre, x.double()))
    head = pristine("sglang.kernels.ops.layernorm.mhc_head").fused_hc_head
    wide = x.float()
    assert torch.allclose(hyper.fused_hc_head(wide, **arguments), head(wide, **arguments), rtol=1e-4, atol=1e-5)
