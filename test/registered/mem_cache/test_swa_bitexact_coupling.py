"""The contract for connectors: which state rows belong to which window."""

from __future__ import annotations

import os
import sys

import pytest
import torch

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")

from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import server_context
from kit.tile_pools import PAGE, small_pool, tile_pools

register_cpu_ci(est_time=12, suite="base-a-test-cpu")


@pytest.fixture
def kvcache():
    with server_context():
        yield tile_pools(tiles=8).get_kvcache()


def test_entries_are_attention_then_indexer(kvcache):
    couplings = kvcache.get_swa_state_coupling_infos()
    assert [(c.swa_page_size, c.ring_size, c.layer_id, c.is_indexer) for c in couplings] == [
        (256, 4, 1, False),
        (256, 4, 3, False),
        (256, 4, 1, True),
        (256, 4, 3, True),
    ]


def test_rows_are_the_tile_s(kvcache):
    """The last four slots of a window's page, in every buffer; the storage itself, not a copy."""
    pool = kvcache.capture_pool
    for coupling in kvcache.get_swa_state_coupling_infos():
        buffer = pool.buffers["indexer_state" if coupling.is_indexer else "c4_state"]
        layer = (1, 3).index(coupling.layer_id)
        for tile in (1, 3, 8):
            buffer[layer, tile] = torch.arange(4 * buffer.shape[-1]).view(4, -1) + tile
            rows = [coupling.row(tile * PAGE + PAGE - 4 + k) for k in range(4)]
            assert rows == [4 * tile, 4 * tile + 1, 4 * tile + 2, 4 * tile + 3]
            assert torch.equal(coupling.buffer[rows], buffer[layer, tile])


def test_the_worked_example(kvcache):
    coupling = kvcache.get_swa_state_coupling_infos()[0]
    assert [coupling.row(slot) for slot in (1_020, 1_021, 1_022, 1_023)] == [12, 13, 14, 15]


def test_without_ratio_4_layers_nothing_is_coupled():
    with server_context():
        assert tile_pools(ratios=(0, 128)).get_kvcache().get_swa_state_coupling_infos() == []


def test_without_tiles_windows_have_no_pages():
    with server_context():
        assert small_pool(16 * PAGE, (0, 4)).get_swa_state_coupling_infos() == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
