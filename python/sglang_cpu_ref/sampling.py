"""Sampling with a seed: the hash that stands for the random number of a row, position and token."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Replaces ``murmur_hash32``, whose CPU version is compiled: MurmurHash3 x86_32, hash seed 0.

    seed: uint64 [n]; positions: integers [n]; col_indices: integers [m]. Returns uint32
    [n, m]: the hash of 16 bytes, seed low, seed high, position, column, little-endian
    (https://en.wikipedia.org/wiki/MurmurHash).
    """
    bits = seed.view(torch.int64)
    blocks = (bits & _MASK, (bits >> 32) & _MASK, positions.long() & _MASK)
    state = torch.zeros_like(bits)
    for block in blocks:
        state = _mixed(state, block)
    state = _mixed(state[:, None], col_indices.long() & _MASK)
    state = state ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = _times(state ^ (state >> shift), factor)
    return (state ^ (state >> 16)).to(torch.uint32)


def _mixed(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _times(_rotated(_times(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotated(state ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _times(value: torch.Tensor, factor: int) -> torch.Tensor:
    """Product modulo 2**32; int64 wraps modulo 2**64, which keeps the low bits."""
    return (value * factor) & _MASK


def _rotated(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK
