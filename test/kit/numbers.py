"""Random inputs and comparisons for the kernel tests."""

from __future__ import annotations

import torch


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def rope_table(positions: int, dim: int = 64, base: float = 10_000.0) -> torch.Tensor:
    """complex64 [positions, dim / 2], as upstream keeps it."""
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def assert_bf16_close(found: torch.Tensor, expected: torch.Tensor, steps: float = 1.0) -> None:
    """Within ``steps`` bfloat16 steps of the larger magnitude in the same row.

    For a comparison with another kernel or with a float64 formula, which round elsewhere;
    exactness claims use torch.equal.
    """
    found, expected = found.double(), expected.double()
    scale = torch.maximum(found.abs(), expected.abs()).amax(dim=-1, keepdim=True)
    worst = ((found - expected).abs() - steps * 2.0**-8 * scale).max()
    assert worst <= 0, f"off by {worst.item():.3g} more than {steps} bfloat16 steps"
