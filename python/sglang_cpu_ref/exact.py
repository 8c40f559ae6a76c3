"""Contractions whose result does not depend on the order of summation.

A floating-point sum depends on its order, and a BLAS picks the order from the
shape of the whole matrix and the number of threads: the same row gives other
bits in other company. Here both operands are first rounded to a power-of-two
grid of their own row, with so few bits that every partial sum is an integer
below 2**53 on the product's grid. Double precision then adds without rounding:
every order, blocking and thread count gives the same bits, and zeros may be
added freely. (The error-free transformation of Ozaki, Ogita, Oishi and Rump,
"Error-free transformations of matrix multiplication by using fast routines of
matrix multiplication", Numerical Algorithms 59, 2012, with one slice.)

Cost: about twice a float32 product. Accuracy: an operand is exact to ``bits``
binary places below the largest magnitude of its row, so a bfloat16 row whose
elements span at most ``bits - 8`` binades loses nothing.
"""

from __future__ import annotations

import torch

_MANTISSA_BITS = 53
_EXPONENT_MASK = 0x7FF << 52
# Rows taken at a time: the float64 intermediates of a block stay in the L2 cache.
_BLOCK_ROWS = 128


def operand_bits(length: int) -> int:
    """Bits per operand such that a sum of ``length`` products stays below 2**53.

    Example: length=512 -> 22, because 22 + 22 + log2(512) = 53.
    """
    return (_MANTISSA_BITS - (length - 1).bit_length()) // 2


def row_exponent(x: torch.Tensor) -> torch.Tensor:
    """Integer e with ``2**(e - 1) <= peak < 2**e``, the peak of ``abs(x)`` on each row; int64, [..., 1].

    A zero row gets -1022.
    """
    return (_peak_bits(x) >> 52) - 1022


def pow2(exponent: torch.Tensor) -> torch.Tensor:
    """Exactly ``2.0 ** exponent`` in float64, for integer exponents in [-1022, 1023].

    Built from the bit pattern, since a vectorised ``pow`` need not be exact.
    """
    return ((exponent + 1023) << 52).view(torch.float64)


def to_grid(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Each row (last dimension) of ``x``, rounded to ``bits`` bits below its peak; float64.

    With peak < 2**e, the grid is 2**(e - bits). Adding and subtracting 1.5 * 2**(52 + e - bits),
    whose own unit in the last place is the grid, rounds to it, ties to even. An infinity
    or a NaN stays what it is.

    Example, bits=3: the row (1.0, 0.3, -0.05) has peak < 2**1, so its grid is 2**-2 and
    the result (1.0, 0.25, 0.0).
    """
    shift = ((_peak_bits(x) & _EXPONENT_MASK) + (((53 - bits) << 52) + (1 << 51))).view(torch.float64)
    return (x.double() + shift).sub_(shift)


def _peak_bits(x: torch.Tensor) -> torch.Tensor:
    """Bit pattern of the largest magnitude of each row, as a float64; int64, [..., 1]."""
    return x.abs().amax(dim=-1, keepdim=True).double().view(torch.int64)


def grid_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a [M, K] @ b [K, N]`` in float64; exact if the operands' grids allow it.

    The out= overload on purpose: ``aten::mm`` itself is one of our kernels.
    """
    return torch.mm(a, b, out=torch.empty((a.shape[0], b.shape[1]), dtype=torch.float64))


def weight_slices(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``weight [N, K]`` as one (16-bit dtypes) or two grid slices, largest first.

    Two slices keep all 24 bits of a float32 row whose elements span 20 binades.
    """
    bits = operand_bits(weight.shape[1])
    first = to_grid(weight, bits)
    if weight.dtype in (torch.bfloat16, torch.float16):
        return (first,)
    return (first, to_grid(weight.double() - first, bits))


def matmul_t(x: torch.Tensor, slices: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    """``x [M, K] @ weight [N, K]^T`` -> [M, N] in ``dtype``, rounded once at the end.

    ``slices`` come from ``weight_slices``. Row m depends on row m of ``x`` and on
    the weight only.
    """
    out = torch.empty((x.shape[0], slices[0].shape[0]), dtype=dtype)
    bits = operand_bits(x.shape[1])
    for start in range(0, x.shape[0], _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        rows = to_grid(x[block], bits)
        total = grid_product(rows, slices[0].t())
        for part in slices[1:]:
            total += grid_product(rows, part.t())
        out[block] = total
    return out
