"""Batch-invariant CPU kernels for the torch operators that upstream's model code calls.

SGLang registers such kernels for CUDA in ``srt/batch_invariant_ops``; these are the
CPU's. They replace the implementation of an aten operator for the whole process, for
16- and 32-bit floats, so that ``F.linear``, ``@``, ``einsum`` and ``x.mean(-1)`` in
upstream's files are invariant without an edit of those files. Other dtypes keep torch's
own kernel, reached by the operator's ``out`` overload, which is not replaced.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash

from sglang_cpu_ref import elementwise
from sglang_cpu_ref.exact import matmul_t, weight_slices

_NARROW_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_Kernel = Callable[..., torch.Tensor]

_library: torch.library.Library | None = None


class _SliceCache:
    """Grid slices of weights, so that a decode step does not make them anew.

    The key is the weight's address and layout; a digest of its content notices an update
    in place or an address in second use. Slices are kept from the second time on that the
    same content is met, since a product of two activations asks too, and theirs are never
    wanted again. Bounded, least recently used first.
    """

    def __init__(self, capacity: int) -> None:
        self._entries: OrderedDict[tuple[object, ...], tuple[int, tuple[torch.Tensor, ...] | None]] = OrderedDict()
        self._capacity = capacity

    def get(self, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``weight_slices(b.t())`` for the right operand ``b`` [K, N] of a product."""
        weight = b.t()
        dense = weight if weight.is_contiguous() else b
        if not dense.is_contiguous():
            return weight_slices(weight)
        key = (b.data_ptr(), b.shape, b.stride(), b.dtype)
        digest = xxhash.xxh3_64_intdigest(dense.detach().view(torch.uint8).numpy().data)
        known, slices = self._entries.get(key, (None, None))
        if known != digest:
            self._entries[key] = digest, None
            slices = weight_slices(weight)
        elif slices is None:
            slices = weight_slices(weight)
            self._entries[key] = digest, slices
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return slices

    @property
    def nbytes(self) -> int:
        """Bytes of the slices that are kept."""
        return sum(part.nbytes for _, slices in self._entries.values() for part in slices or ())


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
    if a.shape[0] == 0:
        return a.new_empty((0, a.shape[1], b.shape[2]))
    return torch.stack([mm(x, y) for x, y in zip(a.unbind(0), b.unbind(0), strict=True)])


def _reduce(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool) -> tuple[torch.Tensor, int]:
    """Sum over ``dim`` (all if empty) in float32, one fixed order; and the number of summands."""
    dims = sorted({d % x.dim() for d in dim} if dim else range(x.dim()))
    total, count = x.float(), 1
    for d in reversed(dims):
        count *= x.shape[d]
        total = elementwise.row_sum(total, d, keepdim=keepdim)
    return total, count


def _mean(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    total, count = _reduce(x, dim, keepdim)
    return (total / count).to(dtype or x.dtype)


def _sum(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _reduce(x, dim, keepdim)[0].to(dtype or x.dtype)


def _softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    """The threshold only saves work in torch's kernel and has no effect here."""
    if beta != 1:
        raise NotImplementedError(f"softplus with beta {beta}; the CPU reference has beta 1")
    return elementwise.softplus(x).to(x.dtype)


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> _Kernel:
    return lambda x: function(x).to(x.dtype)


def _over_dim(function: Callable[[torch.Tensor, int], torch.Tensor]) -> _Kernel:
    return lambda x, dim, half_to_float: function(x, dim).to(torch.float32 if half_to_float else x.dtype)


# Operator -> (our kernel for narrow floats, the untouched overload for everything else).
_KERNELS: dict[str, tuple[_Kernel, _Kernel]] = {
    "mean.dim": (_mean, torch.ops.aten.mean.out),
    "sum.dim_IntList": (_sum, torch.ops.aten.sum.IntList_out),
    "_softmax": (_over_dim(elementwise.softmax), torch.ops.aten._softmax.out),
    "_log_softmax": (_over_dim(elementwise.log_softmax), torch.ops.aten._log_softmax.out),
    "rsqrt": (_unary(lambda x: x.float().sqrt().reciprocal()), torch.ops.aten.rsqrt.out),
    "softplus": (_softplus, torch.ops.aten.softplus.out),
    "sigmoid": (_unary(elementwise.sigmoid), torch.ops.aten.sigmoid.out),
    "silu": (_unary(elementwise.silu), torch.ops.aten.silu.out),
}


def _narrow_only(name: str, ours: _Kernel, theirs: _Kernel) -> _Kernel:
    def kernel(x: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if x.dtype in _NARROW_FLOATS and x.numel():
            return ours(x, *arguments, **keywords)
        if name == "sum.dim_IntList" and not x.is_floating_point():
            default = torch.int64
        else:
            default = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        result = keywords.get("dtype") or default
        return theirs(x, *arguments, **keywords, out=torch.empty(0, dtype=result))

    return kernel


OVERRIDES: dict[str, _Kernel] = {
    "mm": mm,
    "addmm": addmm,
    "bmm": bmm,
    **{name: _narrow_only(name, *kernels) for name, kernels in _KERNELS.items()},
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
