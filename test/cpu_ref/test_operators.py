"""What the model executes on the CPU: only operators that are invariant by construction.

Two kinds are: those that IEEE 754 rounds correctly or that move, compare or count values,
and those that ``sglang_cpu_ref`` replaces. A forward is watched, operator by operator.
"""

from __future__ import annotations

import math

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


def test_the_replacements_run_only_invariant_operators():
    """The model's watch sees a replaced operator, not what its kernel is made of."""
    x, w = torch.randn(6, 24, generator=torch.Generator().manual_seed(1)), torch.ones(24, 5)
    arguments = {
        "mm": (x, w),
        "addmm": (x[:, :5], x, w),
        "bmm": (x[None], w[None]),
        "mean.dim": (x, [1]),
        "sum.dim_IntList": (x, [0, 1]),
        "_softmax": (x, 1, False),
        "_log_softmax": (x, 1, False),
        **dict.fromkeys(("rsqrt", "softplus", "sigmoid", "silu"), (x,)),
    }
    assert arguments.keys() == aten.OVERRIDES.keys()
    for name, values in arguments.items():
        with _Watch() as watch:
            aten.OVERRIDES[name](*values)
        assert watch.names - _ALLOWED == set(), name


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


_VALUES = [-3.25, 0.1, 0.7]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (torch.sigmoid, [1 / (1 + math.exp(-v)) for v in _VALUES]),
        (torch.nn.functional.silu, [v / (1 + math.exp(-v)) for v in _VALUES]),
        (torch.nn.functional.softplus, [math.log1p(math.exp(v)) for v in _VALUES]),
        (lambda x: x.softmax(0), [math.exp(v) / sum(map(math.exp, _VALUES)) for v in _VALUES]),
        (lambda x: x.log_softmax(0), [v - math.log(sum(map(math.exp, _VALUES))) for v in _VALUES]),
        (lambda x: (x * x).rsqrt(), [1 / abs(v) for v in _VALUES]),
        (lambda x: x.mean(0, keepdim=True), [sum(_VALUES) / 3]),
        (lambda x: x.sum(0, keepdim=True), [sum(_VALUES)]),
        (lambda x: (x[None] @ x[:, None])[0], [sum(v * v for v in _VALUES)]),
    ],
    ids=["sigmoid", "silu", "softplus", "softmax", "log_softmax", "rsqrt", "mean", "sum", "mm"],
)
def test_float64_keeps_its_precision(operator, expected):
    """The replacements compute in float32; a float64 tensor must not come by them."""
    found = operator(torch.tensor(_VALUES, dtype=torch.float64))
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-14, abs=0)


def test_empty_operands():
    assert torch.zeros(0, 3).mean(1).shape == (0,)
    assert torch.zeros(0, 3).sum(0).tolist() == [0, 0, 0]
    assert torch.zeros(0, 4).softmax(-1).shape == (0, 4)
    assert torch.bmm(torch.zeros(0, 2, 3), torch.zeros(0, 3, 5)).shape == (0, 2, 5)
    assert (torch.zeros(0, 3) @ torch.ones(3, 5)).shape == (0, 5)


@pytest.mark.parametrize(
    "update",
    [lambda w: w[0, 0].add_(1), lambda w: w.copy_(w.flip(0)), lambda w: w[:, [0, 1]].copy_(w[:, [1, 0]].clone())],
    ids=["one value", "rows swapped", "columns swapped"],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_updated_in_place_is_noticed(update, transposed):
    """The slices of a weight are kept; new bytes at the same address are another weight."""
    x = torch.arange(1.0, 17.0)[None]
    w = torch.randint(-9, 10, (8, 16), generator=torch.Generator().manual_seed(3)).float()
    w = w.t() if transposed else w.t().contiguous()
    _ = x @ w
    update(w)
    assert torch.equal((x @ w)[0], (x[0, :, None] * w).sum(0))


def test_slices_are_kept_of_what_comes_again_only():
    """Products of two activations pass through too: a long run must not keep them."""
    cache, weight = aten._SliceCache(capacity=64), torch.ones(16, 8)
    for number in range(20):
        cache.get(torch.full((16, 8), float(number)))
    assert cache.nbytes == 0
    for _ in range(3):
        slices = cache.get(weight)
    assert slices is cache.get(weight)
    assert cache.nbytes == sum(part.nbytes for part in slices) > 0
