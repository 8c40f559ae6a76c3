"""Launches that cannot be bit-exact are refused when arguments are resolved, all reasons at once."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import os
import pickle
import re
import sys
import unittest
import unittest.mock
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.swa_bitexact import guards, launch_config
from sglang.srt.mem_cache.swa_bitexact.guards import FLAG, GUARDS, STORAGE_BACKENDS, check_bit_exact
from sglang.srt.mem_cache.swa_bitexact.launch_config import LaunchConfig
from sglang.srt.mem_cache.swa_bitexact.tile_budget import device_tiles, host_tiles, tiles_per_step
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

_ROOT = Path(__file__).resolve().parents[3]

sys.path[:0] = [str(Path(__file__).parent), str(_ROOT / "test")]
from test_swa_bitexact_guard_messages import PLAIN

from kit.checkpoint import shared_checkpoint

_INCOMPLETE = (
    f"{FLAG} is on, and this build holds the first parts of the series only: it would capture windows, and not "
    f"restore them. Build with all parts, or unset {FLAG}."
)


def _resolved(**arguments) -> ServerArgs:
    args = ServerArgs(model_path=str(shared_checkpoint()), **arguments)
    args.resolve_once()
    return args


class TestResolution(CustomTestCase):
    """The real resolution of server arguments."""

    def setUp(self):
        self.enterContext(envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.override(True))

    def _complete(self):
        self.enterContext(unittest.mock.patch.object(guards, "_is_complete", return_value=True))

    def _message(self, **arguments) -> str:
        with self.assertRaises(ValueError) as caught:
            _resolved(**arguments)
        return str(caught.exception)

    def test_the_first_parts_alone_refuse(self):
        with unittest.mock.patch.object(guards, "_is_complete", return_value=False):
            self.assertEqual(self._message(), _INCOMPLETE)
            self.assertEqual(self._message(enable_hierarchical_cache=True), _INCOMPLETE)

    def test_a_build_is_complete_with_the_last_part(self):
        last = f"{guards.__package__}.coupling"
        self.assertEqual(guards._is_complete(), importlib.util.find_spec(last) is not None)
        with unittest.mock.patch.object(importlib.util, "find_spec", lambda name: None if name == last else name):
            self.assertFalse(guards._is_complete())

    def test_a_fine_launch_passes_a_complete_build(self):
        self._complete()
        for arguments in (
            {},
            {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"},
            {"enable_mixed_chunk": True, "disable_overlap_schedule": True},
        ):
            with self.subTest(arguments), self.assertNoLogs(guards.logger):
                self.assertIsNone(check_bit_exact(_resolved(**arguments)))

    def test_what_the_guards_look_at(self):
        self._complete()
        # The platform has defaults of its own for these.
        fractions = {"hicache_swa_device_tile_fraction": 0.05001, "hicache_swa_host_tile_fraction": 0.50001}
        config = LaunchConfig.of(_resolved(**fractions))
        self.assertEqual(config, dataclasses.replace(PLAIN, **fractions))

    def test_the_model_and_the_gates_are_looked_at(self):
        self._complete()
        args = _resolved()
        hf_config = launch_config.model_config_of(args).hf_config
        for architectures, model_type, expected in (
            (["DeepseekV4ForCausalLM"], "deepseek_v41", "a DeepSeek-V4.1 checkpoint"),
            (["LlamaForCausalLM"], "llama", "a LlamaForCausalLM checkpoint"),
        ):
            with unittest.mock.patch.multiple(hf_config, architectures=architectures, model_type=model_type):
                self.assertEqual(LaunchConfig.of(args).checkpoint, expected)
        for name, field in (("is_unified_kv_triton", "unified_kv"), ("is_unified_kv_fp8", "unified_kv_fp8")):
            for value in (True, False):
                with unittest.mock.patch.object(launch_config, name, lambda value=value: value):
                    self.assertIs(getattr(LaunchConfig.of(args), field), value)
        with envs.SGLANG_OPT_USE_ONLINE_COMPRESS.override(True), envs.SGLANG_HACK_FLASHMLA_BACKEND.override("triton"):
            config = LaunchConfig.of(args)
            self.assertEqual((config.online_c128, config.flashmla_backend), (True, "triton"))

    def test_all_problems_are_one_error(self):
        self.assertEqual(
            self._message(
                enable_hierarchical_cache=True,
                hicache_write_policy="write_back",
                hicache_swa_offload_page_stride=-4,
                cuda_graph_backend_prefill="breakable",
            ),
            f"{FLAG} is on, and this launch cannot be bit-exact:\n"
            "- --hicache-swa-offload-page-stride is -4, but must be 0 or more for bit-exact reuse: it counts pages. "
            "Start with --hicache-swa-offload-page-stride 1.\n"
            "- --cuda-graph-backend-prefill is breakable, but must be disabled for bit-exact reuse: a replayed "
            "prefill graph skips the Python code that takes windows. Start with --cuda-graph-backend-prefill "
            "disabled.\n"
            "- --hicache-write-policy is write_back, but must be write_through for bit-exact reuse: a window that is "
            "evicted before it is written cannot be restored. Start with --hicache-write-policy write_through.\n"
            f"Change these, or unset {FLAG}.",
        )

    def test_one_problem(self):
        message = self._message(enable_session_radix_cache=True)
        self.assertEqual(message.splitlines()[0], f"{FLAG} is on, and this launch cannot be bit-exact:")
        self.assertEqual(message.splitlines()[2:], [f"Change this, or unset {FLAG}."])

    def test_a_worker_does_not_check_again(self):
        self._complete()
        copied = pickle.loads(pickle.dumps(_resolved()))
        with unittest.mock.patch.object(guards, "_is_complete", return_value=False):
            self.assertIsNone(copied.resolve_once())

    def test_no_radix_cache_is_one_warning(self):
        self._complete()
        with self.assertLogs(guards.logger) as logs:
            _resolved(disable_radix_cache=True)
        self.assertEqual(
            logs.output,
            [f"WARNING:{guards.__name__}:{FLAG} has no effect with --disable-radix-cache: no prefix is reused."],
        )

    def test_a_decode_node_is_one_line(self):
        args = SimpleNamespace(disaggregation_mode="decode", pp_size=2, hicache_swa_offload_page_stride=-1)
        with self.assertLogs(guards.logger, "INFO") as logs:
            self.assertIsNone(check_bit_exact(args))
        self.assertEqual(
            logs.output,
            [
                (
                    f"INFO:{guards.__name__}:{FLAG}: this is a PD decode node. Windows and states arrive with each "
                    "request, so it starts with stock prefix matching."
                )
            ],
        )


class TestFlagOff(CustomTestCase):
    def test_nothing_is_refused_and_nothing_differs(self):
        wrong = {"enable_hierarchical_cache": True, "hicache_write_policy": "write_back"}
        wrong |= {"hicache_swa_offload_page_stride": -1, "hicache_swa_device_tile_fraction": 2.0}
        with envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.override(False), self.assertNoLogs(guards.logger):
            self.assertIsNone(check_bit_exact(None))
            off = _resolved().resolved_dict()
            self.assertEqual(_resolved(**wrong).resolved_dict()["hicache_write_policy"], "write_back")
        with (
            envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.override(True),
            unittest.mock.patch.object(guards, "_is_complete", return_value=True),
        ):
            on = _resolved().resolved_dict()
        # Drawn at random by each resolution.
        for resolved in (off, on):
            for name in ("random_seed", "nccl_port"):
                resolved.pop(name, None)
        self.assertEqual(off, on)


class TestStorageBackends(CustomTestCase):
    def test_every_choice_is_decided(self):
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        (action,) = (a for a in parser._actions if "--hicache-storage-backend" in a.option_strings)
        refused = {"aibrix", "dynamic", "eic", "hf3fs", "npu_memcache"}
        refused |= {"seaweedfs", "shm", "sim", "simm", "tensorcast"}
        self.assertEqual(set(action.choices), refused | set(STORAGE_BACKENDS))

    def test_the_chosen_ones_move_side_pools(self):
        for name in STORAGE_BACKENDS:
            entry = StorageBackendFactory._registry[name]
            origin = importlib.util.find_spec(entry["module_path"]).origin
            classes = ast.walk(ast.parse(Path(origin).read_text()))
            (backend,) = (c for c in classes if isinstance(c, ast.ClassDef) and c.name == entry["class_name"])
            methods = {m.name: m for m in backend.body if isinstance(m, ast.FunctionDef)}
            for method in ("batch_exists_v2", "batch_get_v2", "batch_set_v2"):
                self.assertNotIn("NotImplementedError", ast.unparse(methods[method]), name)

    def test_pages_of_this_model_hold_no_bytes(self):
        """hf3fs divides by a page's bytes, and seaweedfs reads their addresses."""
        anchor = LogicalHostPool(512, 256, "page_first")
        self.assertEqual(anchor.get_ksize_per_token(), 0)
        self.assertIsNone(anchor.get_page_buffer_meta([0]))


class TestOperatorsPage(CustomTestCase):
    def setUp(self):
        self.page = (_ROOT / "docs/operating.md").read_text()

    def test_the_table_is_the_guards(self):
        table = self.page.split("<!-- guards -->\n")[1].split("\n\n")[0].splitlines()[2:]
        rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table]
        self.assertEqual(rows, [(f"`{g.setting}`", g.needs, g.why, g.remedy) for g in GUARDS])

    def test_the_worked_sizes(self):
        flash, pro = 6_496_256, 9_224_192
        device = [device_tiles(95e9, 0.05, tile) for tile in (flash, pro)]
        host = [host_tiles(int(95e9), 0.5, tile) for tile in (flash, pro)]
        needed = 256 + 2 * tiles_per_step(8_192, page_size=256, stride=1)
        self.assertEqual((device, host, needed), ([768, 541], [14_623, 10_299], 320))
        for number in (*device, *host, needed):
            self.assertRegex(self.page, rf"\b{re.escape(f'{number:,}')}\b")


if __name__ == "__main__":
    unittest.main()
