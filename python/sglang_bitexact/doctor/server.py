"""What a running server says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from sglang_bitexact.doctor.environment import Environment, of_server
from sglang_bitexact.verify.client import Client

_TIMEOUT_S = 30.0
# What is shown of a server's several hundred arguments.
SHOWN = (
    "model_path",
    "page_size",
    "tp_size",
    "chunked_prefill_size",
    "max_running_requests",
    "enable_hierarchical_cache",
    "hicache_ratio",
    "hicache_size",
    "hicache_write_policy",
    "hicache_storage_backend",
    "hicache_swa_offload_page_stride",
    "hicache_swa_device_tile_fraction",
    "hicache_swa_host_tile_fraction",
)


class Server(NamedTuple):
    """info: /server_info, resolved arguments and scheduler state. model: /model_info."""

    url: str
    info: dict[str, Any]
    model: dict[str, Any]
    environment: Environment

    @property
    def version(self) -> str:
        return str(self.info.get("version"))

    @property
    def holds_series(self) -> bool:
        """Whether its code has the series: part 1 brings the arguments."""
        return "hicache_swa_offload_page_stride" in self.info

    @property
    def arguments(self) -> dict[str, Any]:
        return {name: self.info[name] for name in SHOWN if name in self.info}

    @property
    def prefill_graph(self) -> str | None:
        """The prefill CUDA graph's backend; None if the server does not say."""
        try:
            return str(self.info["cuda_graph_config"]["prefill"]["backend"])
        except (KeyError, TypeError):
            return None

    @property
    def state(self) -> dict[str, Any]:
        """Of the first scheduler."""
        states = self.info.get("internal_states") or [{}]
        return dict(states[0])

    @property
    def model_config(self) -> dict[str, Any] | None:
        """The model's config.json, where its folder is on this machine too."""
        try:
            content = json.loads((Path(str(self.model.get("model_path"))) / "config.json").read_text())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None


def fetch(url: str, api_key: str | None) -> Server:
    """Raises BitexactError if nothing answers at ``url`` as SGLang does."""
    client = Client(url, api_key, timeout_s=_TIMEOUT_S)
    return Server(url, client.server_info(), client.model_info(), of_server(url))
