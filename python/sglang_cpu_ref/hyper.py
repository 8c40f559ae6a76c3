"""Manifold-constrained hyper-connections (mHC): the four residual streams of a layer.

Replacements of the tilelang kernels of ``kernels.ops.layernorm.mhc``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_cpu_ref.elementwise import exp, rms_norm, row_sum, sigmoid


def split_sinkhorn(
    mixes: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    streams: int,
    iterations: int,
    eps: float,
    post_mult: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read, write and mixing weights of each token.

    mixes: fp32 [T, (2 + streams) * streams]; scale: [3]; base: [(2 + streams) * streams].
    Returns pre [T, streams], post [T, streams] and comb [T, streams, streams], where
    ``comb`` is made doubly stochastic by ``iterations`` of Sinkhorn's row and column
    normalisation.
    """
    n = streams
    gates = mixes[:, : 2 * n] * scale[:2].repeat_interleave(n) + base[: 2 * n]
    comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
    comb = comb - comb.amax(dim=2, keepdim=True)
    # One call for both: e**-x for the two sigmoids, e**x for the softmax.
    powers = exp(torch.cat((-gates, comb.flatten(1)), dim=1))
    gates = (powers[:, : 2 * n] + 1.0).reciprocal_()
    pre, post = gates[:, :n] + eps, gates[:, n:] * post_mult
    comb = powers[:, 2 * n :].reshape(-1, n, n)
    comb = (comb / row_sum(comb, 2, keepdim=True)).add_(eps)
    comb.div_(row_sum(comb, 1, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        comb.div_(row_sum(comb, 2, keepdim=True).add_(eps))
        comb.div_(row_sum(comb, 1, keepdim=True).add_(eps))
    return pre, post, comb


def _normed_mixes(x: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """(x fn^T) / rms(x), fp32 [T, rows of fn]; x: [T, streams * hidden] fp32."""
    mean = row_sum(x * x) / x.shape[-1]
    return F.linear(x, fn) / (mean + eps).sqrt().unsqueeze(-1)


def _read_streams(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_k weights[t, k] * streams[t, k], fp32 [T, hidden]."""
    return row_sum(streams.float() * weights.unsqueeze(-1), dim=1)


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    n_splits_pre: int = 32,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replaces ``mhc_pre``: the sub-layer's input and the weights of its write-back.

    residual: [T, streams, hidden] bf16; fn: [(2 + streams) * streams, streams * hidden].
    Returns post [T, streams, 1], comb [T, streams, streams] (fp32) and the input
    [T, hidden] bf16, RMS-normed if ``norm_weight`` is given. ``n_splits*`` only tune a GPU.
    """
    streams = residual.shape[1]
    mixes = _normed_mixes(residual.flatten(1).float(), fn, rms_eps)
    pre, post, comb = split_sinkhorn(
        mixes, hc_scale, hc_base, streams, sinkhorn_repeat, hc_sinkhorn_eps, hc_post_mult_value
    )
    layer_input = _read_streams(residual, pre)
    if norm_weight is not None:
        assert norm_eps is not None
        layer_input = rms_norm(layer_input.to(residual.dtype), norm_weight, norm_eps)
    return post.unsqueeze(-1), comb, layer_input.to(residual.dtype)


def mhc_post(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """Replaces ``mhc_post``: out[i] = post[i] * x + sum_j comb[j, i] * residual[j].

    x: [T, hidden]; residual: [T, streams, hidden] bf16; post: [T, streams(, 1)];
    comb: [T, streams, streams]. Returns [T, streams, hidden] bf16.
    """
    tokens, streams, _ = residual.shape
    post = post_layer_mix.reshape(tokens, streams, 1).float()
    comb = comb_res_mix.reshape(tokens, streams, streams).float()
    source = residual.float()
    out = x.float().unsqueeze(1) * post
    for j in range(streams):
        out = out + comb[:, j].unsqueeze(-1) * source[:, j : j + 1]
    return out.to(residual.dtype)


def fused_hc_head(
    x: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """Replaces ``mhc_head.fused_hc_head``: the streams read once more, before the last norm.

    x: [T, streams, hidden] bf16; hc_fn: [streams, streams * hidden]. Returns [T, hidden].
    """
    mixes = _normed_mixes(x.flatten(1).float(), hc_fn, norm_eps)
    pre = sigmoid(mixes * hc_scale + hc_base) + hc_eps
    return _read_streams(x, pre).to(x.dtype)
