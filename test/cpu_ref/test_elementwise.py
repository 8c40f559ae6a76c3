"""Elementwise functions: accurate, and the same bits wherever a value stands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.numbers import randn
from sglang_cpu_ref import elementwise as e

# One unit in the last place of a float32, relative.
_STEP = 2.0**-23
FUNCTIONS = {
    "exp": (e.exp, torch.exp, (-80.0, 80.0)),
    "sigmoid": (e.sigmoid, torch.sigmoid, (-80.0, 80.0)),
    "softplus": (e.softplus, torch.nn.functional.softplus, (-40.0, 40.0)),
    "silu": (e.silu, torch.nn.functional.silu, (-40.0, 40.0)),
    "log": (e.log, torch.log, (1e-6, 1e6)),
    "log1p": (e.log1p, torch.log1p, (0.0, 1.0)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy_against_float64(name):
    ours, reference, (low, high) = FUNCTIONS[name]
    x = torch.rand(20_000, generator=torch.Generator().manual_seed(1)) * (high - low) + low
    expected = reference(x.double())
    error = (ours(x).double() - expected).abs()
    # 4 steps relative; near a zero of the function, absolute.
    assert (error <= 4 * _STEP * expected.abs() + 4e-8).all()


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 200), start=st.integers(0, 70))
def test_a_value_has_the_same_bits_anywhere(name, seed, size, start):
    ours, _, (low, high) = FUNCTIONS[name]
    x = torch.rand(300, generator=torch.Generator().manual_seed(seed)) * (high - low) + low
    assert torch.equal(ours(x)[start : start + size], ours(x[start : start + size].clone()))


def test_exp_edges():
    x = torch.tensor([0.0, -0.0, -87.5, 88.5, float("-inf"), float("inf"), float("nan")])
    out = e.exp(x)
    assert out[:6].tolist() == [1.0, 1.0, 0.0, float("inf"), 0.0, float("inf")]
    assert out[6].isnan()


def test_row_sum_order_and_shape():
    assert e.row_sum(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [6.0]
    x = randn(2, 3, 5, 7, dtype=torch.float32)
    assert e.row_sum(x, 1).shape == (3, 7)
    assert torch.allclose(e.row_sum(x, 1), x.sum(1), atol=1e-5)
    # The documented order: (a + c) + b.
    a, b, c = 1e8, 1.0, -1e8
    assert e.row_sum(torch.tensor([a, b, c])).item() == 1.0
    assert e.row_sum(torch.tensor([a, c, b])).item() == 0.0


@pytest.mark.parametrize("length", [1, 2, 3, 4, 8, 24, 100, 512])
def test_row_sum_does_not_change_its_input(length):
    x = randn(length, 4, length, dtype=torch.float32)
    before = x.clone()
    e.row_sum(x)
    assert torch.equal(x, before)


def test_rms_norm_softmax_and_log_softmax_against_float64():
    x, w = randn(3, 6, 512), randn(4, 512)
    d = x.double()
    expected = d / (d.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
    assert (e.rms_norm(x, w, 1e-6).double() - expected).abs().max() < 1e-5
    assert (e.softmax(x, -1).double() - d.softmax(-1)).abs().max() < 1e-7
    assert (e.log_softmax(x, -1).double() - d.log_softmax(-1)).abs().max() < 1e-5


def test_hadamard_is_orthonormal_and_symmetric():
    matrix = e.hadamard(torch.eye(128))
    assert torch.equal(matrix, matrix.t())
    assert torch.allclose(matrix @ matrix, torch.eye(128), atol=1e-6)
    # Sylvester's order: entry (i, j) is the parity of i & j.
    parity = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)])
    assert torch.equal(matrix.sign(), parity)
