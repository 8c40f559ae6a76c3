"""A model directory of a few bytes: a configuration, an index, and shards of given sizes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CONFIG = {"model_type": "deepseek_v4", "num_hidden_layers": 4, "transformers_version": "5.1"}
INDEX = {"metadata": {"total_size": 12}, "weight_map": {"embed": "a.safetensors", "head": "b.safetensors"}}


def write_model(
    directory: Path,
    *,
    config: dict[str, Any] = CONFIG,
    index: dict[str, Any] | None = INDEX,
    shards: Iterable[tuple[str, int]] = (("a", 7), ("b", 5)),
) -> Path:
    """Make ``directory``; shards are (name without suffix, bytes). Returns it."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, size in shards:
        (directory / f"{name}.safetensors").write_bytes(bytes(size))
    return directory
