"""Elementwise functions and row sums that give a value the same bits anywhere.

torch's CPU kernels handle a tensor in vectors and its tail one by one, and for
``exp``, ``sigmoid`` or ``softplus`` the two differ in the last bit: a value would
depend on its place. IEEE 754 rounds ``+ - * /`` and ``sqrt`` correctly in every
lane, so these functions are made of nothing else.
"""

from __future__ import annotations

import math

import torch

_LOG2_E = math.log2(math.e)
# ln 2 in two parts: the first is 22713 / 2**15, so n * _LN2_HIGH is exact in float32 for
# |n| < 2**9, and n stays below 2**7 (Cody and Waite).
_LN2_HIGH = 0.693145751953125
_LN2_LOW = 1.428606765330187e-06
# exp(r) on |r| <= ln(2) / 2, Taylor coefficients 1/k!; the error of the cut, 7e-9
# relative, is under a tenth of a float32 step.
_EXP_COEFFICIENTS = tuple(1.0 / math.factorial(k) for k in range(7, -1, -1))
_EXP_MIN, _EXP_MAX = -87.0, 88.0


def exp(x: torch.Tensor) -> torch.Tensor:
    """e**x in float32, within two units in the last place.

    Below -87 the result is 0 (float32 would be subnormal from -87.3 on), above 88
    it is infinity; NaN stays NaN.
    """
    x = x.float()
    y = x.clamp(_EXP_MIN, _EXP_MAX)
    n = (y * _LOG2_E).round_()
    r = y.sub_(n * _LN2_HIGH).sub_(n * _LN2_LOW)
    p = torch.full_like(r, _EXP_COEFFICIENTS[0])
    for c in _EXP_COEFFICIENTS[1:]:
        p.mul_(r).add_(c)
    # n is NaN where x is; the cast of NaN is arbitrary, but p is NaN there.
    scale = (n.nan_to_num_(0.0).to(torch.int32).add_(127)).bitwise_left_shift_(23).view(torch.float32)
    p.mul_(scale)
    p.masked_fill_(x < _EXP_MIN, 0.0)
    return p.masked_fill_(x > _EXP_MAX, math.inf)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e**-x) in float32."""
    return exp(-x.float()).add_(1.0).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) in float32."""
    x = x.float()
    return x * sigmoid(x)


def _artanh_series(z: torch.Tensor) -> torch.Tensor:
    """2 artanh(z) for |z| <= 1/3 in float64: its power series up to z**21 (cut below 1e-11)."""
    square = z * z
    total = torch.full_like(z, 1.0 / 21.0)
    for k in range(19, 0, -2):
        total.mul_(square).add_(1.0 / k)
    return total.mul_(z).mul_(2.0)


def log1p(u: torch.Tensor) -> torch.Tensor:
    """log(1 + u) for u in [0, 1], float32, as 2 artanh(u / (2 + u))."""
    v = u.double()
    return _artanh_series(v / (v + 2.0)).float()


def log(x: torch.Tensor) -> torch.Tensor:
    """log(x) for normal positive x, float32.

    x = m * 2**e with m in [1/2, 1), so log(x) = e * log(2) + 2 artanh((m - 1) / (m + 1)).
    """
    bits = x.double().view(torch.int64)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & ((1 << 52) - 1)) | (1022 << 52)).view(torch.float64)
    series = _artanh_series((mantissa - 1.0) / (mantissa + 1.0))
    return (exponent.double() * math.log(2.0) + series).float()


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e**x) in float32, as max(x, 0) + log(1 + e**-|x|)."""
    x = x.float()
    return log1p(exp(-x.abs())) + x.clamp_min(0.0)


def row_sum(x: torch.Tensor, dim: int = -1, *, keepdim: bool = False) -> torch.Tensor:
    """Sum over ``dim`` by halving: one fixed order, whatever lies beside the row.

    A length that is no power of two counts as padded with zeros. Dtype of ``x``.

    Example: (a, b, c) -> (a + c) + b.
    """
    length = x.shape[dim]
    half = 1 << max(length - 1, 0).bit_length() >> 1
    while length > 1:
        low, high = x.narrow(dim, 0, half), x.narrow(dim, half, length - half)
        if length == 2 * half:
            x = low + high
        else:
            x = low.clone()
            x.narrow(dim, 0, length - half).add_(high)
        length, half = half, half // 2
    return x if keepdim else x.squeeze(dim)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension, in float32."""
    x = x.float()
    mean = row_sum(x * x) / x.shape[-1]
    y = x / (mean + eps).sqrt().unsqueeze(-1)
    return y if weight is None else y * weight.float()


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax over ``dim`` in float32."""
    e = exp(x.float() - x.float().amax(dim=dim, keepdim=True))
    return e / row_sum(e, dim).unsqueeze(dim)


def log_softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """log(softmax(x)) over ``dim`` in float32."""
    shifted = x.float() - x.float().amax(dim=dim, keepdim=True)
    return shifted - log(row_sum(exp(shifted), dim)).unsqueeze(dim)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension (a power of two), float32.

    Additions and subtractions in butterfly stages, then one multiplication by
    length**-0.5.
    """
    length = x.shape[-1]
    shape = x.shape
    x = x.float()
    step = 1
    while step < length:
        pair = x.reshape(*shape[:-1], length // (2 * step), 2, step)
        low, high = pair[..., 0, :], pair[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).reshape(shape)
        step *= 2
    return x.mul(length**-0.5)
