"""Experts: against a float64 formula, and a row's bits do not depend on the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kit.numbers import assert_bf16_close, randn
from sglang_cpu_ref import moe

_EXPERTS, _HIDDEN, _WIDTH = 8, 256, 128
_LAYER = SimpleNamespace(
    w13_weight=randn(1, _EXPERTS, 2 * _WIDTH, _HIDDEN) * 0.1,
    w2_weight=randn(2, _EXPERTS, _HIDDEN, _WIDTH) * 0.1,
    num_experts=_EXPERTS,
)


def _config(limit: float | None = 10.0, activation: str = "silu"):
    return SimpleNamespace(apply_router_weight_on_input=False, activation=activation, swiglu_limit=limit)


def _formula(x, weights, ids, limit):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for weight, expert in zip(weights[t].double(), ids[t].tolist(), strict=True):
            gate, up = (_LAYER.w13_weight[expert].double() @ x[t].double()).chunk(2)
            hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            out[t] += weight * (_LAYER.w2_weight[expert].double() @ hidden)
    return out


@pytest.mark.parametrize("limit", [10.0, 0.5])
def test_against_formula_with_a_repeated_expert(limit):
    x = randn(3, 6, _HIDDEN)
    ids = torch.tensor([[0, 1], [1, 0], [3, 3], [7, 2], [5, 6], [0, 4]])
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(4))
    found = moe.moe_forward(_LAYER, x, (weights, ids, None), _config(limit))
    # Three roundings to bfloat16 lie between input and output.
    assert_bf16_close(found, _formula(x, weights, ids, limit), steps=3)


@pytest.mark.parametrize("limit", [10.0, 0.5])
def test_shared_expert_activation(limit):
    x, out = randn(9, 5, 2 * _WIDTH), torch.empty(5, _WIDTH, dtype=torch.bfloat16)
    moe.silu_and_mul_clamp(x, out, limit)
    gate, up = x.double().chunk(2, dim=-1)
    assert_bf16_close(out, torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))


def test_rows_do_not_see_each_other():
    x = randn(5, 40, _HIDDEN)
    ids = torch.randint(0, _EXPERTS, (40, 2), generator=torch.Generator().manual_seed(6))
    weights = torch.rand(40, 2, generator=torch.Generator().manual_seed(7))
    together = moe.moe_forward(_LAYER, x, (weights, ids, None), _config())
    for t in (0, 13, 39):
        alone = moe.moe_forward(_LAYER, x[t : t + 1], (weights[t : t + 1], ids[t : t + 1], None), _config())
        assert torch.equal(alone[0], together[t])


def test_other_activations_are_refused():
    with pytest.raises(NotImplementedError, match="gelu"):
        moe.moe_forward(
            _LAYER, randn(8, 1, _HIDDEN), (torch.ones(1, 1), torch.tensor([[0]]), None), _config(activation="gelu")
        )
