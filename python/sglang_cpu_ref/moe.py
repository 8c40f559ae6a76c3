"""The experts of the MoE layer. Routing is upstream's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sglang_cpu_ref.elementwise import row_sum, silu


def silu_and_mul_clamp(x: torch.Tensor, out: torch.Tensor, limit: float) -> None:
    """Replaces ``silu_and_mul_clamp``: silu(min(gate, limit)) * clamp(up, -limit, limit).

    x: [..., 2 * width], gate then up; writes ``out`` [..., width].
    """
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(silu(gate.clamp_max(limit)) * up.clamp(-limit, limit))


def moe_forward(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
    """Replaces ``fused_moe_native.moe_forward_native``; a token may name an expert twice.

    x: [T, hidden] bf16. Each expert sees the rows routed to it; a token's outputs are
    summed over its top-k slots in slot order. Returns [T, hidden] in the dtype of x,
    without the routed scaling factor, which the model applies itself.
    """
    if config.apply_router_weight_on_input or config.activation != "silu":
        raise NotImplementedError(
            f"the CPU reference runs silu experts weighted on output; got activation "
            f"{config.activation!r}, apply_router_weight_on_input={config.apply_router_weight_on_input}"
        )
    weights, ids, _ = topk_output
    slots = torch.zeros((*ids.shape, x.shape[1]), dtype=torch.float32)
    for expert in torch.unique(ids).tolist():
        if expert < 0:
            continue
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate_up = F.linear(x[token], layer.w13_weight[expert])
        hidden = _activate(gate_up, config.swiglu_limit)
        slots[token, slot] = F.linear(hidden, layer.w2_weight[expert]).float()
    return row_sum(slots * weights.float().unsqueeze(-1), dim=1).to(x.dtype)


def _activate(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    silu_and_mul_clamp(gate_up, out, float("inf") if limit is None else limit)
    return out
