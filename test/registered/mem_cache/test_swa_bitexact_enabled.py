"""When the feature is on, what a server without it imports, and storage that is attached later."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
import unittest.mock
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsv4 import unified_kv_gate
from sglang.srt.mem_cache.swa_bitexact.enabled import bit_exact_enabled
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_disagg, get_memory
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from kit.tile_cache import server_context

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


class TestImports(CustomTestCase):
    def test_a_server_without_the_feature_imports_the_switch_only(self):
        code = (
            "import sys; from sglang.srt.managers import scheduler; from sglang.srt.mem_cache import "
            "kv_cache_configurator; from sglang.srt.layers.attention import deepseek_v4_backend_hip_radix;"
            "print(*sorted(m.rsplit('.', 1)[1] for m in sys.modules if '.swa_bitexact' in m))"
        )
        out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
        self.assertEqual(out.stdout.split()[-2:], ["enabled", "swa_bitexact"], out.stderr[-2000:])
        self.assertEqual(len(out.stdout.splitlines()[-1].split()), 2, out.stdout)


class TestEnabled(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        # The platform's hooks look for the functions that the test replaces.
        load_plugins()

    def test_it_takes_the_flag_the_path_and_something_to_reuse(self):
        for flag, unified, mode, without_radix, expected in (
            (True, True, "null", False, True),
            (False, True, "null", False, False),
            (True, False, "null", False, False),
            (True, True, "decode", False, False),
            (True, True, "null", True, False),
        ):
            with (
                self.subTest(flag=flag, unified=unified, mode=mode, without_radix=without_radix),
                envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.override(flag),
                unittest.mock.patch.object(unified_kv_gate, "is_unified_kv_triton", lambda value=unified: value),
                server_context(),
                get_disagg().override(disaggregation_mode=mode),
                get_memory().override(disable_radix_cache=without_radix),
            ):
                self.assertIs(bit_exact_enabled(), expected)


class TestAttachAtRunTime(CustomTestCase):
    """PUT /hicache/storage-backend must not get past what the launch would have refused."""

    def _attach(self, *arguments, flag=True):
        attachment = unittest.mock.Mock()
        attachment.attach.return_value = (True, "attached")
        kvcache = SimpleNamespace(capture_pool="a pool" if flag else None)
        allocator = SimpleNamespace(get_kvcache=lambda: kvcache)
        cache = SimpleNamespace(_storage_attachment=attachment, token_to_kv_pool_allocator=allocator)
        found = UnifiedRadixCache.attach_storage_backend(cache, *arguments)
        self.assertEqual(attachment.attach.called, found[0])
        return found

    def test_other_storage_is_refused_and_nothing_is_attached(self):
        ok, message = self._attach("hf3fs")
        self.assertFalse(ok)
        self.assertEqual(
            message,
            "storage backend hf3fs does not keep windows and states beside this model's pages; bit-exact reuse needs "
            "one of file, mooncake, mori, nixl.",
        )

    def test_another_write_policy_is_refused(self):
        ok, message = self._attach("file", None, None, None, "write_back")
        self.assertFalse(ok)
        self.assertEqual(
            message,
            "write policy write_back evicts windows before they are written; bit-exact reuse needs write_through.",
        )

    def test_what_the_launch_allows_is_attached(self):
        self.assertEqual(self._attach("file", None, None, None, "write_through"), (True, "attached"))
        self.assertEqual(self._attach("nixl"), (True, "attached"))

    def test_without_the_flag_nothing_is_refused(self):
        self.assertEqual(self._attach("hf3fs", None, None, None, "write_back", flag=False), (True, "attached"))


if __name__ == "__main__":
    unittest.main()
