"""When tiles move between device, host and L3, and under which name they are stored."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from sglang.srt.managers.cache_controller import LayerLoadingEvent
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.swa_bitexact import identity
from sglang.srt.mem_cache.swa_bitexact.host_stack import TileStackStrategy
from sglang.srt.runtime_context import get_context
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from kit.tile_cache import TileCache, file_storage, server_context, tokens_from
from kit.tile_pools import PAGE

register_cpu_ci(est_time=30, suite="base-a-test-cpu")


class TestStorage(CustomTestCase):
    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def _attached(self, **arguments):
        """What attach_storage_backend was given, and the pool entries."""
        with (
            mock.patch.object(HybridCacheController, "attach_storage_backend", autospec=True) as attach,
            server_context(**arguments) as args,
            TileCache(args) as cache,
        ):
            (call,) = attach.call_args_list
            return call.kwargs, cache.tree.host_pool_group.entries

    def test_the_backend_is_attached_as_stock_attaches_it_but_with_all_pools(self):
        given, entries = self._attached(**file_storage(self.directory))
        self.assertEqual(given.pop("host_pools"), entries)
        self.assertEqual(len(entries), 7)
        with mock.patch.object(TileStackStrategy, "matches", return_value=False):
            stock, _ = self._attached(**file_storage(self.directory))
        stock.pop("host_pools")
        self.assertEqual(given, stock)
        self.assertEqual((given["storage_backend"], given["model_name"]), ("file", "tiny"))
        self.assertEqual(given["storage_backend_extra_config"], {"file_storage_path": str(self.directory)})

    def test_an_unknown_backend_fails_as_in_stock(self):
        errors = []
        for matches in (TileStackStrategy.matches, mock.Mock(return_value=False)):
            with (
                mock.patch.object(TileStackStrategy, "matches", matches),
                server_context() as args,
                mock.patch.object(assembler.logger, "exception"),
                self.assertRaises(ValueError) as raised,
            ):
                get_context().override("test", hicache_storage_backend="nowhere")
                TileCache(args)
            errors.append(str(raised.exception))
        self.assertEqual(errors[0], errors[1])
        self.assertIn("nowhere", errors[0])

    def test_keys_carry_the_identity_at_start_and_at_a_later_attach(self):
        asked = []

        def storage_identity(layout, kvcache, *, page_size):
            asked.append((layout, kvcache, page_size))
            return "i-d"

        self.enterContext(mock.patch.object(identity, "storage_identity", storage_identity))
        with server_context(**file_storage(self.directory)) as args, TileCache(args) as cache:
            self.assertEqual(cache.controller.storage_config.model_name, "tiny-i-d")
            self.assertEqual(asked, [(cache.kvcache.capture_pool.layout, cache.kvcache, PAGE)])
            cache.publish_random(tokens_from(1, 1), PAGE, seed=2)
            cache.settle()
            names = [path.name for path in self.directory.iterdir()]
            self.assertEqual((len(names), {name.partition("_tiny")[2] for name in names}), (9, {"-i-d.bin"}))
        with server_context(file_storage_path=str(self.directory)) as args, TileCache(args) as cache:
            self.assertIsNone(cache.controller.storage_backend)
            attached, message = cache.tree.attach_storage_backend("file", served_model_name="tiny")
            self.assertTrue(attached, message)
            self.assertEqual(cache.controller.storage_config.model_name, "tiny-i-d")


class _ForwardStream:
    """Queued work that is done only when another stream waits for it, as late as a GPU may be."""

    def __init__(self):
        self.work = []

    def run(self):
        while self.work:
            self.work.pop(0)()


class _TransferStream:
    def wait_stream(self, stream):
        stream.run()


class TestOrder(CustomTestCase):
    def test_a_tile_is_backed_up_after_its_capture(self):
        tokens = tokens_from(1, 2)
        with server_context() as args, TileCache(args) as cache:
            forward = _ForwardStream()
            cache.controller.write_fence_stream = forward
            cache.controller.l2_transfer_engine.device_to_host_stream = _TransferStream()
            cache.poison()
            late = cache.publish(tokens, 2 * PAGE, lambda tile: forward.work.append(lambda: cache.fill(tile, seed=3)))
            self.assertEqual(len(forward.work), 1)
            cache.settle()
            self.assertEqual(forward.work, [])
            expected = cache.tile(late)
            self.assertEqual(len(set(expected["window"][0].tolist())), 256)
            cache.evict_device()
            self.assertTrue(cache.holds(cache.load_back(tokens), expected))

    def test_the_scheduler_fences_backups_with_the_forward_stream(self):
        source = "".join(inspect.getsource(Scheduler).split())
        self.assertIn("write_fence_stream=(self.tp_worker.model_runner.forward_stream)", source)

    def test_a_layer_is_there_when_its_load_is_done_and_no_later_one(self):
        tokens = tokens_from(1, 2)
        with server_context() as args, TileCache(args) as cache:
            pool = cache.kvcache.capture_pool
            expected = cache.publish_random(tokens, 2 * PAGE, seed=4)
            cache.settle()
            cache.evict_device()
            seen = []

            def complete(_, layer):
                seen.append((layer, [cache.tile(tile) for tile in range(pool.num_tiles + 1)]))

            with mock.patch.object(LayerLoadingEvent, "complete", complete):
                tile_id = cache.tile_id_at(cache.load_back(tokens))
            self.assertEqual([layer for layer, _ in seen], [0, 1, 2, 3])
            for done, tiles in seen:
                for name, stream in pool.layout.streams.items():
                    for index, layer in enumerate(stream.layers):
                        arrived = torch.equal(tiles[tile_id][name][index], expected[name][index])
                        self.assertEqual(arrived, layer <= done, (name, layer, done))

    def test_a_load_evicts_the_missing_tiles_only(self):
        first, *others = (tokens_from(1 + 10_000 * i, 2) for i in range(4))
        with (
            server_context(hicache_swa_host_tile_fraction=0.8) as args,
            TileCache(args, tiles=3) as cache,
        ):
            tile = cache.publish_random(first, 2 * PAGE, seed=1)
            cache.publish_random(others[0], 2 * PAGE, seed=2)
            cache.settle()
            cache.tree.evict(EvictParams(num_tokens=0, swa_num_tokens=PAGE))
            self.assertEqual([cache.match(t).device_prefix_len for t in (first, others[0])], [0, 2 * PAGE])
            for seed, tokens in enumerate(others[1:], 3):
                cache.publish_random(tokens, 2 * PAGE, seed)
            cache.settle()
            # No tile is free, and every request slot: stock counts these, and would evict nothing.
            self.assertEqual((cache.allocator.tiles_available, cache.allocator.swa_available_size()), (0, 4 * PAGE))
            self.assertTrue(cache.holds(cache.load_back(first), tile))
            kept = [cache.match(t).device_prefix_len for t in others]
            self.assertEqual((cache.allocator.tiles_available, kept), (0, [0, 2 * PAGE, 2 * PAGE]))

            evict = cache.tree.host_pool_group.get_entry(PoolName.SWA).device_evict_fn
            evict(PAGE)
            self.assertEqual(cache.allocator.tiles_available, 1)
            evict(PAGE)
            self.assertEqual(cache.allocator.tiles_available, 1)
            evict(2 * PAGE)
            self.assertEqual(cache.allocator.tiles_available, 2)

    def test_a_full_host_lets_its_oldest_tile_go(self):
        first, second, third = (tokens_from(1 + 10_000 * i, 2) for i in range(3))
        with server_context(hicache_swa_host_tile_fraction=0.25) as args, TileCache(args) as cache:
            self.assertEqual(cache.tree.host_pool_group.get_pool(PoolName.SWA).num_host_pages, 2)
            for seed, tokens in enumerate((first, second)):
                cache.publish_random(tokens, 2 * PAGE, seed)
                cache.settle()
            cache.evict_device()
            tile = cache.publish_random(third, 2 * PAGE, seed=2)
            cache.settle()
            cache.evict_device()
            hits = [cache.match(tokens).host_hit_length for tokens in (first, second, third)]
            self.assertEqual(hits, [0, 2 * PAGE, 2 * PAGE])
            self.assertTrue(cache.holds(cache.load_back(third), tile))
            cache.tree.sanity_check()


if __name__ == "__main__":
    unittest.main()
