"""The hash behind seeded sampling, against upstream's Triton kernel and a published value."""

from __future__ import annotations

import torch
import triton
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel

from sglang_cpu_ref.sampling import murmur_hash32


def test_upstream_s_kernel_gives_the_same():
    generator = torch.Generator().manual_seed(1)
    seed = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator).view(torch.uint64)
    seed[0], seed[1] = 0, 2**64 - 1
    positions = torch.tensor([0, 1, 700, 2**31 - 1, 6_000], dtype=torch.int64)
    columns = torch.arange(1_500)
    expected = torch.empty((5, 1_500), dtype=torch.uint32)
    murmur_hash32_kernel[(5, triton.cdiv(1_500, 1_024))](seed, positions, columns, expected, 5, 1_500, BLOCK_SIZE=1_024)
    found = murmur_hash32(seed, positions, columns)
    assert found.dtype == torch.uint32
    assert torch.equal(found.long(), expected.long())
    assert len(found.long().unique()) > 7_000


def test_sixteen_zero_bytes():
    """MurmurHash3 x86_32 of sixteen zero bytes with seed 0, by the published algorithm in plain integers."""
    zero = torch.zeros(1, dtype=torch.uint64)
    h = 0
    for _ in range(4):
        h = (((h << 13) | (h >> 19)) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    h ^= h >> 16
    assert murmur_hash32(zero, torch.zeros(1), torch.zeros(1)).item() == h
