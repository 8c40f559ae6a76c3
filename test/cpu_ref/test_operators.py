"""What the model executes on the CPU: only operators that are invariant by construction.

Two kinds are: those that IEEE 754 rounds correctly or that move, compare or count values,
and those that ``sglang_cpu_ref`` replaces. A forward is watched, operator by operator.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kit.tiny_run import TinyRun, tiny_run
from sglang_cpu_ref import aten

_MOVES = """
_to_copy _unsafe_view alias as_strided cat clone contiguous copy_ detach embedding empty empty_like expand fill_
flatten full full_like gather index index_put index_put_ index_select lift_fresh masked_fill masked_fill_ new_empty
new_full new_zeros ones permute repeat reshape resize_ scatter scatter_ select slice split split_with_sizes squeeze
stack t transpose unbind unsqueeze view where zero_ zeros zeros_like nan_to_num_ unfold narrow
"""
_COMPARES = """
abs all amax amin any argmax argsort clamp clamp_max clamp_max_ clamp_min clamp_min_ eq ge gt isfinite isnan le lt
maximum minimum ne neg nonzero round_ sort sgn topk unique_consecutive _unique2 isinf
"""
# Correctly rounded by IEEE 754; a power only as the square, which torch multiplies out.
_ROUNDED = "add add_ div div_ mul mul_ sub sub_ rsub reciprocal reciprocal_ sqrt pow"
_ALLOWED = set((_MOVES + _COMPARES + _ROUNDED).split())
_REPLACED = {name.split(".")[0] for name in aten.OVERRIDES}


class _Watch(TorchDispatchMode):
    """Collects the operators that see floating-point values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        if any(t.is_floating_point() for t in tensors):
            self._note(function, arguments, tensors)
        return function(*arguments, **(keywords or {}))

    def _note(self, function, arguments, tensors) -> None:
        name = function.overloadpacket.__name__
        if function is torch.ops.aten.mm.out and tensors[0].dtype == torch.float64:
            return  # exact.grid_product
        if name == "sum" and tensors[0].dtype == torch.float64:
            return  # the exact sum of grid values in attention
        if name == "pow":
            assert arguments[1] == 2, arguments[1]
        if name in ("add", "add_") and len(arguments) > 2:
            name += " with alpha"
        self.names.add(name)


@pytest.fixture(scope="module")
def watched() -> set[str]:
    tiny: TinyRun = tiny_run()
    tiny.clear()
    one, two = tiny.sequence(list(range(6, 500)) * 2), tiny.sequence(list(range(500, 6, -1)))
    watch = _Watch()
    with watch:
        tiny.extend((one, 300), (two, 130))
        tiny.decode(one, two)
        tiny.extend((one, 640))
    return watch.names


def test_only_invariant_operators_run(watched):
    assert watched - _ALLOWED - _REPLACED == set()


def test_the_watch_sees_the_model(watched):
    assert {"mm", "bmm", "softplus", "embedding", "sqrt"} <= watched


def test_no_triton_kernel_is_launched(monkeypatch):
    """The interpreter is on for the oracles; the model must not come by it."""
    from triton.runtime.interpreter import InterpretedFunction

    tiny = tiny_run()
    tiny.clear()
    sequence = tiny.sequence(list(range(6, 400)))

    def launch(self, grid):
        raise AssertionError(f"Triton launch of {self.fn.__name__}")

    monkeypatch.setattr(InterpretedFunction, "__getitem__", launch)
    tiny.extend((sequence, 300))
    tiny.decode(sequence)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replaced_operators_against_torch(dtype):
    """Same values as torch's own kernels, within the dtype's rounding."""
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    w = torch.randn(24, 5, generator=torch.Generator().manual_seed(2)).to(dtype)
    d, step = x.double(), {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20}[dtype]
    pairs = [
        (x @ w, d @ w.double()),
        (torch.addmm(x[:, :5], x, w, beta=2, alpha=3), 2 * d[:, :5] + 3 * (d @ w.double())),
        (torch.bmm(x[None], w[None])[0], d @ w.double()),
        (x.mean(-1), d.mean(-1)),
        (x.mean((0, 1)), d.mean()),
        (x.sum(0, keepdim=True), d.sum(0, keepdim=True)),
        (x.softmax(-1), d.softmax(-1)),
        (x.log_softmax(0), d.log_softmax(0)),
        (torch.sigmoid(x), torch.sigmoid(d)),
        (torch.nn.functional.silu(x), torch.nn.functional.silu(d)),
        (torch.nn.functional.softplus(x), torch.nn.functional.softplus(d)),
        (x.abs().add(1).rsqrt(), d.abs().add(1).rsqrt()),
    ]
    for found, expected in pairs:
        assert found.dtype == dtype and found.shape == expected.shape
        assert torch.allclose(found.double(), expected, rtol=step, atol=step * expected.abs().max().item())


def test_integer_operators_keep_torch_kernels():
    x = torch.arange(12).view(3, 4)
    assert torch.equal(x @ x.t(), torch.tensor([[14, 38, 62], [38, 126, 214], [62, 214, 366]]))
    assert x.sum(1).tolist() == [6, 22, 38] and (x > 5).sum(0).tolist() == [1, 1, 2, 2]


def test_a_weight_updated_in_place_is_noticed():
    x, w = torch.ones(1, 16), torch.ones(16, 8)
    assert (x @ w)[0, 0] == 16
    w.data[0, 0] = 2.0
    assert (x @ w)[0, 0] == 17
