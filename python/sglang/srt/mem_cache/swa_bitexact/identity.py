"""The name under which stored pages may be reused: all that their bytes depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sglang
import torch
from sglang.srt.mem_cache.swa_bitexact.layout import TileLayout
from sglang.srt.mem_cache.swa_bitexact.model_identity import (
    canonical_digest,
    startup_weights,
)
from sglang.srt.runtime_context import get_model, get_parallel

if TYPE_CHECKING:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

# Raise it when the same geometry is filled with other bytes (order of rows, of streams), or what
# belongs to a stored page changes.
STATE_FORMAT_VERSION = 2
PREFIX = "bitexact1-"

# Storage backends whose keys do not have the model name in them, and so not the identity.
# Pages of a stock server, or of other weights, would be found there and reused.
BACKENDS_WITHOUT_MODEL_IN_KEY: Mapping[str, str] = {
    "hf3fs": "its metadata server knows pages by rank and page hash only",
    "npu_memcache": "its keys are page hash and rank; only extra_backend_tag is put before them",
    "simm": "its keys are page hash and rank",
    "aibrix": "its blocks are known by page hash only",
    "sim": "it stores keys without bytes and answers a read with whatever memory held",
    "dynamic": "its class decides the keys, which cannot be seen from here",
}


def storage_identity(
    layout: TileLayout,
    kvcache: DeepSeekV4TokenToKVPool,
    *,
    page_size: int,
    weights: tuple[dict[str, Any], ...] | None = None,
) -> str:
    """``bitexact1-`` and 32 hex digits: pages written under one identity may be reused under it.

    It becomes the anchor host pool's storage_format_tag, which SGLang puts into the model name
    of every backend's keys. A stock server has no tag there, so neither finds the other's pages.

    weights: what was loaded, oldest first (see StorageEpoch); None means what the server was
    started with. Reads the runtime context and small model files. Equal on every TP rank, whose
    bytes are replicas; ranks of a pipeline or context-parallel group hold other bytes, so theirs
    differ. Pool sizes, ring sizes and the host memory layout are not in it: rows are stored in
    ascending position, and a stored page is [layers, bytes] under each layout.

    Example: 43 layers from 0, bf16 rows of 512, page size 256, one set of files ->
        "bitexact1-5c0e3f6b8d0f3a4f0a7de1c9e2b45d11"; with page size 512 another one.
    """
    if weights is None:
        weights = (startup_weights(),)
    return PREFIX + canonical_digest(
        {
            "state_format": STATE_FORMAT_VERSION,
            "sglang": sglang.__version__,
            "device": _device_name(kvcache.device),
            "tile": tile_geometry(layout),
            "pages": page_geometry(kvcache, layout, page_size),
            "slice": stage_slice(layout),
            "model": _model_options(),
            "weights": list(weights),
        }
    )


def tile_geometry(layout: TileLayout) -> dict[str, Any]:
    """The streams of a tile, as JSON data.

    Example: {"window": {"rows": 128, "width": 512, "dtype": "torch.bfloat16", "layers": 43}, ..}
    """
    return {
        name: {
            "rows": stream.rows,
            "width": stream.width,
            "dtype": str(stream.dtype),
            "layers": len(stream.layers),
        }
        for name, stream in layout.streams.items()
    }


def page_geometry(
    kvcache: DeepSeekV4TokenToKVPool, layout: TileLayout, page_size: int
) -> dict[str, Any]:
    """The compressed rows and indexer keys of a page, as JSON data; no sizes of pools."""
    stage = layout.window.layers
    rows = kvcache.unified_kv_pool
    return {
        "page_size": page_size,
        "window": layout.window.rows,
        "ratios": list(kvcache.compression_ratios[stage[0] : stage[-1] + 1]),
        "kv_dtype": str(kvcache.dtype),
        "row": [rows.kv_buffer[0].shape[1], str(rows.kv_buffer[0].dtype)],
        "rope": rows.rope_head_dim if rows.fp8 else None,
        "state_dtypes": {
            str(ratio): str(config.state_dtype)
            for ratio, config in kvcache.compressed_pool_configs.items()
        },
        "indexer": {
            str(ratio): {
                "page_size": pool.page_size,
                "bytes_per_token": pool.get_bytes_per_token(),
                "fp4": pool.use_fp4_indexer,
                "split_scales": pool.uses_aiter_fp4_layout,
                "round_to_even": pool.index_k_rne,
                "row_groups": pool.index_k_page8,
            }
            for ratio, pool in kvcache.index_pools.items()
        },
    }


def stage_slice(layout: TileLayout) -> dict[str, int]:
    """Which part of the model's rows this rank holds: layers, pipeline and context parallel."""
    parallel = get_parallel()
    return {
        "first_layer": layout.window.layers[0],
        "last_layer": layout.window.layers[-1],
        "pp_rank": parallel.pp_rank,
        "pp_size": parallel.pp_size,
        "attn_cp_rank": parallel.attn_cp_rank,
        "attn_cp_size": parallel.attn_cp_size,
        "attn_dcp_rank": parallel.attn_dcp_rank,
        "attn_dcp_size": parallel.attn_dcp_size,
    }


def _model_options() -> dict[str, Any]:
    """Arguments that change what the same files compute; on every rank the same."""
    model = get_model()
    return {
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "quantization_param_path": model.quantization_param_path,
        "modelopt_quant": model.modelopt_quant,
        "overrides": model.json_model_override_args,
    }


def _device_name(device: str | torch.device) -> str:
    """Kernels of another device round differently."""
    kind = torch.device(device).type
    return torch.cuda.get_device_name() if kind == "cuda" else kind
