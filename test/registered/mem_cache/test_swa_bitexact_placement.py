"""Which boundaries get a tile, what a tile consists of, how many fit: pure functions."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.environ import envs
from sglang.srt.mem_cache.swa_bitexact.device_size import TilePoolConfigurator
from sglang.srt.mem_cache.swa_bitexact.layout import TileLayout
from sglang.srt.mem_cache.swa_bitexact.placement import extend_boundaries, on_grid, suggested_stride
from sglang.srt.mem_cache.swa_bitexact.tile_budget import (
    check_device_tiles,
    device_tiles,
    tiles_per_step,
)
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import server_context
from kit.tile_pools import tile_pools

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

PAGE = 256


def boundaries(start, end, length, stride, branch=None):
    return extend_boundaries(start, end, length, page_size=PAGE, stride=stride, branch_at=branch)


@pytest.mark.parametrize(
    ("chunk", "length", "stride", "branch", "expected"),
    [
        ((0, 2048), 2700, 4, 768, (768, 1024, 2048)),
        ((2048, 2700), 2700, 4, 768, (2560,)),
        ((300, 520), 2700, 4, None, ()),
        ((0, 255), 255, 1, None, ()),
        ((0, 256), 256, 1, None, (256,)),
        ((0, 257), 257, 0, None, (256,)),
        # A prompt of whole pages can be reused up to one page less only.
        ((0, 1024), 1024, 0, None, (768, 1024)),
        ((0, 1024), 1025, 0, None, (1024,)),
        # The last boundary falls into a middle chunk.
        ((512, 1024), 1100, 0, None, (1024,)),
        ((1024, 1100), 1100, 0, None, ()),
        # Odd chunk ends.
        ((0, 700), 1300, 1, None, (256, 512)),
        ((700, 1300), 1300, 1, None, (768, 1024, 1280)),
        ((767, 768), 5000, 1, None, (768,)),
        ((768, 769), 5000, 1, None, ()),
        # One boundary wanted for several reasons is one boundary.
        ((0, 512), 512, 2, 512, (256, 512)),
    ],
)
def test_worked_examples(chunk, length, stride, branch, expected):
    assert boundaries(*chunk, length, stride, branch) == expected


@pytest.mark.parametrize(
    ("context", "stride"), [(2_048, 0), (4_096, 16), (8_192, 7), (32_768, 5), (131_072, 5), (1 << 20, 5)]
)
def test_suggested_stride_examples(context, stride):
    assert suggested_stride(context, tiles=14_623, pages=59_575, page_size=PAGE) == stride


@given(st.integers(1, 1 << 20), st.integers(1, 50_000), st.integers(1, 50_000))
@settings(derandomize=True, deadline=None)
def test_suggested_stride_is_the_densest_that_fits(context, tiles, pages):
    """A context's grid, its end and a branch point are no more than its share of the tiles."""
    stride = suggested_stride(context, tiles=tiles, pages=pages, page_size=PAGE)

    def fits(stride):
        return -(-context // (PAGE * stride)) + 2 <= tiles * context // (pages * PAGE)

    if stride == 0:
        # Not even one point of a grid.
        assert tiles * context // (pages * PAGE) < 3
    else:
        assert fits(stride)
        assert stride == 1 or not fits(stride - 1)


@pytest.mark.parametrize("size", ["context_tokens", "tiles", "pages", "page_size"])
def test_suggested_stride_wants_sizes(size):
    sizes = {"context_tokens": 4_096, "tiles": 10, "pages": 10, "page_size": PAGE} | {size: 0}
    with pytest.raises(ValueError, match="expected sizes above 0"):
        suggested_stride(**sizes)


@pytest.mark.parametrize("chunk", [(5, 4), (-1, 4), (0, 11)])
def test_an_impossible_chunk_is_refused(chunk):
    with pytest.raises(ValueError, match="of a sequence of 10: expected 0 <= start <= end <= length"):
        boundaries(*chunk, 10, 1)


def test_a_branch_point_that_is_no_boundary_is_refused():
    with pytest.raises(ValueError, match="branch_at is 300, expected a multiple of 256"):
        boundaries(0, 512, 512, 1, 300)


_LENGTHS = st.integers(1, 6000)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), length=_LENGTHS, stride=st.sampled_from([0, 1, 2, 7, 32]))
def test_chunks_together_capture_what_one_chunk_would(data, length, stride):
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=6))})
    branch = data.draw(st.none() | st.integers(1, length).map(lambda n: n // PAGE * PAGE))
    parts = [boundaries(a, b, length, stride, branch) for a, b in itertools.pairwise(cuts)]
    assert tuple(b for part in parts for b in part) == boundaries(0, length, length, stride, branch)


@settings(max_examples=300, deadline=None)
@given(length=_LENGTHS, stride=st.sampled_from([0, 1, 2, 7, 32]))
def test_the_grid_the_last_boundary_and_nothing_else(length, stride):
    found = boundaries(0, length, length, stride)
    pages = range(PAGE, length + 1, PAGE)
    last = {length // PAGE * PAGE, (length - 1) // PAGE * PAGE}
    assert found == tuple(b for b in pages if b in last or on_grid(b, page_size=PAGE, stride=stride))
    assert len(found) <= max(tiles_per_step(length, page_size=PAGE, stride=stride), 0)


@pytest.mark.parametrize(
    ("chunk", "stride", "expected"), [(8192, 1, 32), (8192, 4, 11), (8192, 0, 3), (256, 1, 1), (-1, 1, 1)]
)
def test_tiles_per_step(chunk, stride, expected):
    assert tiles_per_step(chunk, page_size=PAGE, stride=stride) == expected


def layout(layers, fp8=False, **changed):
    ratios = changed.pop("ratios", [4] * layers)
    numbers = {
        "page_size": PAGE, "window": 128, "ring_rows": 128, "state_ring_rows": 8, "ratios": ratios,
        "start_layer": 0, "window_width": 512, "window_dtype": torch.float8_e4m3fn if fp8 else torch.bfloat16,
        "rope_width": 64 if fp8 else None, "state_width": 2048, "indexer_state_width": 512,
        "state_dtype": torch.float32,
    }  # fmt: skip
    return TileLayout.build(**(numbers | changed))


def test_worked_tile_sizes():
    flash = [0, 0] + [4, 128] * 20 + [4]
    pro = [128, 128] + [4, 128] * 29 + [4]
    assert (len(flash), flash.count(4)) == (43, 21)
    assert (len(pro), pro.count(4)) == (61, 30)
    assert layout(43, ratios=flash).nbytes == 6_496_256
    assert layout(61, ratios=pro).nbytes == 9_224_192
    # fp8 keeps 640 bytes per row in two streams.
    assert layout(43, fp8=True, ratios=flash).nbytes == 43 * 128 * 640 + 860_160


def test_streams_of_a_stage_are_its_own_layers():
    stage = layout(0, ratios=[128, 4, 128, 4], start_layer=30)
    assert stage.window.layers == (30, 31, 32, 33)
    assert stage.c4_state.layers == stage.indexer_state.layers == (31, 33)
    assert list(stage.streams) == ["window", "c4_state", "indexer_state"]


def test_a_stage_without_overlapping_layers_has_no_state():
    assert list(layout(0, ratios=[0, 128]).streams) == ["window"]


def test_c128_must_have_nothing_pending_at_a_boundary():
    with pytest.raises(ValueError, match="page size 192 is no multiple of 128: c128 state would be pending"):
        layout(4, page_size=192)


def test_the_window_must_fit_into_a_page():
    with pytest.raises(ValueError, match="window of 512 rows is longer than a page of 256"):
        layout(4, window=512)


def test_layout_of_a_real_pool_is_the_layout_of_its_numbers():
    with server_context():
        pool = tile_pools().get_kvcache()
    assert TileLayout.of_pool(pool, PAGE) == layout(4, ratios=[0, 4, 128, 4])
    capture = pool.capture_pool
    assert capture.nbytes == sum(buffer.nbytes for buffer in capture.buffers.values())
    assert [tuple(b.shape) for b in capture.window_buffers()] == [(9, 128 * 1024)] * 4
    assert [tuple(s.kv_score_buffer.kv_score.shape) for s in capture.state_tiles("c4_state")] == [(36, 2048)] * 2


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.float32), ("fp32", torch.float32), (" BF16 ", torch.bfloat16)]
)
def test_the_budget_knows_every_name_of_the_state_dtype(name, dtype):
    """The names that SGLang's own sizing takes, short ones and upper case too."""
    configurator = object.__new__(TilePoolConfigurator)
    vars(configurator).update(
        page_size=PAGE, sliding_window_size=128, _swa_ring_size=128, ring_sizes={4: 8}, stage_compress_ratios=[4],
        attn_head_dim=512, indexer_head_dim=128, qk_rope_head_dim=64,
    )  # fmt: skip
    with envs.SGLANG_DSV4_COMPRESS_STATE_DTYPE.override(name):
        assert configurator._layout(0) == layout(1, state_dtype=dtype)


def test_device_tiles_take_their_share():
    # 95 GB of rows and a twentieth of the whole: 5 GB, one tile of it for the padding page.
    assert device_tiles(95e9, 0.05, 6_496_256) == 768
    assert device_tiles(0, 0.05, 6_496_256) == 0


def test_too_few_device_tiles_are_refused_with_sizes_and_remedies():
    sizes = {"tile_bytes": 6_496_256, "fraction": 0.05, "max_running_requests": 64, "step_tiles": 32, "stride": 1}
    check_device_tiles(128, **sizes)
    with pytest.raises(ValueError, match="The capture pool holds 127 tiles") as refused:
        check_device_tiles(127, **sizes)
    assert str(refused.value) == (
        "The capture pool holds 127 tiles of 6.20 MiB (0.05 of KV memory), but 128 are needed: one for each "
        "of 64 running requests and twice the 32 that one step can capture at page stride 1. Raise "
        "--hicache-swa-device-tile-fraction, lower --max-running-requests or --chunked-prefill-size, or raise "
        "--hicache-swa-offload-page-stride."
    )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
