"""Which launches the feature refuses: checked once, when server arguments are resolved."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.environ import envs
from sglang.srt.mem_cache.swa_bitexact.launch_config import (
    DEEPSEEK_V4,
    LaunchConfig,
)
from sglang.srt.mem_cache.swa_bitexact.launch_error import (
    LaunchError,
    end_without_traceback,
)
from sglang.srt.model_executor.cuda_graph_config import Backend

logger = logging.getLogger(__name__)
FLAG = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"

# Storage backends with the batch v2 interface for every side pool that a tile needs, which
# also serve a model whose KV pages themselves hold no bytes. The others: aibrix, eic and
# simm have no v2; tensorcast's raises; npu_memcache knows no SWA pool; hf3fs and seaweedfs
# read the KV pages' bytes; shm and sim keep none; what dynamic loads is not known here.
STORAGE_BACKENDS = ("file", "mooncake", "mori", "nixl")

_UNIFIED = "unified_kv_triton"


class Guard(NamedTuple):
    """One setting that the feature needs at one value.

    setting: the argument or environment variable. needs, why: end the sentence "must be
    ... for bit-exact reuse: ...". found: the setting as it is, None if that is fine.
    fix: what to do, where it is not simply to give the setting the value.
    """

    setting: str
    needs: str
    why: str
    found: Callable[[LaunchConfig], object]
    fix: str | None = None

    @property
    def remedy(self) -> str:
        if self.fix is not None:
            return self.fix
        is_argument = self.setting.startswith("--")
        if self.needs in ("off", "unset"):
            return f"{'Remove' if is_argument else 'Unset'} {self.setting}"
        return f"Start with {self.setting} {self.needs}"

    def problem(self, config: LaunchConfig) -> str | None:
        found = self.found(config)
        if found is None:
            return None
        return (
            f"{self.setting} is {found}, but must be {self.needs} for bit-exact reuse: "
            f"{self.why}. {self.remedy}."
        )


def _must_be(name: str, value: object) -> Callable[[LaunchConfig], object]:
    """Found is what field ``name`` holds, unless it is ``value``."""

    def found(config: LaunchConfig) -> object:
        actual = getattr(config, name)
        if actual == value:
            return None
        return "on" if actual is True else actual

    return found


def _with_hicache(found: Callable[[LaunchConfig], object]) -> Callable[..., object]:
    return lambda c: found(c) if c.enable_hierarchical_cache else None


def _argument(name: str, value: object, why: str) -> Guard:
    """The server argument of field ``name`` has to be ``value``."""
    words = {False: "off", None: "unset"}
    needs = words[value] if value is False or value is None else str(value)
    return Guard("--" + name.replace("_", "-"), needs, why, _must_be(name, value))


def _fraction(name: str, default: float) -> Guard:
    def found(config: LaunchConfig) -> object:
        value = getattr(config, name)
        return None if 0 < value < 1 else value

    setting = "--" + name.replace("_", "-")
    return Guard(
        setting,
        "above 0 and below 1",
        "tiles and compressed rows share this memory, and neither can do without",
        found,
        f"Start with {setting} {default}",
    )


GUARDS = (
    Guard(
        "--model-path",
        DEEPSEEK_V4,
        "no other model keeps its windows in unified_kv rings",
        _must_be("checkpoint", DEEPSEEK_V4),
        "Serve DeepSeek-V4",
    ),
    Guard(
        "SGLANG_HACK_FLASHMLA_BACKEND",
        f"{_UNIFIED} on ROCm",
        "every other path keeps windows in pages, and restores them without this",
        lambda c: (
            None
            if c.unified_kv
            else f"{_UNIFIED} without ROCm"
            if c.flashmla_backend == _UNIFIED
            else c.flashmla_backend
        ),
        f"Set SGLANG_HACK_FLASHMLA_BACKEND={_UNIFIED} on a ROCm machine",
    ),
    Guard(
        "SGLANG_DSV4_UNIFIED_KV_FP8",
        "off",
        "HiCache mirrors one pool of a window so far, and fp8 has two",
        lambda c: "on" if c.unified_kv_fp8 else None,
    ),
    Guard(
        "SGLANG_OPT_USE_ONLINE_COMPRESS",
        "off",
        "a tile has no room for online c128 state",
        lambda c: "on" if c.online_c128 else None,
    ),
    _argument(
        "page_size",
        256,
        "unified_kv has no other, and c128 blocks must end with a page",
    ),
    Guard(
        "--hicache-swa-offload-page-stride",
        "0 or more",
        "it counts pages",
        lambda c: (
            c.hicache_swa_offload_page_stride
            if c.hicache_swa_offload_page_stride < 0
            else None
        ),
        "Start with --hicache-swa-offload-page-stride 1",
    ),
    _fraction("hicache_swa_device_tile_fraction", 0.05),
    _fraction("hicache_swa_host_tile_fraction", 0.5),
    Guard(
        "--cuda-graph-backend-prefill",
        Backend.DISABLED,
        "a replayed prefill graph skips the Python code that takes windows",
        _must_be("prefill_graph", Backend.DISABLED),
    ),
    _argument(
        "speculative_algorithm", None, "a rejected draft token may be in a window"
    ),
    _argument("pp_size", 1, "stages do not agree yet on the tiles that they keep"),
    _argument("attn_cp_size", 1, "a rank must see every row of a chunk"),
    _argument("enable_prefill_cp", False, "a rank must see every row of a chunk"),
    _argument("dcp_size", 1, "a rank's host pages must hold whole tiles"),
    _argument(
        "enable_two_batch_overlap", False, "half a step cannot follow the step's plan"
    ),
    _argument(
        "enable_pdmux", False, "its streams are not ordered with the one that captures"
    ),
    _argument("enable_hisparse", False, "it has no unified_kv pools"),
    Guard(
        "--disaggregation-mode",
        "null, or decode with stock matching",
        "a prefill node publishes with its transfers, which tiles do not follow yet",
        lambda c: "prefill" if c.disaggregation_mode == "prefill" else None,
        "Start without --disaggregation-mode",
    ),
    Guard(
        "--disaggregation-decode-retraction-backup",
        "unset",
        "its host pool has no tiles",
        lambda c: (
            "host_pool"
            if c.disaggregation_decode_retraction_backup == "host_pool"
            else None
        ),
    ),
    _argument(
        "enable_streaming_session",
        False,
        "a rewound session hands on a slot whose window is gone",
    ),
    _argument(
        "enable_session_radix_cache", False, "sessions evict in an order of their own"
    ),
    _argument("radix_cache_backend", None, "another cache does not know tiles"),
    _argument("enable_lmcache", False, "it moves pages without their windows"),
    _argument("enable_flexkv", False, "it moves pages without their windows"),
    _argument(
        "enable_unified_cache_external_linker",
        False,
        "it moves pages without their windows",
    ),
    Guard(
        "--hicache-write-policy",
        "write_through",
        "a window that is evicted before it is written cannot be restored",
        _with_hicache(_must_be("hicache_write_policy", "write_through")),
    ),
    Guard(
        "--hicache-host-memory-mode",
        "cache",
        "tiles need a host tier that keeps them",
        _with_hicache(_must_be("hicache_host_memory_mode", "cache")),
    ),
    Guard(
        "--hicache-storage-backend",
        f"one of {', '.join(STORAGE_BACKENDS)}",
        "the others do not keep windows and states beside this model's pages",
        _with_hicache(
            lambda c: (
                None
                if c.hicache_storage_backend in (None, *STORAGE_BACKENDS)
                else c.hicache_storage_backend
            )
        ),
        "Start with --hicache-storage-backend file",
    ),
    Guard(
        "--file-storage-path",
        "a directory that can be written",
        "windows are stored there with their pages",
        lambda c: c.unwritable_storage,
        "Give another --file-storage-path, or make this one writable",
    ),
)


def _is_complete() -> bool:
    """Whether the parts behind this one are here: the last one brings this module."""
    return importlib.util.find_spec(f"{__package__}.coupling") is not None


def problems(config: LaunchConfig) -> list[str]:
    """Everything in ``config`` that the feature cannot work with, one sentence group each.

    Another model is the only problem reported: for it the rest does not matter.

    Example, pp_size=2 and an otherwise fine launch:
        ["--pp-size is 2, but must be 1 for bit-exact reuse: stages do not agree yet on
        the tiles that they keep. Start with --pp-size 1."]
    """
    wrong_model = GUARDS[0].problem(config)
    if wrong_model is not None:
        return [wrong_model]
    return [p for guard in GUARDS if (p := guard.problem(config)) is not None]


def check_bit_exact(server_args: Any) -> None:
    """Refuse a launch that cannot be bit-exact; without the flag, do nothing.

    Call once, in the main process, when ``server_args`` is resolved. A PD decode node
    passes with a log line: it keeps stock matching.

    Raises:
        LaunchError: all problems of the launch, and what to change about each.
    """
    if not envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.get():
        return
    if resolving_view(server_args).disaggregation_mode == "decode":
        logger.info(
            "%s: this is a PD decode node. Windows and states arrive with each request, "
            "so it starts with stock prefix matching.",
            FLAG,
        )
        return
    config = LaunchConfig.of(server_args)
    if found := problems(config):
        end_without_traceback()
        raise LaunchError(
            f"{FLAG} is on, and this launch cannot be bit-exact:\n- "
            + "\n- ".join(found)
            + f"\nChange {'this' if len(found) == 1 else 'these'}, or unset {FLAG}."
        )
    if not _is_complete():
        end_without_traceback()
        raise LaunchError(
            f"{FLAG} is on, and this build holds the first parts of the series only: it "
            f"would capture windows, and not restore them. Build with all parts, or unset "
            f"{FLAG}."
        )
    if config.disable_radix_cache:
        logger.warning(
            "%s has no effect with --disable-radix-cache: no prefix is reused.", FLAG
        )
