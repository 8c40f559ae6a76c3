"""The writer of tiles on real rings: which rows it takes, and what it leaves alone."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from sglang.srt.layers.attention.deepseek_v4_backend_hip_radix import DeepseekV4HipRadixBackend
from sglang.srt.mem_cache.swa_bitexact import capture
from sglang.srt.mem_cache.swa_bitexact.capture import TileWriter
from sglang.srt.mem_cache.swa_bitexact.tile_table import CapturePlan, RequestTiles, TileCapture
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import server_context
from kit.tile_pools import RATIOS, WINDOW, tile_pools

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

OVERLAPPING = (1, 3)


class Rings:
    """Real pools whose rings hold a known value for every slot and position."""

    def __init__(self):
        self.allocator = tile_pools(tiles=8)
        self.pool = self.allocator.get_kvcache()
        self.tiles = self.pool.capture_pool
        self.writer = TileWriter(self.pool, self.tiles)
        generator = torch.Generator().manual_seed(3)
        for buffer in [
            *self.pool.unified_kv_pool.kv_buffer,
            *map(self.state, OVERLAPPING),
            *map(self.index, OVERLAPPING),
        ]:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        for buffer in self.tiles.buffers.values():
            buffer.fill_(7)
        self.before = {name: buffer.clone() for name, buffer in self.tiles.buffers.items()}

    def state(self, layer):
        return self.pool.compress_state_pools[layer].kv_score_buffer.kv_score

    def index(self, layer):
        return self.pool.indexer_compress_state_pools[layer].kv_score_buffer.kv_score

    def window_rows(self, layer, slot, positions):
        return self.pool.unified_kv_pool.kv_buffer[layer][[slot * WINDOW + p % WINDOW for p in positions]]

    def state_rows(self, buffer, slot, positions):
        return buffer[[slot * 8 + p % 8 for p in positions]]


@pytest.fixture
def rings():
    with server_context():
        yield Rings()


def plan(*captures, at_end=False):
    """A plan of (boundary, slot, chunk_start, first_row, tile)."""
    return CapturePlan(
        tuple(TileCapture(RequestTiles(), *c[:4], at_end, False) for c in captures),
        torch.tensor([c[4] for c in captures]),
    )


def flat_rows(tokens, width, dtype, seed=5):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rows_of_the_chunk_and_older_ones_from_the_ring(rings):
    # Slot 2, chunk [450, 600) at flat rows 40 on; boundary 512: positions 384..449 are older.
    kv = flat_rows(190, 512, torch.bfloat16)
    p = plan((512, 2, 450, 40, 5))
    for layer in range(len(RATIOS)):
        rings.writer.window_rows(layer, kv, None, p)
        expected = torch.cat((rings.window_rows(layer, 2, range(384, 450)), kv[40 : 40 + 62]))
        assert torch.equal(rings.tiles.buffers["window"][layer, 5], expected)


def test_state_rows_on_both_sides_of_the_cut_are_cast_as_the_ring_casts_them(rings):
    scores = flat_rows(20, 2048, torch.float64).float()
    p = plan((256, 1, 253, 0, 2))
    rings.writer.state_rows(3, scores, p, is_indexer=False)
    expected = torch.cat((rings.state_rows(rings.state(3), 1, [252]), scores[:3]))
    assert torch.equal(rings.tiles.buffers["c4_state"][1, 2], expected)
    keys = flat_rows(20, 512, torch.float32)
    rings.writer.state_rows(3, keys, p, is_indexer=True)
    expected = torch.cat((rings.state_rows(rings.index(3), 1, [252]), keys[:3]))
    assert torch.equal(rings.tiles.buffers["indexer_state"][1, 2], expected)


def test_bfloat16_state_is_rounded_to_the_pool_dtype():
    narrow, wide = torch.zeros(3, 4, 16, dtype=torch.bfloat16), flat_rows(4, 16, torch.float32)
    capture.capture_layer(
        narrow, torch.tensor([1]), wide, torch.zeros(8, 16, dtype=torch.bfloat16), torch.arange(4)[None]
    )
    assert torch.equal(narrow[1], wide.to(torch.bfloat16))


def test_only_the_named_tiles_are_written(rings):
    kv = flat_rows(600, 512, torch.bfloat16)
    rings.writer.window_rows(0, kv, None, plan((256, 1, 0, 0, 4), (512, 1, 0, 0, 7)))
    changed = (rings.tiles.buffers["window"] != rings.before["window"]).flatten(2).any(2)
    assert changed.nonzero().tolist() == [[0, 4], [0, 7]]
    for name in ("c4_state", "indexer_state"):
        assert torch.equal(rings.tiles.buffers[name], rings.before[name])


def test_padded_rows_behind_the_tokens_are_in_no_tile(rings):
    kv = flat_rows(300, 512, torch.bfloat16)
    padded = torch.cat((kv, torch.full((84, 512), float("nan"), dtype=torch.bfloat16)))
    rings.writer.window_rows(1, padded, None, plan((256, 1, 0, 0, 4)))
    assert torch.equal(rings.tiles.buffers["window"][1, 4], kv[128:256])


def test_what_ends_with_the_step_is_taken_from_the_rings_in_one_call_per_stream(rings):
    """Decode rows, and chunks of prefill: the layers' own hooks leave them alone."""
    p = plan((512, 1, 511, 0, 3), (256, 4, 200, 1, 6), at_end=True)
    rings.writer.window_rows(0, _Untouchable(), None, p)
    rings.writer.state_rows(1, _Untouchable(), p, is_indexer=True)
    with patch.object(capture, "gather_tiles", wraps=capture.gather_tiles) as calls:
        rings.writer.windows_at_end(p)
        rings.writer.states_at_end(p)
    assert calls.call_count == 3
    for tile, slot, boundary in ((3, 1, 512), (6, 4, 256)):
        for layer in range(len(RATIOS)):
            expected = rings.window_rows(layer, slot, range(boundary - WINDOW, boundary))
            assert torch.equal(rings.tiles.buffers["window"][layer, tile], expected)
        for at, layer in enumerate(OVERLAPPING):
            for name, buffer in (("c4_state", rings.state(layer)), ("indexer_state", rings.index(layer))):
                expected = rings.state_rows(buffer, slot, range(boundary - 4, boundary))
                assert torch.equal(rings.tiles.buffers[name][at, tile], expected)


def test_addresses_are_made_once_per_step_not_per_layer(rings):
    p = plan((256, 1, 0, 0, 4))
    kv, scores = flat_rows(256, 512, torch.bfloat16), flat_rows(256, 2048, torch.float32)
    with patch.object(capture, "row_addresses", wraps=capture.row_addresses) as made:
        for layer in range(len(RATIOS)):
            rings.writer.window_rows(layer, kv, None, p)
        for layer in OVERLAPPING:
            rings.writer.state_rows(layer, scores, p, is_indexer=False)
            rings.writer.state_rows(layer, scores[:, :512].contiguous(), p, is_indexer=True)
    assert [call.args[1:] for call in made.call_args_list] == [(WINDOW, WINDOW), (4, 8)]


def test_what_was_taken_layer_by_layer_is_not_taken_again_at_the_end(rings):
    """The rings no longer have the rows of a boundary inside the chunk."""
    p = plan((512, 1, 300, 0, 3))
    rings.writer.windows_at_end(p)
    rings.writer.states_at_end(p)
    for name, buffer in rings.tiles.buffers.items():
        assert torch.equal(buffer, rings.before[name])


class _Untouchable:
    """Fails on any use: what a step without a boundary may look at."""

    def __getattr__(self, name):
        raise AssertionError(f"a step without a plan used {name}")


def test_a_step_without_a_plan_does_nothing():
    """Idle batches, the fake extend of an idle data-parallel rank, dummy runs: none has a plan."""
    backend = SimpleNamespace(token_to_kv_pool=_Untouchable())
    batch = SimpleNamespace(swa_capture_plan=None)
    hooks = DeepseekV4HipRadixBackend
    hooks.capture_swa_windows(backend, 0, _Untouchable(), batch, k_rope=None)
    hooks.capture_compress_state_windows(backend, 0, _Untouchable(), batch, is_indexer=True)
    hooks.capture_swa_windows_decode(backend, batch)
    hooks.capture_compress_state_windows_decode(backend, batch)


def test_rings_of_different_shape_are_refused():
    from sglang.kernels.ops.kvcache.dsv4_tiles import RingTable

    with pytest.raises(ValueError, match=r"ring of layer 1 is torch.bfloat16 \(4, 8\)"):
        RingTable((torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16)))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
