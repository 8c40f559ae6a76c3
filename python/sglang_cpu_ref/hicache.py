"""HiCache on a CPU: host memory without pinning, and the ``direct`` copy kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def leave_unpinned(*args: Any, **kwargs: Any) -> None:
    """Replaces cudaHostRegister and cudaHostUnregister: host memory is the device's memory."""


def init_without_pinning(original: Callable[..., None], pool: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``HostKVCache.__init__``: a CPU has no pinned memory.

    The pool keeps the flag, and a storage read asks for a pinned page with it: the
    prefetch thread then fails, logs, and reports that it loaded nothing.
    """
    original(pool, *args, **kwargs)
    pool.pin_memory = False


def transfer_kv_direct(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Replaces ``sgl_kernel.kvcacheio.transfer_kv_direct``: copies rows, layer by layer.

    src_layers, dst_layers: one [rows, ...] tensor per layer; indices: [N] rows. Writes
    ``dst[dst_indices] = src[src_indices]``; ``page_size`` only tunes a GPU.
    """
    source, target = src_indices.long(), dst_indices.long()
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[target] = src[source]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Replaces the kernel of that name: all layers of device rows into page-first host pages.

    ``src_ptrs``: per group and layer a [rows, ...] tensor; ``dst_ptrs``: per group one
    [pages, layers, ...] tensor.
    """
    layers = len(src_ptrs) // len(dst_ptrs)
    rows = src_indices.long().view(-1, page_size)
    pages = dst_indices.long().view(-1, page_size)[:, 0] // page_size
    for group, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            dst[pages, layer] = src_ptrs[group * layers + layer][rows].reshape(dst[pages, layer].shape)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Replaces the kernel of that name: one layer of page-first host pages into device rows."""
    pages = src_indices.long().view(-1, page_size)[:, 0] // page_size
    rows = dst_indices.long()
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[rows] = src[pages, layer_id].reshape(dst[rows].shape)
