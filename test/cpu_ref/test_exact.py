"""The exact contractions: same bits in any order, and right."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.numbers import randn
from sglang_cpu_ref import exact


def test_operand_bits_fill_the_mantissa():
    assert exact.operand_bits(512) == 22
    assert exact.operand_bits(1) == 26
    for length in range(1, 5000):
        bits = exact.operand_bits(length)
        assert length * 2 ** (2 * bits) <= 2**53


def test_to_grid_worked_example():
    row = torch.tensor([[1.0, 0.3, -0.05]])
    assert exact.to_grid(row, 3).tolist() == [[1.0, 0.25, 0.0]]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8), st.integers(2, 26))
def test_to_grid_is_the_nearest_multiple(values, bits):
    row = torch.tensor([values], dtype=torch.float32)
    out = exact.to_grid(row, bits)[0].tolist()
    peak = max(abs(v) for v in row[0].tolist())
    exponent = -1022 if peak == 0 else next(e for e in range(-160, 130) if peak < Fraction(2) ** e)
    step = Fraction(2) ** (exponent - bits)
    for value, found in zip(row[0].tolist(), out, strict=True):
        assert Fraction(found) % step == 0
        assert abs(Fraction(found) - Fraction(value)) <= step / 2


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_rows_stay_non_finite_and_alone(value):
    rows = torch.tensor([[1.0, value], [1.0, 2.0]])
    out = exact.to_grid(rows, 20)
    assert not out[0].isfinite().all()
    assert out[1].tolist() == [1.0, 2.0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 9), inner=st.sampled_from([1, 7, 64, 513]))
def test_product_is_exact_whatever_the_order(seed, rows, inner):
    """Against rational arithmetic, and under permutation of the summands and of the rows."""
    x = randn(seed, rows, inner, dtype=torch.float32)
    w = randn(seed + 1, 5, inner)
    bits = exact.operand_bits(inner)
    a, b = exact.to_grid(x, bits), exact.to_grid(w, bits)
    product = exact.grid_product(a, b.t())
    i, j = seed % rows, seed % 5
    expected = sum((Fraction(p) * Fraction(q) for p, q in zip(a[i].tolist(), b[j].tolist(), strict=True)), Fraction(0))
    assert Fraction(product[i, j].item()) == expected
    order = torch.randperm(inner, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(exact.grid_product(a[:, order], b[:, order].t()), product)
    assert torch.equal(exact.grid_product(a[i : i + 1], b.t()), product[i : i + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 127, 129, 300])
def test_matmul_rows_do_not_see_each_other(dtype, tokens):
    x, w = randn(1, 300, 256, dtype=dtype), randn(2, 48, 256, dtype=dtype)
    whole = exact.matmul_t(x, exact.weight_slices(w), dtype)
    assert torch.equal(exact.matmul_t(x[:tokens], exact.weight_slices(w), dtype), whole[:tokens])
    assert torch.equal(exact.matmul_t(x[-tokens:], exact.weight_slices(w), dtype), whole[-tokens:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matmul_against_float64(dtype):
    x, w = randn(3, 64, 512, dtype=dtype), randn(4, 96, 512, dtype=dtype)
    expected = x.double() @ w.double().t()
    found = exact.matmul_t(x, exact.weight_slices(w), torch.float64)
    # Each operand is off by at most 2**-23 of its row's peak: 512 products of that.
    bound = 512 * 2.0**-22 * x.abs().max().double() * w.abs().max().double()
    assert (found - expected).abs().max() <= bound
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_threads_do_not_change_bits():
    x, w = randn(5, 700, 256), randn(6, 300, 256)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(exact.matmul_t(x, exact.weight_slices(w), torch.bfloat16))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
