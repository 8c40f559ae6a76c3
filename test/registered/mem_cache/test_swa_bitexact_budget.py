"""How many tiles fit on the host, what is refused, and HiCache's automatic size with tiles."""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sglang.srt.mem_cache import hicache_auto_size
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.swa_bitexact.host_stack import _STATE_POOLS, bytes_per_ratio
from sglang.srt.mem_cache.swa_bitexact.tile_budget import check_host_tiles, host_bytes_per_ratio, host_tiles
from sglang.srt.runtime_context import get_memory
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from kit.tile_cache import TileCache, server_context
from kit.tile_pools import RATIOS, small_pool

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

_FLASH = 6_496_256
_TILES = (PoolName.SWA, *(name for _, name in _STATE_POOLS))


def _check(tiles, **changes):
    """A V4-Flash server on 8 ranks of a host with 512 GB free."""
    sizes = {
        "tile_bytes": _FLASH,
        "full_bytes": 50 * 10**9,
        "fraction": 0.5,
        "device_tiles": 768,
        "available_bytes": 512 * 10**9,
        "ranks": 8,
        "stride": 4,
    }
    return check_host_tiles(tiles, **(sizes | changes))


class TestHostTiles(CustomTestCase):
    def test_they_are_a_share_of_the_sum(self):
        self.assertEqual(host_tiles(150 * 10**9, 0.5, _FLASH), 23_090)
        self.assertEqual(host_tiles(300, 0.25, 10), 10)
        self.assertEqual(host_tiles(299, 0.25, 10), 9)
        self.assertEqual(host_tiles(300, 0.0, 10), 0)

    def test_bytes_for_each_unit_of_ratio(self):
        self.assertEqual(host_bytes_per_ratio(75 * 10**9, 0.5), 150 * 10**9)
        self.assertEqual(host_bytes_per_ratio(300, 0.25), 400)
        self.assertEqual(host_bytes_per_ratio(300, 0.0), 300)

    def test_enough_tiles_that_fit_pass_without_a_word(self):
        # 1,536 are twice the device's; 2,462 are the last below 16 GB.
        for tiles in (1_536, 2_000, 2_462):
            self.assertEqual(_check(tiles), ())

    def test_what_does_not_fit_is_refused(self):
        self.assertEqual(len(_check(8_866)), 1)
        with self.assertRaises(ValueError) as raised:
            _check(8_867)
        self.assertEqual(
            str(raised.exception),
            "8867 host tiles of 6.20 MiB (57.60 GB per rank, 8 ranks on this host, page stride 4) do not fit: "
            "512.00 GB of host memory are free, of which a rank may take 57.60 GB. Lower "
            "--hicache-swa-host-tile-fraction (0.5) or --hicache-ratio, or run fewer ranks on this host; with "
            "fewer tiles, a larger --hicache-swa-offload-page-stride spreads them over longer prefixes.",
        )
        self.assertEqual(len(_check(8_867, ranks=7)), 1)

    def test_no_tile_at_all_is_refused(self):
        with self.assertRaises(ValueError) as raised:
            _check(0, full_bytes=5 * 10**6)
        self.assertEqual(
            str(raised.exception),
            "0 host tiles of 6.20 MiB (0.00 GB per rank, 8 ranks on this host, page stride 4): no window could "
            "reach the host. Beside 0.01 GB of compressed rows, --hicache-swa-host-tile-fraction 0.5 leaves less "
            "than one tile. Raise it, or raise --hicache-ratio.",
        )

    def test_a_slow_start_is_warned_of(self):
        (warning,) = _check(2_463)
        self.assertEqual(
            warning,
            "2463 host tiles of 6.20 MiB (16.00 GB per rank, 8 ranks on this host, page stride 4) are pinned at "
            "start-up, which takes a while. Lower --hicache-swa-host-tile-fraction (0.5) to start faster.",
        )

    def test_few_tiles_are_warned_of(self):
        (warning,) = _check(1_535)
        self.assertEqual(
            warning,
            "1535 host tiles of 6.20 MiB (9.97 GB per rank, 8 ranks on this host, page stride 4) are few beside "
            "768 tiles on the device: most of what leaves the device will have left the host too. Raise "
            "--hicache-swa-host-tile-fraction (0.5) or --hicache-ratio.",
        )
        self.assertEqual(len(_check(2_463, device_tiles=2_000)), 2)


class TestAutoSize(CustomTestCase):
    def test_it_knows_what_the_pools_will_take(self):
        for ratios in (RATIOS, (4, 4, 0), (128, 0, 128)):
            with (
                self.subTest(ratios=ratios),
                server_context(hicache_ratio=1.0, hicache_swa_host_tile_fraction=0.98) as args,
                TileCache(args, ratios=ratios) as cache,
            ):
                taken = dict.fromkeys((False, True), 0)
                for entry in cache.tree.host_pool_group.entries:
                    if (buffers := entry.host_pool.kv_buffer) is not None:
                        buffers = buffers if isinstance(buffers, list) else [buffers]
                        taken[entry.name in _TILES] += sum(buffer.nbytes for buffer in buffers)
                tile = cache.kvcache.capture_pool.layout.nbytes
                expected = host_bytes_per_ratio(taken[False], 0.98)
                self.assertEqual(bytes_per_ratio(cache.params), expected)
                self.assertEqual((expected - taken[False]) // tile * tile, taken[True])

    def test_the_ratio_is_reduced_until_rows_and_tiles_fit(self):
        """Half of 20 MB for 16 pages of 150,016 B and their tiles: 9.5 MB without the slack."""
        with server_context() as args, TileCache(args) as cache:
            memory = get_memory()
            self.enterContext(memory.override(hicache_host_memory_fraction=0.5, hicache_ratio=4.0))
            self.enterContext(mock.patch.object(hicache_auto_size, "host_memory_budget_bytes", return_value=20_000_000))
            # Other tests of this process may have built groups, which this context does not know.
            self.enterContext(mock.patch.object(torch.distributed, "is_initialized", return_value=False))
            with hicache_auto_size.auto_size_hicache(cache.params, None, enabled=True):
                self.assertEqual(memory.hicache_ratio, 10_000_000 * (1 - 0.05) / (2 * 16 * 150_016))

    def test_without_a_capture_pool_stock_refuses_as_ever(self):
        with server_context():
            kvcache = small_pool(4096, RATIOS)
            allocator = SimpleNamespace(get_kvcache=lambda: kvcache)
            with self.assertRaises(ValueError) as raised:
                hicache_auto_size._estimate_hicache_bytes(SimpleNamespace(token_to_kv_pool_allocator=allocator), None)
        self.assertEqual(
            str(raised.exception),
            "HiCache auto-sizing does not support DeepSeekV4TokenToKVPool; "
            "set --hicache-ratio or --hicache-size explicitly.",
        )


if __name__ == "__main__":
    unittest.main()
