"""Online weight updates: what the old weights computed is never reused from L3 afterwards."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.swa_bitexact import storage_epoch
from sglang.srt.mem_cache.swa_bitexact.model_identity import model_files, startup_weights
from sglang.srt.mem_cache.swa_bitexact.storage_epoch import ExactWeightUpdater
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from kit.tile_cache import TileCache, file_storage, server_context
from kit.tile_pools import PAGE
from kit.update_server import UpdateServer

register_cpu_ci(est_time=40, suite="base-a-test-cpu")


class _UpdateTest(CustomTestCase):
    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch("torch.distributed.barrier"))

    @contextlib.contextmanager
    def server(self, **options):
        # The flag last: the guards of a launch are not the subject.
        flag = envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.override(True)
        with server_context(**file_storage(self.directory)) as args, TileCache(args) as cache, flag:
            yield UpdateServer(cache, **options)

    def tags(self):
        """The model names, tag included, that files in the directory are stored under."""
        return {path.stem[path.stem.index("_tiny") + 1 :] for path in self.directory.iterdir()}


class TestDisk(_UpdateTest):
    def test_old_pages_are_not_found_and_new_ones_have_a_new_name(self):
        with self.server() as server:
            start = startup_weights()
            self.assertEqual(server.tag, server.named(start))
            server.publish()
            old, before = server.tag, self.tags()
            self.assertEqual(before, {f"tiny-{old}"})
            self.assertTrue(server.disk(weight_version="step-2").success)
            self.assertEqual(server.seen, [False])
            self.assertTrue(server.attached)
            second = {"files": model_files("/ckpt/2"), "weight_version": "step-2"}
            self.assertEqual(server.tag, server.named(start, second))
            self.assertEqual(server.found(), 0)
            server.publish()
            self.assertEqual(self.tags(), {f"tiny-{old}", f"tiny-{server.tag}"})
            new = server.tag
        with self.server() as fresh:
            self.assertEqual((fresh.tag, fresh.found()), (old, 2 * PAGE))
            fresh.disk(weight_version="step-2")
            self.assertEqual((fresh.tag, fresh.found()), (new, 2 * PAGE))

    def test_settings_of_the_backend_survive(self):
        with self.server() as server:
            controller, tree = server.cache.controller, server.tree_cache
            tree.prefetch_timeout_base, tree.prefetch_timeout_per_page = 3.0, 0.125
            server.disk()
            self.assertEqual(controller.storage_backend.file_path, str(self.directory))
            self.assertEqual(controller.storage_config.extra_config, {"file_storage_path": str(self.directory)})
            self.assertEqual((tree.prefetch_timeout_base, tree.prefetch_timeout_per_page), (3.0, 0.125))
            self.assertEqual((controller.prefetch_threshold, controller.storage_backend_type), (PAGE, "file"))
            pools = {entry.name for entry in tree.host_pool_group.entries} | {"bitexact_page", "bitexact_tile"}
            self.assertEqual(set(controller.storage_backend.registered_pools), pools)

    def test_an_unnamed_update_is_private_to_one_boot(self):
        def tag(boot_id, result=(True, ""), **fields):
            with self.server(boot_id=boot_id) as server:
                server.result = result
                server.disk(**fields)
                server.flush_cache()
                self.assertTrue(server.attached)
                return server.tag

        first = tag("one")
        # The ranks of one server agree on a boot id, and so on the name.
        self.assertEqual(tag("one"), first)
        self.assertNotEqual(tag("two"), first)
        failed = tag("one", (False, "out of memory"), weight_version="step-2")
        self.assertEqual(failed, first)
        self.assertNotEqual(tag("one", weight_version="step-2"), first)

    def test_a_draft_that_fails_after_the_target_leaves_it_private(self):
        with self.server() as server:
            failing = SimpleNamespace(update_weights_from_disk=lambda *_, **__: (False, "no such file"))
            server.draft_worker = server.weight_updater.draft_worker = SimpleNamespace(
                weight_update_runners=lambda: [("draft", SimpleNamespace(weight_updater=failing))],
                clear_cache_pool=lambda: None,
            )
            start = startup_weights()
            self.assertFalse(server.disk(weight_version="step-2").success)
            self.assertEqual((server.attached, server.tag), (True, server.named(start, {"private": "boot-1"})))

    def test_each_update_has_a_name_of_its_own(self):
        with self.server() as server:
            tags = [server.tag]
            for fields in ({}, {}, {"weight_version": "a"}, {"weight_version": "b"}, {"weight_version": "b"}):
                server.disk(**fields)
                tags.append(server.tag)
            self.assertEqual(len(set(tags)), len(tags))


class TestWithoutFlush(_UpdateTest):
    """The tree mixes both weights: nothing of it may be stored, nor found under a lasting name."""

    def assert_detached_until_flush(self, server, old):
        unflushed = server.tag
        self.assertFalse(server.attached)
        server.publish()
        self.assertEqual((server.found(), self.tags()), (0, {f"tiny-{old}"}))
        server.busy = False
        self.assertTrue(server.flush_cache())
        self.assertTrue(server.attached)
        self.assertEqual(len({old, unflushed, server.tag}), 3)

    def test_not_asked_for(self):
        with self.server() as server:
            server.publish()
            old = server.tag
            self.assertTrue(server.disk(flush_cache=False, weight_version="step-2").success)
            self.assert_detached_until_flush(server, old)

    def test_refused_because_requests_run(self):
        with self.server() as server:
            server.publish()
            old, server.busy = server.tag, True
            self.assertFalse(server.disk(weight_version="step-2").success)
            self.assert_detached_until_flush(server, old)

    def test_attached_by_hand_it_has_a_name_that_ends_with_the_flush(self):
        with self.server() as server:
            old = server.tag
            server.disk(flush_cache=False)
            unflushed = server.tag
            self.assertTrue(server.tree_cache.attach_storage_backend(**server.weight_updater.epoch._detached)[0])
            server.publish()
            self.assertEqual(self.tags(), {f"tiny-{unflushed}"})
            server.flush_cache()
            self.assertEqual((server.attached, server.found()), (True, 0))
            self.assertEqual(len({old, unflushed, server.tag}), 3)

    def test_detached_by_hand_it_stays_detached(self):
        with self.server() as server:
            server.disk(flush_cache=False)
            get_context().override("test", hicache_storage_backend=None)
            server.flush_cache()
            self.assertFalse(server.attached)

    def test_a_flush_alone_changes_nothing(self):
        with self.server() as server:
            tag, backend = server.tag, server.cache.controller.storage_backend
            self.assertTrue(server.flush_cache())
            self.assertEqual((server.tag, server.attached), (tag, True))
            self.assertIs(server.cache.controller.storage_backend, backend)


class TestSession(_UpdateTest):
    def test_storage_waits_for_the_end(self):
        with self.server() as server:
            server.publish()
            updater, old = server.weight_updater, server.tag
            tensors = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], weight_version="v2")
            self.assertTrue(updater.begin_weight_update(BeginWeightUpdateReqInput()).success)
            self.assertFalse(server.attached)
            # Refused: a session is open, and goes on.
            self.assertFalse(updater.begin_weight_update(BeginWeightUpdateReqInput()).success)
            for _ in range(2):
                self.assertTrue(updater.update_weights_from_tensor(tensors).success)
                self.assertFalse(server.attached)
            self.assertTrue(updater.end_weight_update(EndWeightUpdateReqInput()).success)
            self.assertTrue(server.attached)
            self.assertEqual(server.seen, [False] * 4)
            self.assertEqual(
                server.tag, server.named(startup_weights() | {"weight_version": "default"}, {"private": "boot-1"})
            )
            self.assertNotEqual(server.tag, old)
            self.assertEqual(server.found(), 0)

    def test_without_a_flush_in_it_storage_waits_for_one(self):
        with self.server() as server:
            server.weight_updater.begin_weight_update(BeginWeightUpdateReqInput())
            server.weight_updater.end_weight_update(EndWeightUpdateReqInput())
            self.assertEqual((server.attached, server.flush_cache(), server.attached), (False, True, True))

    def test_an_update_outside_a_session_is_refused_and_changes_nothing(self):
        with self.server() as server:
            tag = server.tag
            tensors = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[])
            self.assertFalse(server.weight_updater.update_weights_from_tensor(tensors).success)
            self.assertEqual((server.tag, server.attached), (tag, True))

    def test_ipc(self):
        with self.server() as server:
            self.assertTrue(
                server.weight_updater.update_weights_from_ipc(UpdateWeightsFromIPCReqInput(zmq_handles={})).success
            )
            expected = server.named(startup_weights(), {"private": "boot-1"})
            self.assertEqual((server.seen, server.attached, server.tag), ([False], True, expected))


class TestFailure(_UpdateTest):
    def test_what_cannot_be_attached_stays_detached(self):
        with self.server() as server, self.assertLogs(storage_epoch.logger, "WARNING") as logs:
            with mock.patch.object(server.cache.controller, "attach_storage_backend", side_effect=OSError("disk gone")):
                server.disk()
            self.assertFalse(server.attached)
            (record,) = logs.records
            self.assertEqual(
                record.getMessage(),
                "Bit-exact reuse: weights changed, and storage backend 'file' could not be attached for the new ones: "
                "Failed to attach storage backend 'file': disk gone. It stays detached; send an attach request.",
            )
            server.publish()
            self.assertEqual(self.tags(), set())

    def test_what_cannot_be_detached_is_used_no_more(self):
        with self.server() as server:
            server.publish()
            old, stop = server.tag, server.cache.controller._stop_storage_threads
            threads = mock.patch.object(
                server.cache.controller, "_stop_storage_threads", side_effect=RuntimeError("busy")
            )
            with threads, self.assertLogs(storage_epoch.logger, "ERROR") as logs:
                server.disk(flush_cache=False)
            self.assertIn("not be detached cleanly: Failed to detach HiCache storage backend: ", logs.output[0])
            self.assertFalse(server.attached)
            server.publish()
            self.assertEqual((server.found(), self.tags()), (0, {f"tiny-{old}"}))
            stop()
            server.flush_cache()
            self.assertEqual((server.attached, server.found()), (True, 0))

    def test_under_dp_attention_the_operator_attaches(self):
        with self.server() as server, self.assertLogs(storage_epoch.logger, "WARNING") as logs:
            parallel = SimpleNamespace(attn_dp_size=2)
            with mock.patch.object(storage_epoch, "get_parallel", return_value=parallel):
                server.disk(weight_version="step-2")
            self.assertFalse(server.attached)
            self.assertEqual(
                logs.records[0].getMessage(),
                "Bit-exact reuse: weights changed, so storage was detached. Under DP attention it is not attached "
                "again by itself; send an attach request for backend 'file'.",
            )
            second = {"files": model_files("/ckpt/2"), "weight_version": "step-2"}
            self.assertEqual(server.tag, server.named(startup_weights() | {"weight_version": "default"}, second))


class TestOff(_UpdateTest):
    def test_flag_off_is_the_stock_updater_and_the_stock_flush(self):
        with self.server() as server:
            before, tag = server.cache.controller.storage_backend, server.tag
            with envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.override(False):
                with get_parallel().override(tp_group=SimpleNamespace(cpu_group=None)):
                    Scheduler.init_weight_updater(server)
                self.assertIs(type(server.weight_updater), SchedulerWeightUpdaterManager)
                self.assertTrue(server.disk(weight_version="step-2").success)
            self.assertEqual((server.seen, server.tag), ([True], tag))
            self.assertIs(server.cache.controller.storage_backend, before)

    def test_flag_on_keeps_what_the_stock_updater_was_given(self):
        with self.server() as server:
            updater = server.weight_updater
            self.assertIs(type(updater), ExactWeightUpdater)
            self.assertTrue(updater.tp_worker is server.tp_worker and updater.scheduler is server)

    def test_without_hicache_there_is_nothing_to_name(self):
        with self.server() as server:
            server.tree_cache = SimpleNamespace(reset=lambda: None, enable_storage=False)
            self.assertEqual((server.disk().success, server.seen), (True, [False]))


if __name__ == "__main__":
    unittest.main()
