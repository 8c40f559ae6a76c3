"""Batch-invariant CPU kernels for the torch operators that upstream's model code calls.

SGLang registers such kernels for CUDA in ``srt/batch_invariant_ops``; these are the
CPU's. They replace the implementation of an aten operator for the whole process,
so that ``F.linear``, ``@``, ``einsum`` and ``x.mean(-1)`` in upstream's files are
invariant without an edit of those files.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from sglang_cpu_ref import elementwise
from sglang_cpu_ref.exact import matmul_t, weight_slices

_NARROW_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_library: torch.library.Library | None = None


class _SliceCache:
    """Grid slices of weights, so that a decode step does not make them anew.

    The key is the weight's address and layout; a checksum of its content notices an
    update in place or an address in second use. Bounded, least recently used first.
    """

    def __init__(self, capacity: int) -> None:
        self._entries: OrderedDict[tuple[object, ...], tuple[int, tuple[torch.Tensor, ...]]] = OrderedDict()
        self._capacity = capacity

    def get(self, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``weight_slices(b.t())`` for the right operand ``b`` [K, N] of a product."""
        weight = b.t()
        dense = weight if weight.is_contiguous() else b
        if not dense.is_contiguous():
            return weight_slices(weight)
        key = (b.data_ptr(), b.shape, b.stride(), b.dtype)
        checksum = _checksum(dense)
        found = self._entries.get(key)
        if found is not None and found[0] == checksum:
            self._entries.move_to_end(key)
            return found[1]
        slices = weight_slices(weight)
        self._entries[key] = (checksum, slices)
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return slices


def _checksum(dense: torch.Tensor) -> int:
    flat = dense.view(-1).view(torch.uint8)
    wide = flat.view(torch.int64) if flat.numel() % 8 == 0 else flat
    return int(wide.sum())


_weights = _SliceCache(capacity=1024)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """aten::mm, [M, K] @ [K, N]: each output row from its own input row."""
    if a.dtype not in _NARROW_FLOATS or a.numel() * b.numel() == 0:
        return torch.mm(a, b, out=torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype))
    return matmul_t(a, _weights.get(b), a.dtype)


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """aten::addmm, beta * bias + alpha * (a @ b)."""
    product = mm(a, b)
    if alpha != 1:
        product = product * alpha
    return product + (bias if beta == 1 else bias * beta)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """aten::bmm, [B, M, K] @ [B, K, N]."""
    return torch.stack([mm(x, y) for x, y in zip(a.unbind(0), b.unbind(0), strict=True)])


def _reduce(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool) -> tuple[torch.Tensor, int]:
    """Sum over ``dim`` (all if empty) in float32, one fixed order; and the number of summands."""
    dims = sorted({d % x.dim() for d in dim} if dim else range(x.dim()))
    total, count = x.float(), 1
    for d in reversed(dims):
        count *= x.shape[d]
        total = elementwise.row_sum(total, d)
    if keepdim:
        for d in dims:
            total = total.unsqueeze(d)
    return total, count


def mean_dim(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """aten::mean.dim for 16- and 32-bit floats."""
    total, count = _reduce(x, dim, keepdim)
    return (total / count).to(dtype or x.dtype)


def sum_dim(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """aten::sum.dim_IntList; integers, bools and float64 keep torch's kernel (our float64 sums are exact)."""
    if x.dtype not in _NARROW_FLOATS or x.numel() == 0:
        result = dtype or (x.dtype if x.is_floating_point() else torch.int64)
        out = torch.empty(0, dtype=result)
        return torch.sum(x, dim=None if dim is None else tuple(dim), keepdim=keepdim, dtype=dtype, out=out)
    return _reduce(x, dim, keepdim)[0].to(dtype or x.dtype)


def _softmax(function: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, dim, half_to_float: function(x, dim).to(torch.float32 if half_to_float else x.dtype)


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: function(x).to(x.dtype)


def softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    """aten::softplus for beta 1; the threshold only saves work and has no effect here."""
    if beta != 1:
        raise NotImplementedError(f"softplus with beta {beta}; the CPU reference has beta 1")
    return elementwise.softplus(x).to(x.dtype)


OVERRIDES: dict[str, Callable[..., torch.Tensor]] = {
    "mm": mm,
    "addmm": addmm,
    "bmm": bmm,
    "mean.dim": mean_dim,
    "sum.dim_IntList": sum_dim,
    "_softmax": _softmax(elementwise.softmax),
    "_log_softmax": _softmax(elementwise.log_softmax),
    "rsqrt": _unary(lambda x: x.float().sqrt().reciprocal()),
    "softplus": softplus,
    "sigmoid": _unary(elementwise.sigmoid),
    "silu": _unary(elementwise.silu),
}


def install() -> None:
    """Register ``OVERRIDES`` for the CPU dispatch key. Idempotent; lasts for the process."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # torch warns that a kernel is overridden; that is the purpose.
        warnings.simplefilter("ignore")
        for name, function in OVERRIDES.items():
            _library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
