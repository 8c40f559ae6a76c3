"""Runs in the SGLang under diagnosis, which imports it by its own Python path: guards and tile sizes.

A request comes as JSON on stdin (see launch.py), the answer goes as JSON to stdout. Nothing else of
this package is imported: the interpreter may be another one's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from types import SimpleNamespace
from typing import Any


def main() -> None:
    request = json.load(sys.stdin)
    # SGLang and its plugins print.
    with contextlib.redirect_stdout(sys.stderr):
        answer = {"guards": check_guards(request), "memory": plan_memory(request)}
    print(json.dumps(answer))


def _find_modules(series: str) -> None:
    """A tree without the series, or with its first part alone, borrows the modules of ``series``."""
    import sglang.srt.mem_cache
    from sglang.srt.plugins import load_plugins

    load_plugins()
    sglang.srt.mem_cache.__path__.append(f"{series}/srt/mem_cache")


def check_guards(request: dict[str, Any]) -> dict[str, list[str]]:
    """fire: what would refuse this launch, in words. unknown: settings that could not be looked at."""
    _find_modules(request["series"])
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.dsv4 import unified_kv_gate
    from sglang.srt.mem_cache.swa_bitexact import guards, launch_config

    names = {field.name for field in dataclasses.fields(launch_config.LaunchConfig)}
    known = {name: value for name, value in request["arguments"].items() if name in names}
    if request["architectures"]:
        model = SimpleNamespace(architectures=request["architectures"], model_type=request["model_type"])
        known["checkpoint"] = launch_config._checkpoint(model)
    if request["same_machine"]:
        known["unified_kv"] = unified_kv_gate.is_unified_kv_triton()
        known["unified_kv_fp8"] = unified_kv_gate.is_unified_kv_fp8()
        known["flashmla_backend"] = envs.SGLANG_HACK_FLASHMLA_BACKEND.get()
        known["online_c128"] = envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get()
    if request["arguments"]:
        # A server that runs has made its directory.
        known["unwritable_storage"] = None
    if known.get("disaggregation_mode") == "decode":
        # It starts, and keeps stock matching.
        return {"fire": [], "unknown": []}
    # What is not known is not there: a guard that looks for it says so.
    config: Any = SimpleNamespace(**known)
    fire, unknown = [], []
    for guard in guards.GUARDS:
        try:
            problem = guard.problem(config)
        except AttributeError:
            unknown.append(guard.setting)
            continue
        if problem is not None:
            fire.append(problem)
            if guard is guards.GUARDS[0]:
                # Another model: the rest does not matter.
                return {"fire": fire, "unknown": []}
    return {"fire": fire, "unknown": unknown}


def plan_memory(request: dict[str, Any]) -> dict[str, Any] | None:
    """Sizes of tiles and pages, and how many tiles there are; None for what cannot be known.

    planned: the switch is off, so these are the tiles that would be there if it were on.
    """
    model, arguments = request["model"], request["arguments"]
    tokens, page = arguments.get("max_total_num_tokens"), arguments.get("page_size")
    if model is None or not tokens or not page or not model.get("compress_ratios"):
        return None
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import get_dsv4_indexer_bytes_per_token
    from sglang.srt.mem_cache.swa_bitexact import tile_budget
    from sglang.srt.mem_cache.swa_bitexact.layout import TileLayout
    from sglang.srt.utils import is_hip

    ratios = model["compress_ratios"][: model["num_hidden_layers"]]
    width, indexer = model["head_dim"], model["index_head_dim"]
    narrow = envs.SGLANG_DSV4_COMPRESS_STATE_DTYPE.get().strip().lower() in ("bfloat16", "bf16")
    tile_bytes = TileLayout.build(
        page_size=page,
        window=model["sliding_window"],
        ring_rows=model["sliding_window"],
        state_ring_rows=4,
        ratios=ratios,
        start_layer=0,
        window_width=width,
        window_dtype=torch.bfloat16,
        rope_width=None,
        state_width=4 * width,
        indexer_state_width=4 * indexer,
        state_dtype=torch.bfloat16 if narrow else torch.float32,
    ).nbytes
    fp4 = is_hip() and bool(arguments.get("enable_deepseek_v4_fp4_indexer"))
    row = {4: 2 * width + get_dsv4_indexer_bytes_per_token(indexer, fp4), 128: 2 * width}
    page_bytes = sum(page // ratio * row[ratio] for ratio in ratios if ratio in row)

    stride = arguments.get("hicache_swa_offload_page_stride", 1)
    device_share = arguments.get("hicache_swa_device_tile_fraction", 0.05)
    host_share = arguments.get("hicache_swa_host_tile_fraction", 0.5)
    planned = not request["switch"]
    compressed = tokens // page * page_bytes * (1 - device_share if planned else 1)
    # What the server reports as its window capacity are the rings of its slots, not the tiles.
    device = tile_budget.device_tiles(compressed, device_share, tile_bytes)
    needed = None
    if request["running"]:
        step = tile_budget.tiles_per_step(arguments["chunked_prefill_size"], page_size=page, stride=stride)
        needed = request["running"] + 2 * step
    host = None
    # With --hicache-size the host's pages are not a multiple of the device's.
    if arguments.get("enable_hierarchical_cache") and not arguments.get("hicache_size"):
        host = tile_budget.host_tiles(int(compressed * arguments["hicache_ratio"]), host_share, tile_bytes)
    return {
        "tile_bytes": tile_bytes,
        "page_bytes": page_bytes,
        "device_tiles": device,
        "device_tiles_needed": needed,
        "host_tiles": host,
        "planned": planned,
    }


if __name__ == "__main__":
    main()
