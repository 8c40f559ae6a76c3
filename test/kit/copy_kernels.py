"""What HiCache's ``kernel`` backend runs on a GPU, as copies of addressed bytes on the CPU.

The kernels see addresses and item sizes only. So do these: a buffer that is not laid out as its
host pool says is copied wrongly here too. A GPU's threads and streams are not imitated.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache import memory_pool_host

# The widest word that the kernels move.
_WORD = 16


def _copy(source: int, target: int, size: int) -> None:
    assert source % _WORD == target % _WORD == size % _WORD == 0, f"{source} -> {target}, {size} B"
    ctypes.memmove(target, source, size)


def _rows(src_indices: torch.Tensor, dst_indices: torch.Tensor) -> Iterable[tuple[int, int]]:
    return zip(src_indices.tolist(), dst_indices.tolist(), strict=True)


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    """All layers; the buffers' addresses in uint64 [layers]."""
    for layer in range(num_layers):
        source, target = int(src_layers[layer]), int(dst_layers[layer])
        for row, to in _rows(src_indices, dst_indices):
            _copy(source + row * item_size, target + to * item_size, item_size)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """All layers into pages of ``dst_layout_dim`` bytes, which hold one item per layer."""
    for layer in range(num_layers):
        for row, to in _rows(src_indices, dst_indices):
            target = dst.data_ptr() + to * dst_layout_dim + layer * item_size
            _copy(int(src_layers[layer]) + row * item_size, target, item_size)


def transfer_kv_per_layer_mla(
    src: torch.Tensor, dst: torch.Tensor, src_indices: torch.Tensor, dst_indices: torch.Tensor, item_size: int
) -> None:
    """One layer."""
    for row, to in _rows(src_indices, dst_indices):
        _copy(src.data_ptr() + row * item_size, dst.data_ptr() + to * item_size, item_size)


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """One layer out of pages of ``src_layout_dim`` bytes."""
    for row, to in _rows(src_indices, dst_indices):
        source = src.data_ptr() + row * src_layout_dim + layer_id * item_size
        _copy(source, dst.data_ptr() + to * item_size, item_size)


@contextlib.contextmanager
def kernel_copies() -> Iterator[None]:
    """DeepSeek-V4's host pools find these under the kernels' names, which a CPU lacks."""
    kernels: tuple[Any, ...] = (
        transfer_kv_all_layer_mla,
        transfer_kv_all_layer_mla_lf_pf,
        transfer_kv_per_layer_mla,
        transfer_kv_per_layer_mla_pf_lf,
    )
    with contextlib.ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(mock.patch.object(memory_pool_host, kernel.__name__, kernel, create=True))
        yield
