"""The ``cpu_ref`` platform: device operations and what SGLang asks a platform for."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_cpu_ref import hooks

# SGLang would size the pools by free memory, and take most of it.
_MAX_TOTAL_TOKENS = 65_536
_MAX_RUNNING_REQUESTS = 64
# The tiny model's compressed rows are so small that SGLang's share of memory beside them would
# hold no tile: argument -> (its default, for a GPU's memory; ours). Part 2 adds the arguments.
_TILE_FRACTIONS = {
    "hicache_swa_device_tile_fraction": (0.05, 0.93),
    "hicache_swa_host_tile_fraction": (0.5, 0.9),
}


# Server arguments that the platform cannot serve: field -> the only value that it can.
_ONLY = {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "speculative_algorithm": None,
    "quantization": None,
    "disaggregation_mode": "null",
}


def _require_supported(server_args: Any) -> None:
    for name, only in _ONLY.items():
        found = getattr(server_args, name)
        if found != only:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is {found!r}; the CPU platform serves {only!r} only. Remove the flag.")


class CpuRefPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """A CPU that runs DeepSeek-V4 on the unified_kv path with reference leaf kernels."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> torch.device:
        """SGLang asks here before it reads any argument if the plugin was not loaded."""
        hooks.stop_unless(hooks.require_attached)
        return torch.device("cpu")

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "dsv4"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Defaults of the platform, after a check of what it cannot serve."""
        hooks.stop_unless(hooks.require_attached)
        hooks.stop_unless(lambda: _require_supported(server_args))
        server_args.attention_backend = server_args.attention_backend or "dsv4"
        if server_args.enable_hierarchical_cache and server_args.hicache_io_backend == "kernel":
            # SGLang's default is a GPU kernel; ``direct`` moves the same bytes.
            server_args.hicache_io_backend = "direct"
        # An idle scheduler polls, and takes one of two cores from whoever works.
        server_args.sleep_on_idle = True
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = _MAX_TOTAL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _MAX_RUNNING_REQUESTS
        for name, (default, ours) in _TILE_FRACTIONS.items():
            if getattr(server_args, name, None) == default:
                setattr(server_args, name, ours)

    def post_load_model(self, model: torch.nn.Module) -> None:
        hooks.add_rope_tables(model)
