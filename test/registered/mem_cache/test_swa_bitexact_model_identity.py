"""Which weights a server computes with, named without reading any."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import huggingface_hub
import xxhash
from sglang.srt.mem_cache.swa_bitexact.model_identity import canonical_digest, model_files
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from kit.model_directory import CONFIG, INDEX, write_model

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


class TestModelFiles(CustomTestCase):
    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.model = write_model(self.directory / "model")

    def test_digest_is_of_canonical_json(self):
        expected = xxhash.xxh3_128(b'{"a":[2,null],"b":1}').hexdigest()
        self.assertEqual(canonical_digest({"b": 1, "a": [2, None]}), expected)
        self.assertEqual(len(expected), 32)

    def test_exact_contents(self):
        digest = xxhash.xxh3_128(b'{"model_type":"deepseek_v4","num_hidden_layers":4}').hexdigest()
        self.assertEqual(
            model_files(str(self.model)),
            {
                "configs": {"config.json": digest, "hf_quant_config.json": None},
                "index": canonical_digest(INDEX),
                "shards": {"a.safetensors": 7, "b.safetensors": 5},
            },
        )

    def test_copies_of_one_model_are_equal(self):
        expected = model_files(str(self.model))
        copy = self.directory / "elsewhere" / "deep" / "copy"
        shutil.copytree(self.model, copy)
        self.assertEqual(model_files(str(copy)), expected)
        saved_again = dict(reversed(CONFIG.items())) | {"_name_or_path": "/nfs/x", "transformers_version": "5.2"}
        (copy / "config.json").write_text(json.dumps(saved_again, indent=4))
        (copy / "model.safetensors.index.json").write_text(json.dumps(dict(reversed(INDEX.items())), indent=2))
        for name in ("README.md", "tokenizer.json", "unused.safetensors", "weights.bin"):
            (copy / name).write_text("not the model's")
        self.assertEqual(model_files(str(copy)), expected)

    def test_without_an_index_every_shard_of_the_loaded_kind_counts(self):
        model = write_model(self.directory / "single", index=None, shards=(("model", 9),))
        (model / "pytorch_model.bin").write_bytes(bytes(3))
        self.assertEqual(model_files(str(model))["shards"], {"model.safetensors": 9})
        (model / "more.safetensors").write_bytes(bytes(2))
        self.assertEqual(model_files(str(model))["shards"], {"model.safetensors": 9, "more.safetensors": 2})

    def test_a_shard_that_the_index_names_may_be_missing(self):
        (self.model / "b.safetensors").unlink()
        self.assertEqual(model_files(str(self.model))["shards"], {"a.safetensors": 7, "b.safetensors": None})

    def test_one_file_a_hub_id_and_an_address(self):
        self.assertEqual(model_files(str(self.model / "a.safetensors")), {"shards": {"a.safetensors": 7}})
        cache = self.directory / "hub" / "models--deepseek-ai--DeepSeek-V4"
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text("c0ffee")
        shutil.copytree(self.model, cache / "snapshots" / "c0ffee")
        with mock.patch.object(huggingface_hub.constants, "HF_HUB_CACHE", str(self.directory / "hub")):
            self.assertEqual(model_files("deepseek-ai/DeepSeek-V4"), model_files(str(self.model)))
            self.assertEqual(
                model_files("deepseek-ai/DeepSeek-V4", "v2"),
                {"address": "deepseek-ai/DeepSeek-V4", "revision": "v2"},
            )
        self.assertEqual(model_files("s3://models/v4"), {"address": "s3://models/v4", "revision": None})

    def test_no_shard_is_opened(self):
        (self.model / "a.safetensors").chmod(0)
        with (
            mock.patch.object(Path, "open", side_effect=AssertionError),
            mock.patch.object(Path, "read_bytes", autospec=True, side_effect=lambda path: _only_json(path)),
        ):
            self.assertEqual(model_files(str(self.model))["shards"], {"a.safetensors": 7, "b.safetensors": 5})


def _only_json(path: Path) -> bytes:
    assert path.suffix == ".json", path
    with open(path, "rb") as file:
        return file.read()


if __name__ == "__main__":
    unittest.main()
