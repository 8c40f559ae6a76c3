"""SGLANG_SWA_DBG_CHECKSUM: one changed byte is named, at whichever station it changed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import xxhash

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")

from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.swa_bitexact import capture, restore
from sglang.srt.mem_cache.swa_bitexact.tile_table import CapturePlan, RequestTiles, TileCapture
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import TileCache, file_storage, server_context, tokens_from
from kit.tile_requests import TileRequest

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

STREAMS = ("window", "c4_state", "indexer_state")
POOLS = {
    "window": PoolName.SWA,
    "c4_state": PoolName.DEEPSEEK_V4_C4_STATE,
    "indexer_state": PoolName.DEEPSEEK_V4_C4_INDEXER_STATE,
}
# A layer of each stream that is not its first; the window's are all four.
LAYER = {"window": 2, "c4_state": 3, "indexer_state": 3}
TOKENS = tokens_from(1, 3)


def changed(stream: str, station: str, position: int | str = 512) -> str:
    return re.escape(
        f"SGLANG_SWA_DBG_CHECKSUM: {stream} rows changed {station}: position {position}, layer {LAYER[stream]}"
    )


@pytest.fixture(params=["layer_first", "page_first_direct"])
def cache(request, tmp_path):
    with (
        envs.SGLANG_SWA_DBG_CHECKSUM.override(True),
        server_context(hicache_mem_layout=request.param, **file_storage(tmp_path)) as args,
        TileCache(args, publishes=True) as made,
    ):
        yield made


@pytest.fixture
def captured(cache):
    """A finished request with a tile at 512, backed up; the checks know where the tile ends."""
    return publish(cache)


def publish(cache):
    request = TileRequest(cache, TOKENS, seed=1).admit().extend(600, 512)
    checks = cache.kvcache.tile_writer.checksums
    checks._boundaries[int(request.req.swa_tiles.tiles[512])] = 512
    request.finish()
    return request


def flip(rows: torch.Tensor) -> None:
    """Change one bit of the last byte."""
    rows.reshape(-1)[-1:].view(torch.uint8)[-1] ^= 1


def host_page(cache, stream):
    """The bytes that host memory has of the only tile, [layers, bytes]: written back by ``put``."""
    pool = cache.tree.host_pool_group.get_pool(POOLS[stream])
    (index,) = {index for name, index in cache.kvcache.tile_writer.checksums._on_host if name == stream}
    layers = len(cache.kvcache.capture_pool.layout.streams[stream].layers)
    page = pool.get_data_page(index).clone().view(layers, -1)
    return page, lambda: pool.set_from_flat_data_page(index, page.flatten())


def entry(cache, stream):
    return cache.kvcache.capture_pool.layout.streams[stream].layers.index(LAYER[stream])


def test_an_undisturbed_tile_passes_every_station(cache, captured):
    cache.settle()
    checks = cache.kvcache.tile_writer.checksums
    assert cache.controller.tile_checksums is cache.kvcache.tile_reader.checksums is checks
    cache.evict_device()
    assert cache.holds(cache.load_back(TOKENS), captured.captured[512])
    assert sorted({stream for stream, _ in checks._in_storage}) == sorted(STREAMS)
    # A second server on the same directory does not know these digests, and takes them as they are.
    cache.tree.reset()
    cache.allocator.clear()
    cache.poison()
    assert cache.prefetch(TOKENS).host_hit_length == 512
    assert cache.holds(cache.load_back(TOKENS), captured.captured[512])


@pytest.mark.parametrize("stream", STREAMS)
def test_from_device_to_host(cache, stream):
    engine = cache.controller.l2_transfer_engine
    submit = engine.submit_device_to_host

    def corrupting(transfers):
        done = submit(transfers)
        flip(cache.kvcache.capture_pool.buffers[stream][entry(cache, stream), tile])
        return done

    request = TileRequest(cache, TOKENS, seed=1).admit().extend(600, 512)
    tile = int(request.req.swa_tiles.tiles[512])
    cache.kvcache.tile_writer.checksums._boundaries[tile] = 512
    with mock.patch.object(engine, "submit_device_to_host", corrupting):
        request.finish()
        with pytest.raises(AssertionError, match=changed(stream, "from device to host")):
            cache.settle()


@pytest.mark.parametrize("stream", STREAMS)
def test_in_host_memory(cache, captured, stream):
    cache.settle()
    cache.evict_device()
    page, put = host_page(cache, stream)
    flip(page[entry(cache, stream)])
    put()
    with pytest.raises(AssertionError, match=changed(stream, "in host memory")):
        cache.load_back(TOKENS)


@pytest.mark.parametrize("stream", STREAMS)
def test_from_host_to_device(cache, captured, stream):
    cache.settle()
    cache.evict_device()
    engine = cache.controller.l2_transfer_engine
    submit = engine.submit_host_to_device

    def corrupting(transfers, **kwargs):
        done = submit(transfers, **kwargs)
        flip(cache.kvcache.capture_pool.buffers[stream][entry(cache, stream), 1:].flatten(1)[0:1])
        for tile in range(1, 9):
            flip(cache.kvcache.capture_pool.buffers[stream][entry(cache, stream), tile])
        return done

    with (
        mock.patch.object(engine, "submit_host_to_device", corrupting),
        pytest.raises(AssertionError, match=changed(stream, "from host to device")),
    ):
        cache.load_back(TOKENS)


@pytest.mark.parametrize("stream", STREAMS)
def test_from_storage_to_host(cache, captured, stream, tmp_path, caplog):
    """Bytes with a digest of their own, as another server may store them under the same key.

    The tile is not used, and the scheduler's next check raises what the storage thread found.
    """
    cache.settle()
    (file,) = tmp_path.glob(f"*.{POOLS[stream].value}_tiny*")
    data = bytearray(file.read_bytes())
    layers = len(cache.kvcache.capture_pool.layout.streams[stream].layers)
    data[len(data) // layers * (entry(cache, stream) + 1) - 1] ^= 1
    file.write_bytes(bytes(data))
    (digests,) = tmp_path.glob("*.bitexact_tile_tiny*")
    words = bytearray(digests.read_bytes())
    place = 8 * list(POOLS).index(stream)
    words[place : place + 8] = xxhash.xxh3_64_digest(bytes(data))[::-1]
    digests.write_bytes(bytes(words))
    cache.tree.reset()
    cache.allocator.clear()
    match = cache.prefetch(TOKENS)
    assert (match.device_prefix_len, match.host_hit_length) == (0, 0)
    with pytest.raises(AssertionError, match=changed(stream, "from storage to host")):
        capture_one(cache)


@pytest.mark.parametrize("stream", STREAMS)
def test_at_restore(cache, captured, stream):
    rows = restore.scatter_tables

    def corrupting(table, tile_ids, addresses, found):
        rows(table, tile_ids, addresses, found)
        for tiles, rings in table.streams:
            if tiles is cache.kvcache.capture_pool.buffers[stream]:
                flip(rings.buffers[entry(cache, stream)][addresses[0, -1]])

    reuse = TileRequest(cache, TOKENS, seed=2).admit().extend(700)
    assert reuse.req.prefix_len == 512
    plan = cache.tree.restore_queue.take(layer_wise=False)
    with (
        mock.patch.object(restore, "scatter_tables", corrupting),
        pytest.raises(AssertionError, match=changed(stream, "at restore")),
    ):
        cache.kvcache.tile_reader.restore(plan)


def capture_one(cache, layer=None, *, corrupt=None):
    """Capture boundary 256 of a chunk of 256 in slot 1, all streams; the flat rows are the slot's own."""
    writer, pool = cache.kvcache.tile_writer, cache.kvcache.capture_pool
    owner = RequestTiles()
    plan = CapturePlan((TileCapture(owner, 256, 1, 100, 0, False, False),), torch.tensor([5]))
    generator = torch.Generator().manual_seed(3)
    for stream, layers in writer.layer_index.items():
        width = pool.layout.streams[stream].width
        for layer_id in layers:
            flat = torch.randn(156, width, generator=generator).to(writer.rings[stream].buffers[0].dtype)
            writer._layer_rows(stream, layer_id, flat, plan)


@pytest.mark.parametrize("stream", STREAMS)
def test_at_capture(cache, stream):
    """Rows of the chunk, and rows of the ring before it."""
    capture_one(cache)
    copy = capture.capture_layer
    buffer = cache.kvcache.capture_pool.buffers[stream][entry(cache, stream)]

    def corrupting(tiles, *arguments):
        copy(tiles, *arguments)
        if tiles.data_ptr() == buffer.data_ptr():
            flip(tiles[5])

    with (
        mock.patch.object(capture, "capture_layer", corrupting),
        pytest.raises(AssertionError, match=changed(stream, "at capture", 256)),
    ):
        capture_one(cache)


def test_off_nothing_is_attached(tmp_path):
    with server_context(**file_storage(tmp_path)) as args, TileCache(args, publishes=True) as cache:
        assert cache.kvcache.tile_writer.checksums is cache.kvcache.tile_reader.checksums is None
        assert cache.controller.tile_checksums is None


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(pytest.main([__file__, "-v"]))
