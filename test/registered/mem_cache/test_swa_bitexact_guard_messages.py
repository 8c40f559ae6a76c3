"""What each start-up guard refuses, alone, and in which words."""

from __future__ import annotations

import dataclasses
import os
import unittest

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")

from sglang.srt.mem_cache.swa_bitexact.guards import GUARDS, STORAGE_BACKENDS, problems
from sglang.srt.mem_cache.swa_bitexact.launch_config import LaunchConfig
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

# A plain launch of DeepSeek-V4 as it resolves on the CPU platform.
PLAIN = LaunchConfig(
    page_size=256,
    pp_size=1,
    attn_cp_size=1,
    dcp_size=1,
    enable_prefill_cp=False,
    enable_two_batch_overlap=False,
    enable_pdmux=False,
    enable_hisparse=False,
    enable_lmcache=False,
    enable_flexkv=False,
    enable_unified_cache_external_linker=False,
    enable_streaming_session=False,
    enable_session_radix_cache=False,
    enable_hierarchical_cache=False,
    disable_radix_cache=False,
    radix_cache_backend=None,
    speculative_algorithm=None,
    disaggregation_mode="null",
    disaggregation_decode_retraction_backup=None,
    hicache_write_policy="write_through",
    hicache_host_memory_mode="cache",
    hicache_storage_backend=None,
    hicache_swa_offload_page_stride=1,
    hicache_swa_device_tile_fraction=0.05,
    hicache_swa_host_tile_fraction=0.5,
    checkpoint="a DeepSeek-V4 checkpoint",
    unified_kv=True,
    unified_kv_fp8=False,
    flashmla_backend="unified_kv_triton",
    online_c128=False,
    prefill_graph="disabled",
    unwritable_storage=None,
)

_RINGS = "no other model keeps its windows in unified_kv rings. Serve DeepSeek-V4."
_PAGED = (
    "must be unified_kv_triton on ROCm for bit-exact reuse: every other path keeps windows in pages, and restores "
    "them without this. Set SGLANG_HACK_FLASHMLA_BACKEND=unified_kv_triton on a ROCm machine."
)
_SHARE = (
    "must be above 0 and below 1 for bit-exact reuse: tiles and compressed rows share this memory, and neither "
    "can do without. Start with"
)
_GRAPH = "a replayed prefill graph skips the Python code that takes windows. Start with --cuda-graph-backend-prefill"
_STORED = (
    "must be one of file, mooncake, mori, nixl for bit-exact reuse: the others do not keep windows and states beside "
    "this model's pages. Start with --hicache-storage-backend file."
)


def _off(argument: str, why: str) -> str:
    return f"--{argument} is on, but must be off for bit-exact reuse: {why}. Remove --{argument}."


def _one(argument: str, found: int, needs: int, why: str) -> str:
    return f"--{argument} is {found}, but must be {needs} for bit-exact reuse: {why}. Start with --{argument} {needs}."


_CASES = [
    (
        {"checkpoint": "a LlamaForCausalLM checkpoint"},
        "--model-path is a LlamaForCausalLM checkpoint, but must be a DeepSeek-V4 checkpoint for bit-exact reuse: "
        + _RINGS,
    ),
    ({"unified_kv": False, "flashmla_backend": "auto"}, f"SGLANG_HACK_FLASHMLA_BACKEND is auto, but {_PAGED}"),
    (
        {"unified_kv": False},
        f"SGLANG_HACK_FLASHMLA_BACKEND is unified_kv_triton without ROCm, but {_PAGED}",
    ),
    (
        {"unified_kv_fp8": True},
        (
            "SGLANG_DSV4_UNIFIED_KV_FP8 is on, but must be off for bit-exact reuse: HiCache mirrors one pool of a "
            "window so far, and fp8 has two. Unset SGLANG_DSV4_UNIFIED_KV_FP8."
        ),
    ),
    (
        {"online_c128": True},
        (
            "SGLANG_OPT_USE_ONLINE_COMPRESS is on, but must be off for bit-exact reuse: a tile has no room for online "
            "c128 state. Unset SGLANG_OPT_USE_ONLINE_COMPRESS."
        ),
    ),
    *(
        (
            {"page_size": size},
            _one("page-size", size, 256, "unified_kv has no other, and c128 blocks must end with a page"),
        )
        for size in (64, 128, 512)
    ),
    (
        {"hicache_swa_offload_page_stride": -1},
        (
            "--hicache-swa-offload-page-stride is -1, but must be 0 or more for bit-exact reuse: it counts pages. "
            "Start with --hicache-swa-offload-page-stride 1."
        ),
    ),
    *(
        (
            {f"hicache_swa_{tier}_tile_fraction": value},
            (
                f"--hicache-swa-{tier}-tile-fraction is {value}, but {_SHARE} "
                f"--hicache-swa-{tier}-tile-fraction {default}."
            ),
        )
        for tier, default in (("device", 0.05), ("host", 0.5))
        for value in (0.0, 1.0, -0.1, 1.5)
    ),
    *(
        (
            {"prefill_graph": backend},
            f"--cuda-graph-backend-prefill is {backend}, but must be disabled for bit-exact reuse: {_GRAPH} disabled.",
        )
        for backend in ("breakable", "full")
    ),
    (
        {"speculative_algorithm": "EAGLE"},
        (
            "--speculative-algorithm is EAGLE, but must be unset for bit-exact reuse: a rejected draft token may be in "
            "a window. Remove --speculative-algorithm."
        ),
    ),
    ({"pp_size": 2}, _one("pp-size", 2, 1, "stages do not agree yet on the tiles that they keep")),
    ({"attn_cp_size": 4}, _one("attn-cp-size", 4, 1, "a rank must see every row of a chunk")),
    ({"enable_prefill_cp": True}, _off("enable-prefill-cp", "a rank must see every row of a chunk")),
    ({"dcp_size": 2}, _one("dcp-size", 2, 1, "a rank's host pages must hold whole tiles")),
    (
        {"enable_two_batch_overlap": True},
        _off("enable-two-batch-overlap", "half a step cannot follow the step's plan"),
    ),
    ({"enable_pdmux": True}, _off("enable-pdmux", "its streams are not ordered with the one that captures")),
    ({"enable_hisparse": True}, _off("enable-hisparse", "it has no unified_kv pools")),
    (
        {"disaggregation_mode": "prefill"},
        (
            "--disaggregation-mode is prefill, but must be null, or decode with stock matching for bit-exact reuse: a "
            "prefill node publishes with its transfers, which tiles do not follow yet. Start without "
            "--disaggregation-mode."
        ),
    ),
    (
        {"disaggregation_decode_retraction_backup": "host_pool"},
        (
            "--disaggregation-decode-retraction-backup is host_pool, but must be unset for bit-exact reuse: its host "
            "pool has no tiles. Remove --disaggregation-decode-retraction-backup."
        ),
    ),
    (
        {"enable_streaming_session": True},
        _off("enable-streaming-session", "a rewound session hands on a slot whose window is gone"),
    ),
    (
        {"enable_session_radix_cache": True},
        _off("enable-session-radix-cache", "sessions evict in an order of their own"),
    ),
    (
        {"radix_cache_backend": "flexkv"},
        (
            "--radix-cache-backend is flexkv, but must be unset for bit-exact reuse: another cache does not know "
            "tiles. Remove --radix-cache-backend."
        ),
    ),
    *(
        ({name: True}, _off(name.replace("_", "-"), "it moves pages without their windows"))
        for name in ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
    ),
    *(
        (
            {"enable_hierarchical_cache": True, "hicache_write_policy": policy},
            (
                f"--hicache-write-policy is {policy}, but must be write_through for bit-exact reuse: a window that is "
                "evicted before it is written cannot be restored. Start with --hicache-write-policy write_through."
            ),
        )
        for policy in ("write_back", "write_through_selective")
    ),
    (
        {"enable_hierarchical_cache": True, "hicache_host_memory_mode": "buffer_only"},
        (
            "--hicache-host-memory-mode is buffer_only, but must be cache for bit-exact reuse: tiles need a host tier "
            "that keeps them. Start with --hicache-host-memory-mode cache."
        ),
    ),
    *(
        (
            {"enable_hierarchical_cache": True, "hicache_storage_backend": name},
            f"--hicache-storage-backend is {name}, but {_STORED}",
        )
        for name in (
            *("aibrix", "dynamic", "eic", "hf3fs", "npu_memcache"),
            *("seaweedfs", "shm", "sim", "simm", "tensorcast"),
        )
    ),
    (
        {"unwritable_storage": "/proc/l3 (No such file or directory)"},
        (
            "--file-storage-path is /proc/l3 (No such file or directory), but must be a directory that can be written "
            "for bit-exact reuse: windows are stored there with their pages. Give another --file-storage-path, or "
            "make this one writable."
        ),
    ),
]


# What is carried: none of it may be refused.
_CARRIED = [
    {},
    {"hicache_swa_offload_page_stride": 0},
    {"hicache_swa_offload_page_stride": 64},
    {"hicache_swa_device_tile_fraction": 0.001, "hicache_swa_host_tile_fraction": 0.999},
    {"disable_radix_cache": True},
    {"disaggregation_decode_retraction_backup": "cpu_tensor"},
    {"enable_hierarchical_cache": True},
    *({"enable_hierarchical_cache": True, "hicache_storage_backend": name} for name in STORAGE_BACKENDS),
    # Without HiCache its settings say nothing.
    {"hicache_write_policy": "write_back", "hicache_host_memory_mode": "buffer_only", "hicache_storage_backend": "eic"},
]


class TestGuards(CustomTestCase):
    def test_each_alone(self):
        for changes, message in _CASES:
            with self.subTest(changes):
                self.assertEqual(problems(dataclasses.replace(PLAIN, **changes)), [message])

    def test_what_is_carried_is_not_refused(self):
        for changes in _CARRIED:
            with self.subTest(changes):
                self.assertEqual(problems(dataclasses.replace(PLAIN, **changes)), [])

    def test_every_guard_has_a_case(self):
        refused = {message.split(" is ")[0] for _, message in _CASES}
        self.assertEqual([g.setting for g in GUARDS if g.setting not in refused], [])
        self.assertEqual(len({g.setting for g in GUARDS}), len(GUARDS))

    def test_all_at_once_in_the_order_of_the_guards(self):
        changes = {"unified_kv": False, "enable_hierarchical_cache": True, "hicache_storage_backend": "eic"}
        changes |= {"hicache_write_policy": "write_back", "hicache_host_memory_mode": "buffer_only"}
        rest = {}
        for case, _ in reversed(_CASES):
            if "checkpoint" not in case and not case.keys() & changes.keys():
                rest |= case
        found = problems(dataclasses.replace(PLAIN, **changes, **rest))
        self.assertEqual([message.split(" is ")[0] for message in found], [g.setting for g in GUARDS[1:]])

    def test_another_model_is_the_only_problem(self):
        for checkpoint in ("a LlamaForCausalLM checkpoint", "a DeepSeek-V4.1 checkpoint"):
            found = problems(dataclasses.replace(PLAIN, checkpoint=checkpoint, unified_kv=False, page_size=1))
            self.assertEqual(
                found,
                [f"--model-path is {checkpoint}, but must be a DeepSeek-V4 checkpoint for bit-exact reuse: " + _RINGS],
            )


if __name__ == "__main__":
    unittest.main()
