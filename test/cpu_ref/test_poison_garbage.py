"""Garbage: large and finite in every number format, other words each time, repeatable."""

from __future__ import annotations

import pytest
import torch

from sglang_cpu_ref.poison_garbage import Garbage


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_garbage_is_large_and_finite(dtype):
    rows = torch.zeros((8, 4096), dtype=dtype)
    Garbage(1).fill(rows, torch.arange(8))
    assert bool(torch.isfinite(rows).all())
    assert float(rows.abs().min()) >= 32 and float(rows.abs().max()) < 512
    assert 0.4 < float((rows > 0).float().mean()) < 0.6


def test_garbage_is_finite_as_fp8_codes():
    rows = torch.zeros((4, 1 << 20), dtype=torch.uint8)
    Garbage(1).fill(rows, torch.arange(4))
    codes = rows.view(torch.float8_e4m3fn).float()
    assert bool(torch.isfinite(codes).all())
    # 42, 43, C2, C3 in every other byte.
    assert set(codes[:, 1::2].unique().tolist()) == {2.5, 2.75, -2.5, -2.75}


def test_garbage_differs_by_row_and_call_and_is_the_same_for_the_same_seed():
    def drawn(seed: int) -> list[bytes]:
        garbage, rows, out = Garbage(seed), torch.zeros((100, 64), dtype=torch.int32), []
        for _ in range(3):
            garbage.fill(rows, torch.arange(100))
            out += [row.numpy().tobytes() for row in rows]
        return out

    first = drawn(1)
    assert len(set(first)) == 300
    assert drawn(1) == first
    assert set(drawn(2)).isdisjoint(first)


def test_records_wider_than_the_block_and_more_than_it_has_windows():
    garbage = Garbage(1)
    garbage._block = garbage._block[:1000]
    rows = torch.zeros((50, 3000), dtype=torch.int32)
    which = torch.arange(0, 50, 2)
    garbage.fill(rows, which)
    assert (rows != 0).all(1).nonzero().flatten().tolist() == which.tolist()
    assert (rows == 0).all(1).sum() == 25
