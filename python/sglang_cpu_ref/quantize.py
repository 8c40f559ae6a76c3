"""fp8 quantisation of index queries and keys."""

from __future__ import annotations

import torch

_E4M3_MAX = 448.0
_SMALLEST_PEAK = 1e-4


def fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D] in e4m3, and their scales max(|row|, 1e-4) / 448, fp32 [..., 1].

    As upstream's indexer kernels do it: a value is multiplied by the reciprocal scale.
    """
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST_PEAK) / _E4M3_MAX
    return (x.float() * (1.0 / scale)).to(torch.float8_e4m3fn), scale
