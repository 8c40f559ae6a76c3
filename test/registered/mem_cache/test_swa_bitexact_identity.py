"""The storage identity: what changes it, what must not, and that it keeps pages apart in L3."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import unittest
from array import array
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sglang
import torch
from sglang.srt.managers.cache_controller import storage_model_name
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool, LogicalHostPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_bitexact import guards, identity
from sglang.srt.mem_cache.swa_bitexact.capture_pool import StateTiles
from sglang.srt.mem_cache.swa_bitexact.identity import BACKENDS_WITHOUT_MODEL_IN_KEY, storage_identity
from sglang.srt.mem_cache.swa_bitexact.layout import TileLayout
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_model, get_serving
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from kit.model_directory import CONFIG, INDEX, write_model
from kit.tile_cache import TileCache, file_storage, server_context
from kit.tile_pools import PAGE, RATIOS, small_pool

register_cpu_ci(est_time=30, suite="base-a-test-cpu")


def _with_stream(name, **changes):
    def change(layout, kvcache):
        return dataclasses.replace(layout, **{name: getattr(layout, name)._replace(**changes)}), kvcache

    return change


def _with_pool(path, value):
    """The pool with one attribute changed, in place; a path ends in an attribute."""

    def change(layout, kvcache):
        *owners, name = path.split(".")
        target = kvcache
        for owner in owners:
            target = target[int(owner)] if owner.isdigit() else getattr(target, owner)
        setattr(target, name, value)
        return layout, kvcache

    return change


# Each changes one thing that stored bytes depend on.
_GEOMETRY = {
    "window rows": _with_stream("window", rows=64),
    "window width": _with_stream("window", width=576),
    "window dtype": _with_stream("window", dtype=torch.float16),
    "rope stream": lambda layout, kv: (dataclasses.replace(layout, window_rope=layout.window), kv),
    "layers": _with_stream("window", layers=(0, 1, 2)),
    "state layers": _with_stream("c4_state", layers=(1,)),
    "state width": _with_stream("c4_state", width=1024),
    "state dtype": _with_stream("c4_state", dtype=torch.bfloat16),
    "indexer state dtype": _with_stream("indexer_state", dtype=torch.bfloat16),
    "no state": lambda layout, kv: (dataclasses.replace(layout, c4_state=None), kv),
    "kv dtype": _with_pool("dtype", torch.bfloat16),
    "compress ratios": _with_pool("compression_ratios", [0, 4, 4, 4]),
    "fp8 rows": _with_pool("unified_kv_pool.fp8", True),
    "compressed row dtype": _with_pool("unified_kv_pool.kv_buffer", [torch.zeros(1, 512)]),
    "indexer page": _with_pool("index_pools.4.page_size", 32),
    "indexer dimension": _with_pool("index_pools.4.index_head_dim", 64),
    "indexer fp4": _with_pool("index_pools.4.use_fp4_indexer", True),
    "indexer scales": _with_pool("index_pools.4.uses_aiter_fp4_layout", True),
    "indexer rounding": _with_pool("index_pools.4.index_k_rne", True),
    "indexer row groups": _with_pool("index_pools.4.index_k_page8", True),
}
_SETTINGS = {
    "dtype": "float16",
    "quantization": "fp8",
    "quantization_param_path": "scales.json",
    "modelopt_quant": "fp8",
    "json_model_override_args": '{"rope_theta": 1}',
    "load_format": "dummy",
    "weight_version": "v2",
}
# Rank and size of each group whose ranks hold different bytes.
_SLICES = [{f"{group}_rank": rank, f"{group}_size": 2} for group in ("pp", "attn_cp", "attn_dcp") for rank in (0, 1)]
_ONE_RANK = {
    f"{group}_{what}": int(what == "size") for group in ("pp", "attn_cp", "attn_dcp") for what in ("rank", "size")
}


class TestIdentity(CustomTestCase):
    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.model = write_model(self.directory / "model")
        self.enterContext(server_context())
        get_context().override("test", model_path=str(self.model))

    def identity(self, change=None, *, page_size=PAGE, rows=16 * PAGE, **arguments):
        kvcache = small_pool(rows, RATIOS)
        layout = TileLayout.of_pool(kvcache, PAGE)
        if change is not None:
            layout, kvcache = change(layout, kvcache)
        return storage_identity(layout, kvcache, page_size=page_size, **arguments)

    def test_form(self):
        self.assertRegex(self.identity(), r"\Abitexact1-[0-9a-f]{32}\Z")

    def test_what_stored_bytes_do_not_depend_on(self):
        expected = self.identity()
        self.assertEqual(self.identity(), expected)
        self.assertEqual(self.identity(rows=32 * PAGE), expected)
        self.assertEqual(self.identity(_with_stream("window", ring_rows=4096)), expected)
        self.assertEqual(self.identity(_with_stream("c4_state", ring_rows=16)), expected)
        for rank in range(4):
            parallel = SimpleNamespace(**_ONE_RANK, tp_rank=rank, tp_size=4, attn_tp_rank=rank, attn_tp_size=4)
            with mock.patch.object(identity, "get_parallel", lambda parallel=parallel: parallel):
                self.assertEqual(self.identity(), expected)
        for layout in ("page_first", "page_first_direct"):
            get_context().override("test", hicache_mem_layout=layout)
            self.assertEqual(self.identity(), expected)
        copy = self.directory / "copy"
        shutil.copytree(self.model, copy)
        get_context().override("test", model_path=str(copy))
        self.assertEqual(self.identity(), expected)

    def test_every_ingredient_changes_it(self):
        seen = {"base": self.identity()}
        for name, change in _GEOMETRY.items():
            seen[name] = self.identity(change)
        seen["page size"] = self.identity(page_size=512)
        seen["weights"] = self.identity(weights=({"private": "x-1"},))
        for field, value in _SETTINGS.items():
            with use_setting(**{field: value}):
                seen[field] = self.identity()
        for index, values in enumerate(_SLICES):
            parallel = SimpleNamespace(**_ONE_RANK | values)
            with mock.patch.object(identity, "get_parallel", lambda parallel=parallel: parallel):
                seen[f"slice {index}"] = self.identity()
        for owner, name, value in (
            (identity, "STATE_FORMAT_VERSION", identity.STATE_FORMAT_VERSION + 1),
            (sglang, "__version__", "0.5.24"),
            (identity, "_device_name", lambda device: "AMD Instinct MI355X"),
        ):
            with mock.patch.object(owner, name, value):
                seen[name] = self.identity()
        for name, model in {
            "config": {"config": CONFIG | {"num_hidden_layers": 5}},
            "index": {"index": INDEX | {"metadata": {"total_size": 13}}},
            "shard size": {"shards": (("a", 8), ("b", 5))},
            "no index": {"index": None},
            "shard name": {"index": None, "shards": (("a", 7), ("c", 5))},
        }.items():
            with use_setting(model_path=str(write_model(self.directory / name, **model))):
                seen[name] = self.identity()
        self.assertEqual(len(set(seen.values())), len(seen), seen)


@contextlib.contextmanager
def use_setting(**fields):
    """Set fields of the published configuration for a while."""
    bags = {name: get_serving() if name == "weight_version" else get_model() for name in fields}
    before = {name: getattr(bag, name) for name, bag in bags.items()}
    get_context().override("test", **fields)
    try:
        yield
    finally:
        get_context().override("test", **before)


class TestStoredPage(CustomTestCase):
    def test_its_bytes_do_not_depend_on_the_host_layout(self):
        rows = [torch.arange(k, k + 24, dtype=torch.uint8).view(3, 8) for k in (0, 100)]
        states = [StateTiles(4, SimpleNamespace(kv_score=torch.zeros(12, 2))) for _ in rows]
        pages = {"rows": [], "states": []}
        for layout in ("layer_first", "page_first", "page_first_direct"):
            for name, pool in (
                ("rows", DeepSeekV4PagedHostPool("rows", rows, 8, 3, PAGE, layout=layout, page_aligned_only=True)),
                ("states", DeepSeekV4StateHostPool("states", states, 3, PAGE, layout=layout)),
            ):
                size = pool.get_data_page(0).numel()
                stored = torch.arange(size, dtype=torch.uint8)
                pool.set_from_flat_data_page(2 * PAGE, stored)
                host = [pool.kv_buffer[k][2] for k in range(2)] if layout == "layer_first" else pool.kv_buffer[2]
                pages[name].append(torch.stack([layer.flatten() for layer in host]))
                self.assertTrue(torch.equal(pool.get_data_page(2 * PAGE), stored))
        for stored in pages.values():
            self.assertTrue(all(torch.equal(page, stored[0]) for page in stored[1:]))


class TestPageHashes(CustomTestCase):
    """Salt, extra_key and LoRA are in the page hash, so the identity leaves them out."""

    def test_requests_that_differ_only_in_one_of_them(self):
        def hashes(**fields):
            req = Req("r", "", array("q", range(2 * PAGE)), SamplingParams(), **fields)
            key = RadixKey(req.origin_input_ids, extra_key=req.extra_key, cache_salt=req.cache_salt)
            return tuple(get_storage_hash_str(key, None, page_size=PAGE))

        requests = (
            {},
            {"extra_key": "a"},
            {"extra_key": "b"},
            {"lora_id": "c"},
            {"cache_salt": "a"},
            {"cache_salt": "b"},
        )
        found = [hashes(**fields) for fields in requests]
        self.assertEqual([len(pages) for pages in found], [2] * len(requests))
        self.assertEqual(len({page for pages in found for page in pages}), 2 * len(requests))
        self.assertEqual(hashes(extra_key="a"), hashes(extra_key="a"))


class TestFileStorage(CustomTestCase):
    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def storage(self, tag):
        anchor = LogicalHostPool(PAGE, PAGE)
        anchor.storage_format_tag = tag
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=True,
            enable_storage_metrics=False, is_page_first_layout=False,
            model_name=storage_model_name("tiny", anchor), extra_config={"file_storage_path": str(self.directory)},
        )  # fmt: skip
        return HiCacheFile(config)

    def test_tags_keep_pages_apart(self):
        exact, other, stock = (
            self.storage("bitexact1-" + "a" * 32),
            self.storage("bitexact1-" + "b" * 32),
            self.storage(None),
        )
        stores = (exact, other, stock)
        for number, writer in enumerate(stores):
            self.assertTrue(writer.set("page", torch.full((4,), number, dtype=torch.uint8)))
            self.assertTrue(writer.set(f"only{number}", torch.zeros(4)))
            for reader in stores:
                self.assertEqual(reader.exists(f"only{number}"), reader is writer)
        for number, reader in enumerate(stores):
            found = reader.get("page", torch.empty(4, dtype=torch.uint8))
            self.assertEqual(found.tolist(), [number] * 4)
        self.assertEqual(
            sorted(path.name for path in self.directory.glob("page*")),
            ["page_tiny-bitexact1-" + "a" * 32 + ".bin", "page_tiny-bitexact1-" + "b" * 32 + ".bin", "page_tiny.bin"],
        )

    def test_a_server_finds_its_own_pages_only(self):
        tokens = array("q", range(1, 1 + 2 * PAGE))

        def found(tag, *, write):
            self.enterContext(mock.patch.object(identity, "storage_identity", return_value=tag))
            with server_context(**file_storage(self.directory)) as args, TileCache(args) as cache:
                if not write:
                    return cache.prefetch(tokens).host_hit_length
                cache.publish_random(tokens, 2 * PAGE, seed=1)
                cache.settle()
                return None

        found(None, write=True)
        self.assertEqual(found("bitexact1-1", write=False), 0)
        found("bitexact1-1", write=True)
        self.assertEqual([found(tag, write=False) for tag in ("bitexact1-1", "bitexact1-2")], [2 * PAGE, 0])


class TestBackends(CustomTestCase):
    def test_those_without_the_model_in_their_keys_are_not_offered(self):
        self.assertEqual(set(BACKENDS_WITHOUT_MODEL_IN_KEY) & set(guards.STORAGE_BACKENDS), set())


if __name__ == "__main__":
    unittest.main()
