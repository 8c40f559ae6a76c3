"""Tiles on the host and in L3: the real tree, controller, host pools and file storage."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.swa_bitexact import host_stack
from sglang.srt.mem_cache.swa_bitexact.enabled import swa_allocator_class
from sglang.srt.mem_cache.swa_bitexact.host_stack import TileStackStrategy, register_tile_stack
from sglang.srt.mem_cache.swa_bitexact.launch_error import LaunchError
from sglang.srt.mem_cache.swa_bitexact.layout import TileLayout
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from kit.copy_kernels import kernel_copies
from kit.tile_cache import TileCache, file_storage, server_context, stored_files, tokens_from
from kit.tile_pools import PAGE, RATIOS, small_pool

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

_COMPONENTS = {ComponentType.FULL, ComponentType.SWA}
_STATES = (PoolName.DEEPSEEK_V4_C4_STATE, PoolName.DEEPSEEK_V4_C4_INDEXER_STATE)

# Six pages of compressed rows; the tile is one page of the others.
_FILES = {
    "kv": 6,
    "deepseek_v4_c4": 6,
    "deepseek_v4_c4_indexer": 6,
    "deepseek_v4_c128": 6,
    "swa": 1,
    "deepseek_v4_c4_state": 1,
    "deepseek_v4_c4_indexer_state": 1,
    "bitexact_page": 6,
    "bitexact_tile": 1,
}


class TestTiers(CustomTestCase):
    def assert_survives_every_tier(self, core, io, layout, files, ratios=RATIOS, **arguments):
        """A tile at 3 of 6 pages: device, host, L3, each time all of its bytes and nothing beyond it."""
        tokens = tokens_from(1, 6)
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            arguments.update(hicache_mem_layout=layout, hicache_io_backend=io, **file_storage(directory))
            args = self.enterContext(server_context(**arguments))
            with TileCache(args, core=core, ratios=ratios) as cache:
                self.assertEqual(type(cache.tree.tree_core).__name__.startswith("Rust"), core == "rust")
                self.assertEqual((cache.controller.io_backend, cache.tree.host_pool_group.layout), (io, layout))
                expected = cache.publish_random(tokens, 3 * PAGE, seed=1)
                rest = cache.allocator.full_attn_allocator.alloc(3 * PAGE)
                rows = torch.cat((cache.tree.path_device_indices(cache.match(tokens).last_device_node), rest))
                cache.insert(tokens, rows, floor=6 * PAGE, known=3 * PAGE)
                cache.settle()
                self.assertEqual(cache.match(tokens).device_prefix_len, 3 * PAGE)
                self.assertEqual(dict(stored_files(directory)), files)

                cache.evict_device()
                self.assertEqual(cache.allocator.tiles_available, 8)
                match = cache.match(tokens)
                self.assertEqual((match.device_prefix_len, match.host_hit_length), (0, 3 * PAGE))
                match = cache.load_back(tokens)
                self.assertEqual(match.device_prefix_len, 3 * PAGE)
                self.assertTrue(cache.holds(match, expected))
                cache.tree.sanity_check()
            with TileCache(args, core=core, ratios=ratios) as fresh:
                fresh.poison()
                match = fresh.prefetch(tokens)
                self.assertEqual((match.device_prefix_len, match.host_hit_length), (0, 3 * PAGE))
                match = fresh.load_back(tokens)
                self.assertEqual(match.device_prefix_len, 3 * PAGE)
                self.assertTrue(fresh.holds(match, expected))
                fresh.tree.sanity_check()

    def test_direct_copies(self):
        for core in ("python", "rust"):
            for layout in ("layer_first", "page_first_direct"):
                with self.subTest(core=core, layout=layout):
                    self.assert_survives_every_tier(core, "direct", layout, _FILES)

    def test_kernel_copies(self):
        """Their addressing: the kernels themselves need a GPU. page_first exists with them only."""
        self.enterContext(kernel_copies())
        for core, layout in (("python", "layer_first"), ("rust", "page_first")):
            with self.subTest(core=core, layout=layout):
                self.assert_survives_every_tier(core, "kernel", layout, _FILES)

    def test_without_overlapping_layers_there_is_no_state(self):
        files = {"kv": 6, "deepseek_v4_c128": 6, "swa": 1, "bitexact_page": 6, "bitexact_tile": 1}
        # So little is compressed here that half of HiCache's memory is less than a tile.
        self.assert_survives_every_tier(
            "rust", "direct", "layer_first", files, ratios=(0, 128, 0, 128), hicache_swa_host_tile_fraction=0.95
        )


class TestStack(CustomTestCase):
    def test_pools_and_sidecars(self):
        with server_context() as args, TileCache(args) as cache:
            group = cache.tree.host_pool_group
            own = ("kv", "deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128")
            self.assertEqual([entry.name for entry in group.entries], [*own, PoolName.SWA, *_STATES])
            riding = [spec for spec in cache.tree.sidecar_pool_specs if spec.indices_from_pool == PoolName.SWA]
            self.assertEqual(
                [(spec.pool_name, spec.hit_policy) for spec in riding],
                [(name, PoolHitPolicy.TRAILING_PAGES) for name in _STATES],
            )
            windows = group.get_pool(PoolName.SWA)
            self.assertIs(cache.tree.components[ComponentType.SWA]._swa_kv_pool_host, windows)
            self.assertTrue(windows.page_aligned_only)
            self.assertTrue(cache.tree.tree_core.has_swa_host_pool)
            self.assertIsNone(cache.controller.storage_backend)
            # 32 pages of (2 x 65,536 + 2 x 8,448 + 2,048) B, and as many bytes of tiles.
            tile = 4 * 131_072 + 2 * 32_768 + 2 * 8_192
            self.assertEqual(cache.kvcache.capture_pool.layout.nbytes, tile)
            count = 32 * 150_016 // tile
            self.assertEqual((count, windows.available_size()), (7, 7 * PAGE))
            self.assertEqual([group.get_pool(name).num_host_pages for name in _STATES], [7, 7])

    def test_few_host_tiles_are_warned_of(self):
        with server_context() as args, self.assertLogs(host_stack.logger) as logs, TileCache(args):
            pass
        few = (
            "Bit-exact reuse: 7 host tiles of 0.58 MiB (0.00 GB per rank, 1 ranks on this host, page stride 1) "
            "are few beside 8 tiles on the device: most of what leaves the device will have left the host too. "
            "Raise --hicache-swa-host-tile-fraction (0.5) or --hicache-ratio."
        )
        lines = [(record.levelname, record.getMessage()) for record in logs.records]
        self.assertEqual(lines, [("WARNING", few)])

    def test_the_tile_fraction_counts(self):
        for fraction, tiles in ((0.2, 1), (0.75, 23)):
            with server_context(hicache_swa_host_tile_fraction=fraction) as args, TileCache(args) as cache:
                self.assertEqual(cache.tree.host_pool_group.get_pool(PoolName.SWA).num_host_pages, tiles)

    def test_pools_that_do_not_fit_are_refused_before_they_are_made(self):
        self.enterContext(mock.patch.object(host_stack, "available_host_memory_bytes", return_value=4_000_000))
        for size, wanted in (({}, "0.01"), ({"hicache_size": 100}, "200.00"), ({"hicache_ratio": 1e6}, "[0-9]{4}[.]")):
            with (
                self.subTest(size),
                server_context(**size) as args,
                self.assertRaisesRegex(LaunchError, f"tiles want {wanted}.*, but 0.00 GB are free.*--hicache-ratio"),
            ):
                TileCache(args)

    def test_tiles_that_do_not_fit_beside_the_rows_are_refused(self):
        # 0.9 of 4 MB is less than 7 tiles of 606,208 B.
        free = [1 << 40, 4_000_000]
        self.enterContext(mock.patch.object(host_stack, "available_host_memory_bytes", side_effect=free))
        with server_context() as args, self.assertRaisesRegex(LaunchError, "^7 host tiles .* do not fit"):
            TileCache(args)

    def test_fp8_is_refused_before_anything_is_built(self):
        with server_context():
            layout = TileLayout.of_pool(small_pool(16 * PAGE, RATIOS), PAGE)
            packed = dataclasses.replace(layout, window_rope=layout.window)
            kvcache = SimpleNamespace(capture_pool=SimpleNamespace(layout=packed))
            with self.assertRaisesRegex(NotImplementedError, "found fp8 rings.*Unset SGLANG_DSV4_UNIFIED_KV_FP8"):
                TileStackStrategy().build(cache=None, kvcache=kvcache, params=None)

    def test_only_a_capture_pool_takes_the_strategy(self):
        with server_context():
            kvcache = small_pool(16 * PAGE, RATIOS)
            register_tile_stack(), register_tile_stack()
            ours = [s for s in assembler._STRATEGIES if isinstance(s, TileStackStrategy)]
            self.assertEqual(len(ours), 1)
            self.assertIs(type(assembler._select_strategy(kvcache, _COMPONENTS)), assembler._DeepSeekV4Strategy)
            kvcache.capture_pool = object()
            self.assertIs(assembler._select_strategy(kvcache, _COMPONENTS), ours[0])
            full_only = assembler._select_strategy(kvcache, {ComponentType.FULL})
            self.assertIs(type(full_only), assembler._DeepSeekV4Strategy)

    def test_the_allocator_choice_registers_it(self):
        kvcache = SimpleNamespace(swa_req_ring_size=128)
        with server_context(), mock.patch.object(assembler, "_STRATEGIES", []) as strategies:
            swa_allocator_class(SWATokenToKVPoolAllocator, kvcache)
            self.assertEqual(strategies, [])
            with envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.override(True):
                swa_allocator_class(SWATokenToKVPoolAllocator, kvcache)
            self.assertEqual([type(s) for s in strategies], [TileStackStrategy])

    def test_buffers_that_the_kernels_cannot_address(self):
        rows = torch.zeros(4, 64, dtype=torch.uint8)
        host_stack._check_copyable([rows], 64)
        with self.assertRaisesRegex(AssertionError, "is 24 B, no multiple of 16"):
            host_stack._check_copyable([rows], 24)
        for wrong in (rows[:, :32], rows.flatten()[8:200]):
            with self.assertRaisesRegex(AssertionError, "expected contiguous, at a multiple of 16"):
                host_stack._check_copyable([wrong], 32)


if __name__ == "__main__":
    unittest.main()
