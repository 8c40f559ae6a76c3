"""fp8 quantisation of index queries and keys."""

from __future__ import annotations

import torch

_E4M3_MAX = 448.0
_SMALLEST_PEAK = 1e-4


def fp8_row_scale(x: torch.Tensor) -> torch.Tensor:
    """max(|row|, 1e-4) / 448 in fp32, [..., 1]: the scale of upstream's indexer kernels."""
    return x.float().abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST_PEAK) / _E4M3_MAX
