"""Extension points of the bit-exact reuse series (part 1): declared, inert, and called in order."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import sys
import unittest
import unittest.mock
from array import array
from pathlib import Path
from types import SimpleNamespace

import torch

# The recorded calls run the real model, on the CPU platform of the series.
os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")

from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.decode_hicache_mixin import DecodeHiCacheTransferMixin
from sglang.srt.environ import envs
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchPrefixParams
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

_STEP_HOOKS = ("capture_swa_windows_decode", "capture_compress_state_windows_decode")


class TestSwitches(CustomTestCase):
    def test_environment_flag_is_off_by_default(self):
        self.assertIs(envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.get(), False)
        with envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.override(True):
            self.assertIs(envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.get(), True)

    def test_server_argument(self):
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        for given, expected in (([], 1), (["--hicache-swa-offload-page-stride", "0"], 0)):
            parsed = parser.parse_args(["--model-path", "dummy", *given])
            self.assertEqual(parsed.hicache_swa_offload_page_stride, expected)
        self.assertEqual(ServerArgs(model_path="dummy").hicache_swa_offload_page_stride, 1)


class _BareBackend(AttentionBackend):
    """A backend that knows nothing of the feature."""


class TestBackendHooks(CustomTestCase):
    def test_base_methods_do_nothing(self):
        kv, rope = torch.randn(5, 512), torch.randn(5, 64)
        batch = SimpleNamespace(seq_lens=torch.tensor([5]), rids=["a"])
        before = (kv.clone(), rope.clone(), batch.seq_lens.clone(), dict(vars(batch)))
        for owner in (None, _BareBackend()):
            self.assertIsNone(AttentionBackend.capture_swa_windows(owner, 0, kv, batch))
            self.assertIsNone(AttentionBackend.capture_swa_windows(owner, 0, kv, batch, k_rope=rope))
            for name in _STEP_HOOKS:
                self.assertIsNone(getattr(AttentionBackend, name)(owner, batch))
        self.assertTrue(torch.equal(kv, before[0]) and torch.equal(rope, before[1]))
        self.assertTrue(torch.equal(batch.seq_lens, before[2]))
        self.assertEqual(vars(batch), before[3])

    def test_every_backend_inherits_them(self):
        backend = _BareBackend()
        self.assertEqual(vars(backend), {})
        for name in ("capture_swa_windows", *_STEP_HOOKS):
            self.assertIs(getattr(type(backend), name), getattr(AttentionBackend, name))

    def test_the_docstrings_state_the_ordering_contract(self):
        for name, words in (
            ("capture_swa_windows", ("final", "overwritten", "current stream", "Never called inside a captured graph")),
            ("capture_swa_windows_decode", ("written", "overwrites", "stream", "outside any captured graph")),
            ("capture_compress_state_windows_decode", ("capture_swa_windows_decode", "same contract")),
        ):
            text = " ".join((getattr(AttentionBackend, name).__doc__ or "").split())
            for word in words:
                self.assertIn(word, text, name)


class TestRestoreHook(CustomTestCase):
    def test_base_method_does_nothing(self):
        reqs, index = [SimpleNamespace(rid="a")], torch.tensor([3])
        self.assertIsNone(BasePrefixCache.restore_swa_windows(None, reqs, index))
        self.assertEqual((vars(reqs[0]), index.tolist()), ({"rid": "a"}, [3]))


class _RecordingTree:
    """Answers a match with nothing, and keeps what it was asked."""

    page_size = 256
    tree_core = SimpleNamespace(is_eagle=False)

    def __init__(self):
        self.asked: list[MatchPrefixParams] = []

    def swa_reprefill_tail_tokens(self, req=None):
        return 0

    def supports_mamba(self):
        return False

    def lock(self, node):
        return node

    def match_prefix(self, params):
        self.asked.append(params)
        raise _AskedError


class _AskedError(Exception):
    """The recording tree was asked; what follows is not under test."""


def _request() -> Req:
    tokens = array("q", range(10, 700))
    return Req(rid="r", origin_input_text="", origin_input_ids=tokens, sampling_params=SamplingParams())


class TestForReuse(CustomTestCase):
    def test_the_field_is_false_and_independent(self):
        plain, reuse = MatchPrefixParams(None), MatchPrefixParams(None, for_reuse=True)
        self.assertIs(plain.for_reuse, False)
        changed = {
            field.name
            for field in dataclasses.fields(MatchPrefixParams)
            if getattr(plain, field.name) != getattr(reuse, field.name)
        }
        self.assertEqual(changed, {"for_reuse"})

    def test_a_round_of_a_request_says_what_its_caller_says(self):
        for given, expected in (({}, False), ({"for_reuse": True}, True)):
            tree = _RecordingTree()
            with self.assertRaises(_AskedError):
                _request().init_next_round_input(tree, **given)
            self.assertEqual([params.for_reuse for params in tree.asked], [expected])

    def test_a_decode_node_matches_for_reuse(self):
        tree = _RecordingTree()
        queue = SimpleNamespace(tree_cache=tree, _uses_swa_tail_prealloc=lambda: False)
        with self.assertRaises(_AskedError):
            DecodePreallocQueue._match_prefix_and_lock(queue, _request())
        self.assertEqual([params.for_reuse for params in tree.asked], [True])

    def test_a_decode_node_loads_back_for_reuse(self):
        tree = _RecordingTree()
        match = SimpleNamespace(l3_storage_hit_length=0, decode_prefix_len=256)
        queue = SimpleNamespace(tree_cache=tree)
        with self.assertRaises(_AskedError):
            DecodeHiCacheTransferMixin._try_hicache_queue_load_back(
                queue, SimpleNamespace(prefix_match=match, req=_request())
            )
        self.assertEqual([params.for_reuse for params in tree.asked], [True])

    def test_admission_is_the_only_scheduler_round_for_reuse(self):
        source = inspect.getsource(Scheduler)
        self.assertEqual(source.count("for_reuse=True"), 1)
        admission = inspect.getsource(Scheduler._get_new_batch_prefill_raw)
        self.assertIn("req.init_next_round_input(self.tree_cache, for_reuse=True)", admission)


class TestRecordedCalls(CustomTestCase):
    """A recording backend in a real prefill and decode of the real model, on the CPU platform."""

    @classmethod
    def setUpClass(cls):
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from kit.recorder import Recorder
        from kit.tiny_run import tiny_run

        cls.recorder_class, cls.run_ = Recorder, tiny_run()

    def setUp(self):
        self.run_.clear()
        self.layers = range(len(self.run_.pool.unified_kv_pool.kv_buffer))
        self.recorder = self.recorder_class(self.run_, self, _STEP_HOOKS)

    def names(self):
        return [event[0] for event in self.recorder.events]

    def test_prefill(self):
        one, two = self.run_.sequence(list(range(6, 306))), self.run_.sequence(list(range(306, 6, -1)))
        self.run_.extend((one, 300), (two, 140))
        slots = [one.slot, two.slot]
        per_layer = ["capture", "store_swa_into_unified"]
        expected = ["clear_c4_req_states", "restore", *per_layer * len(self.layers), *_STEP_HOOKS]
        self.assertEqual(self.names(), expected)
        self.assertEqual(self.recorder.events[1], ("restore", slots, slots))
        captures = [event for event in self.recorder.events if event[0] == "capture"]
        self.assertEqual(captures, [("capture", layer, (440, 512), torch.bfloat16, None) for layer in self.layers])

    def test_prefill_rows_are_final_and_the_ring_still_old(self):
        sequence = self.run_.sequence(list(range(6, 506)))
        self.run_.extend((sequence, 300))
        before = [self.recorder.ring(layer) for layer in self.layers]
        self.recorder.events.clear(), self.recorder.rings.clear(), self.recorder.flat.clear()
        self.run_.extend((sequence, 480))
        # A later chunk of a held slot: asked again, nothing cleared.
        self.assertEqual(self.names()[:2], ["restore", "capture"])
        for layer in self.layers:
            self.assertTrue(torch.equal(self.recorder.rings[layer], before[layer]))
            rows = self.run_.ring_rows(sequence, range(480 - 128, 480))[layer]
            self.assertTrue(torch.equal(self.recorder.flat[layer][-128:], rows))

    def test_prefill_ends_with_the_hooks_of_the_step(self):
        """Then the rings hold the last rows of every chunk."""
        sequence = self.run_.sequence(list(range(6, 506)))
        self.run_.extend((sequence, 300))
        written = [self.recorder.ring(layer) for layer in self.layers]
        for seen in self.recorder.rings[-2:]:
            for layer in self.layers:
                self.assertTrue(torch.equal(seen[layer], written[layer]))
        rows = self.run_.ring_rows(sequence, range(300 - 128, 300))
        for layer in self.layers:
            self.assertTrue(torch.equal(rows[layer], self.recorder.flat[layer][-128:]))

    def _decode_twice(self):
        one, two = self.run_.sequence(list(range(6, 306))), self.run_.sequence(list(range(306, 6, -1)))
        self.run_.extend((one, 256), (two, 30))
        self.recorder.events.clear(), self.recorder.rings.clear()
        rows = []
        for _ in range(2):
            self.run_.decode(one, two)
            rows.append([self.recorder.ring(layer) for layer in self.layers])
        return rows

    def _assert_step_hooks_saw(self, rows):
        expected = [(name, [256 + step, 30 + step]) for step in (1, 2) for name in _STEP_HOOKS]
        self.assertEqual([event for event in self.recorder.events if event[0] in _STEP_HOOKS], expected)
        # At each call the rings are those at the end of the step: written, and not yet overwritten.
        for call, rings in enumerate(self.recorder.rings):
            for layer in self.layers:
                self.assertTrue(torch.equal(rings[layer], rows[call // 2][layer]))

    def test_decode_on_the_eager_path(self):
        rows = self._decode_twice()
        self.assertFalse(torch.equal(rows[0][0], rows[1][0]))
        self._assert_step_hooks_saw(rows)

    def test_decode_on_the_graph_path(self):
        """The early return of a replayed graph is behind the hooks too."""
        runner = self.run_.runner
        replayed = []

        def execute(forward_batch, pp_proxy_tensors=None):
            replayed.append(forward_batch.batch_size)
            self.assertEqual(len(self.recorder.events), 2 * (len(replayed) - 1))
            return runner.eager_runner.execute(forward_batch, pp_proxy_tensors=pp_proxy_tensors)

        graph = SimpleNamespace(can_run_graph=lambda batch: True, execute=execute, bs=2)
        self.enterContext(unittest.mock.patch.object(runner, "decode_cuda_graph_runner", graph))
        self._assert_step_hooks_saw(self._decode_twice())
        self.assertEqual(replayed, [2, 2])

    def test_a_draft_worker_is_not_asked(self):
        self.enterContext(unittest.mock.patch.object(self.run_.runner, "is_draft_worker", True))
        self._decode_twice()
        self.assertEqual(self.names(), [])


if __name__ == "__main__":
    unittest.main()
