"""The part of a launch that decides whether it can be bit-exact."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, fields
from typing import Any

from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from sglang.srt.configs.model_config import is_deepseek_v4
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsv4.unified_kv_gate import (
    is_unified_kv_fp8,
    is_unified_kv_triton,
)

DEEPSEEK_V4 = "a DeepSeek-V4 checkpoint"


@dataclass(frozen=True)
class LaunchConfig:
    """What the guards look at. Server arguments are resolved, and named as SGLang does.

    checkpoint: in words. unified_kv, unified_kv_fp8: what SGLang's gates say.
    flashmla_backend, online_c128: SGLANG_HACK_FLASHMLA_BACKEND and
    SGLANG_OPT_USE_ONLINE_COMPRESS. prefill_graph: the prefill CUDA graph's backend.
    unwritable_storage: the file backend's directory, and why nothing can be stored there.
    """

    page_size: int
    pp_size: int
    attn_cp_size: int
    dcp_size: int
    enable_prefill_cp: bool
    enable_two_batch_overlap: bool
    enable_pdmux: bool
    enable_hisparse: bool
    enable_lmcache: bool
    enable_flexkv: bool
    enable_unified_cache_external_linker: bool
    enable_streaming_session: bool
    enable_session_radix_cache: bool
    enable_hierarchical_cache: bool
    disable_radix_cache: bool
    radix_cache_backend: str | None
    speculative_algorithm: str | None
    disaggregation_mode: str
    disaggregation_decode_retraction_backup: str | None
    hicache_write_policy: str
    hicache_host_memory_mode: str
    hicache_storage_backend: str | None
    hicache_swa_offload_page_stride: int
    hicache_swa_device_tile_fraction: float
    hicache_swa_host_tile_fraction: float
    checkpoint: str
    unified_kv: bool
    unified_kv_fp8: bool
    flashmla_backend: str
    online_c128: bool
    prefill_graph: str
    unwritable_storage: str | None

    @classmethod
    def of(cls, server_args: Any) -> LaunchConfig:
        """Of resolved server arguments; reads the model's config file, and makes the file
        backend's directory, as the backend would."""
        cfg = resolving_view(server_args)
        elsewhere = {
            "checkpoint": _checkpoint(model_config_of(server_args).hf_config),
            "unified_kv": is_unified_kv_triton(),
            "unified_kv_fp8": is_unified_kv_fp8(),
            "flashmla_backend": envs.SGLANG_HACK_FLASHMLA_BACKEND.get(),
            "online_c128": envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get(),
            "prefill_graph": cfg.cuda_graph_config.prefill.backend,
            "unwritable_storage": _unwritable_storage(cfg),
        }
        arguments = {f.name for f in fields(cls)} - elsewhere.keys()
        return cls(**elsewhere, **{name: getattr(cfg, name) for name in arguments})


def _unwritable_storage(cfg: Any) -> str | None:
    """Example: "/proc/l3 (No such file or directory)"."""
    if not cfg.enable_hierarchical_cache or cfg.hicache_storage_backend != "file":
        return None
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
        HybridCacheController,
    )

    extra = HybridCacheController.parse_storage_backend_extra_config(
        cfg.hicache_storage_backend_extra_config
    )[0]
    # In the order in which SGLang looks; its default can always be made.
    directory = (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()
        or (extra or {}).get("file_storage_path")
        or cfg.file_storage_path
    )
    if not directory:
        return None
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return f"{directory} ({error.strerror})"


def _checkpoint(hf_config: Any) -> str:
    if not is_deepseek_v4(hf_config):
        return f"a {hf_config.architectures[0]} checkpoint"
    v41 = hf_config.model_type == "deepseek_v41"
    return "a DeepSeek-V4.1 checkpoint" if v41 else DEEPSEEK_V4
