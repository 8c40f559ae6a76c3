"""Which weights a server computes with: named from small files, never by reading shards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xxhash
from sglang.srt.runtime_context import get_model, get_serving
from sglang.srt.utils.common import find_local_repo_dir

_CONFIGS = ("config.json", "hf_quant_config.json")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# As the loader looks for them: the first kind that is there is the one that is loaded.
_SHARD_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Written by whoever saved the model; two copies of one model differ in them.
_VOLATILE_KEYS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})


def canonical_digest(value: Any) -> str:
    """32 hex digits of ``value``, which is JSON data; the order of keys does not matter.

    Raises:
        TypeError: ``value`` has something in it that JSON does not know.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()


def model_files(path: str, revision: str | None = None) -> dict[str, Any]:
    """What is known of the weights in ``path``: a directory, one file, or a hub id.

    Directory: digests of the configuration, without what only says who saved it, and of the
    index file, and name and size of every shard (those that the index names, else all). Its
    own path and any other file are left out, so copies of one model are equal. One file: its
    name and size. A hub id: the directory of its local snapshot. Anything else (a remote
    store) is named by its address.

    No shard is read: weights that were edited in place, with the size and the index as
    before, look the same. --weight-version tells them apart.

    Example, a directory with config.json, an index that names a.safetensors and b.safetensors:
        {"configs": {"config.json": "6f..", "hf_quant_config.json": None}, "index": "d1..",
         "shards": {"a.safetensors": 4_961_230_112, "b.safetensors": 312_004}}
    """
    found = Path(path)
    if found.is_file():
        return {"shards": {found.name: found.stat().st_size}}
    if not found.is_dir():
        snapshot = None if "://" in path else find_local_repo_dir(path, revision)
        if snapshot is None:
            return {"address": path, "revision": revision}
        found = Path(snapshot)
    configs = {name: _digest_of(found / name, _VOLATILE_KEYS) for name in _CONFIGS}
    for name in _INDEXES:
        if (found / name).is_file():
            index = json.loads((found / name).read_bytes())
            return {
                "configs": configs,
                "index": canonical_digest(index),
                "shards": _sizes(found, set(index.get("weight_map", {}).values())),
            }
    return {"configs": configs, "index": None, "shards": _sizes(found, _shards(found))}


def startup_weights() -> dict[str, Any]:
    """The weights that this server was started with, as JSON data; equal on every rank."""
    model = get_model()
    return {
        "files": model_files(model.model_path, model.revision),
        "dummy": model.load_format == "dummy",
        "weight_version": get_serving().weight_version,
    }


def _digest_of(file: Path, without: frozenset[str]) -> str | None:
    if not file.is_file():
        return None
    content = json.loads(file.read_bytes())
    return canonical_digest({k: v for k, v in content.items() if k not in without})


def _shards(directory: Path) -> set[str]:
    names = os.listdir(directory)
    for suffix in _SHARD_SUFFIXES:
        shards = {name for name in names if name.endswith(suffix)}
        if shards:
            return shards
    return set()


def _sizes(directory: Path, names: set[str]) -> dict[str, int | None]:
    return {
        name: (directory / name).stat().st_size
        if (directory / name).is_file()
        else None
        for name in names
    }
