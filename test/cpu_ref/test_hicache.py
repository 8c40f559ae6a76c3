"""HiCache's copy kernels for the ``direct`` backend, against loops over rows and pages."""

from __future__ import annotations

import torch

from kit.numbers import generator, randn
from sglang_cpu_ref import hicache

_PAGE, _LAYERS, _ROWS, _WIDTH = 4, 3, 32, 6


def _pages(seed: int, count: int, of: int) -> torch.Tensor:
    """Token indices of ``count`` whole pages in random order."""
    pages = torch.randperm(of // _PAGE, generator=generator(seed))[:count]
    return (pages[:, None] * _PAGE + torch.arange(_PAGE)).flatten()


def test_layer_first_copy():
    source = [randn(k, _ROWS, _WIDTH) for k in range(_LAYERS)]
    target = [torch.zeros(2 * _ROWS, _WIDTH, dtype=torch.bfloat16) for _ in range(_LAYERS)]
    from_rows, to_rows = _pages(1, 5, _ROWS), _pages(2, 5, 2 * _ROWS)
    hicache.transfer_kv_direct(source, target, from_rows, to_rows, _PAGE)
    for layer in range(_LAYERS):
        expected = torch.zeros(2 * _ROWS, _WIDTH, dtype=torch.bfloat16)
        for a, b in zip(from_rows.tolist(), to_rows.tolist(), strict=True):
            expected[b] = source[layer][a]
        assert torch.equal(target[layer], expected)


def test_page_first_backup_and_load():
    """Two groups (as K and V): device rows into [page, layer, token] host pages, and back."""
    groups = 2
    device = [randn(k, _ROWS, _WIDTH) for k in range(groups * _LAYERS)]
    host = [torch.zeros(16, _LAYERS, _PAGE, _WIDTH, dtype=torch.bfloat16) for _ in range(groups)]
    device_rows, host_rows = _pages(3, 6, _ROWS), _pages(4, 6, 16 * _PAGE)
    hicache.transfer_kv_all_layer_direct_lf_pf(device, host, device_rows, host_rows, _PAGE)
    for group in range(groups):
        expected = torch.zeros_like(host[group])
        for a, b in zip(device_rows.tolist(), host_rows.tolist(), strict=True):
            for layer in range(_LAYERS):
                expected[b // _PAGE, layer, b % _PAGE] = device[group * _LAYERS + layer][a]
        assert torch.equal(host[group], expected)

    back = [torch.zeros(_ROWS, _WIDTH, dtype=torch.bfloat16) for _ in range(groups)]
    for layer in range(_LAYERS):
        hicache.transfer_kv_per_layer_direct_pf_lf(host, back, host_rows, device_rows, layer, _PAGE)
        for group in range(groups):
            expected = torch.zeros(_ROWS, _WIDTH, dtype=torch.bfloat16)
            expected[device_rows] = device[group * _LAYERS + layer][device_rows]
            assert torch.equal(back[group], expected)
