"""Which upstream functions the CPU platform replaces, and that the hooks hold.

``LEAF_KERNELS`` is the single list: it attaches the hooks, and the table in
``docs/cpu-platform.md`` is checked against it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_cpu_ref import (
    aten,
    attention,
    compress,
    hicache,
    hyper,
    indexer,
    metadata,
    moe,
    poison,
    rope,
    sampling,
    streams,
)

_DSV4 = "sglang.kernels.ops.attention.dsv4"
_RUNTIME = f"{_DSV4}.unified_kv_kernels.runtime"
_MHC = "sglang.kernels.ops.layernorm.mhc"
_GATE = "sglang.srt.layers.attention.dsv4.unified_kv_gate"
_HIP_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend_hip_radix"
_SRT_MEM = "sglang.srt.mem_cache"
_POOL_HOST = f"{_SRT_MEM}.pool_host"

# What the path needs of upstream's switches. An operator's other value is refused: it
# would select a kernel that no CPU has, and fail far from its cause.
ENVIRONMENT = {
    "SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton",
    "SGLANG_DSV4_UNIFIED_KV_FP8": "0",
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    "SGLANG_OPT_FUSE_MHC_POST_PRE": "0",
    "SGLANG_OPT_USE_AITER_INDEXER": "0",
    "SGLANG_OPT_USE_FUSED_HASH_TOPK": "0",
    "SGLANG_OPT_USE_JIT_INDEXER_METADATA": "0",
    "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP": "0",
    "SGLANG_OPT_USE_TILELANG_INDEXER": "0",
    "SGLANG_OPT_USE_TOPK_V2": "0",
}
_SPELLINGS = {"false": "0", "no": "0", "off": "0", "true": "1", "yes": "1", "on": "1"}


class Hook(NamedTuple):
    """One replaced function.

    target: dotted path. replacement: our function. around: True if ``replacement``
    takes the original as its first argument.
    """

    target: str
    replacement: Callable[..., Any]
    around: bool = False


def _dsv4_backend(runner: Any) -> Any:
    """The HIP backend, whatever the device, for a context that the kernels can sum."""
    config = runner.model_config
    stop_unless(lambda: attention.check_context(config.context_len, config.window_size, config.hf_config.index_topk))
    from sglang.srt.layers.attention.deepseek_v4_backend_hip_radix import DeepseekV4HipRadixBackend

    return DeepseekV4HipRadixBackend(runner)


def _allow_dsv4_pool(original: Callable[..., None], platform: Any, *, subsystem: str) -> None:
    if subsystem != "the DeepSeek-V4 KV pool":
        original(platform, subsystem=subsystem)


def _exact_chunk_fill() -> bool:
    """SGLANG_EXACT_CHUNK_FILL where it is set; upstream asks for a gfx95 GPU as well, where it is on."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_EXACT_CHUNK_FILL.is_set() and envs.SGLANG_EXACT_CHUNK_FILL.get())


PATH_SELECTION = (
    # Upstream hands an out-of-tree platform's torch.device on where it needs a string.
    Hook("sglang.srt.utils.common.get_device", lambda device_id=None: "cpu"),
    Hook(f"{_GATE}.is_unified_kv_triton", lambda: True),
    Hook(f"{_GATE}.is_unified_kv_fp8", lambda: False),
    Hook("sglang.srt.managers.schedule_policy._use_exact_chunk_fill", _exact_chunk_fill),
    Hook("sglang.srt.platforms.interface.reject_out_of_tree_path", _allow_dsv4_pool, around=True),
    Hook(f"{_HIP_BACKEND}._create_flashmla_metadata", lambda: None),
    Hook("sglang.srt.models.deepseek_v4.get_rope_wrapper", lambda *args, **kwargs: None),
    # It would register Triton kernels; the platform's own are batch-invariant.
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode", lambda self: None),
    # Compiles tilelang kernels and synchronises CUDA; there is nothing to compile.
    Hook("sglang.srt.models.deepseek_v4.DeepseekV4ForCausalLM._prewarm_mhc_kernels", lambda self: None),
)

LEAF_KERNELS = (
    Hook(f"{_RUNTIME}.prefill", attention.prefill),
    Hook(f"{_RUNTIME}.decode", attention.decode),
    Hook(f"{_RUNTIME}.build_prefill_indices", streams.build_prefill_indices),
    Hook(f"{_RUNTIME}.build_decode_streams", streams.build_decode_streams),
    Hook(f"{_RUNTIME}.fill_compress_tail", streams.fill_compress_tail),
    Hook(
        "sglang.kernels.ops.kvcache.dsv4_unified_kv_store.store_swa_into_unified",
        attention.store_swa_into_unified,
    ),
    Hook(
        "sglang.kernels.ops.attention.fused_qk_norm_rope_store.fused_qk_norm_rope_swa_store",
        rope.fused_qk_norm_rope_swa_store,
    ),
    Hook(f"{_DSV4}.norm_rope.fused_rope_inplace", rope.fused_rope_inplace),
    Hook(f"{_DSV4}.norm_rope.fused_norm_rope_inplace", rope.fused_norm_rope_inplace),
    Hook(f"{_DSV4}.norm_rope.fused_q_norm_rope", rope.fused_q_norm_rope),
    Hook(
        f"{_DSV4}.norm_rope.fused_q_indexer_rope_hadamard_quant",
        rope.fused_q_indexer_rope_hadamard_quant,
    ),
    Hook(f"{_DSV4}.compress.CompressorPrefillPlan.generate", compress.plan_prefill),
    Hook(f"{_DSV4}.compress.CompressorDecodePlan.generate", compress.plan_decode),
    Hook(f"{_DSV4}.compress.compress_forward", compress.compress_forward),
    Hook(f"{_DSV4}.compress.compress_norm_rope_store", compress.compress_norm_rope_store),
    Hook("sglang.srt.layers.attention.dsv4.indexer.fp8_paged_mqa_logits_torch", indexer.fp8_paged_mqa_logits),
    Hook(f"{_DSV4}.topk.topk_transform_paged", indexer.topk_transform),
    Hook(f"{_DSV4}.attn_glue_hip.page_table_from_req_to_token", metadata.page_table_from_req_to_token),
    Hook(f"{_DSV4}.attn_glue_hip.sparse_buffers", metadata.sparse_buffers),
    Hook(f"{_DSV4}.metadata_kernel.init_compression_metadata", metadata.init_compression_metadata),
    Hook(f"{_MHC}.mhc_pre", hyper.mhc_pre),
    Hook(f"{_MHC}.mhc_post", hyper.mhc_post),
    Hook("sglang.kernels.ops.layernorm.mhc_head.fused_hc_head", hyper.fused_hc_head),
    Hook("sglang.kernels.ops.activation.silu_and_mul_clamp.silu_and_mul_clamp", moe.silu_and_mul_clamp),
    Hook("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", moe.moe_forward),
    Hook("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", sampling.murmur_hash32),
    Hook(f"{_POOL_HOST}.common._cuda_host_register", hicache.leave_unpinned),
    Hook(f"{_POOL_HOST}.common._cuda_host_unregister", hicache.leave_unpinned),
    Hook(f"{_POOL_HOST}.base.HostKVCache.__init__", hicache.init_without_pinning, around=True),
    Hook(f"{_SRT_MEM}.memory_pool_host.DeepSeekV4PagedHostPool.__init__", hicache.init_without_pinning, around=True),
    Hook(f"{_SRT_MEM}.memory_pool_host.DeepSeekV4StateHostPool.__init__", hicache.init_without_pinning, around=True),
)

# Attached with SGLANG_CPU_REF_POISON=1 only.
POISON = (
    Hook(f"{_SRT_MEM}.allocation.alloc_for_extend", poison.before_extend, around=True),
    Hook(f"{_SRT_MEM}.unified_radix_cache.UnifiedRadixCache.load_back", poison.before_load_back, around=True),
    Hook(f"{_SRT_MEM}.unified_radix_cache.UnifiedRadixCache.reset", poison.after_reset, around=True),
)

# Names that upstream imports from sgl_kernel on CUDA and HIP only: there is no
# function to replace, so the pool modules get ours under the same name.
_POOL_MODULES = (f"{_SRT_MEM}.memory_pool_host", f"{_POOL_HOST}.mha", f"{_POOL_HOST}.mla", f"{_POOL_HOST}.mamba")
PROVIDED = (
    hicache.transfer_kv_direct,
    hicache.transfer_kv_all_layer_direct_lf_pf,
    hicache.transfer_kv_per_layer_direct_pf_lf,
)


class NotAttachedError(RuntimeError):
    """A hook of the platform did not take effect."""


_attached = False


def attach() -> None:
    """Set the environment, attach every hook and the aten kernels, or raise NotAttachedError."""
    global _attached
    if _attached:
        return
    set_environment()

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: tuple[Hook, ...] = PATH_SELECTION + LEAF_KERNELS
    if poison.requested():
        hooks += POISON
        poison.logger.warning("%s=1: what is free is overwritten with garbage.", poison.SWITCH)
    for hook in hooks:
        kind = HookType.AROUND if hook.around else HookType.REPLACE
        HookRegistry.register(hook.target, hook.replacement, kind)
    HookRegistry.apply_hooks()
    missing = sorted({hook.target for hook in hooks} - HookRegistry._patched)
    if missing:
        raise NotAttachedError(
            "these functions of SGLang could not be replaced: " + ", ".join(missing) + ". "
            "The platform is made for sglang 0.5.23; install that version."
        )
    for name in _POOL_MODULES:
        module = importlib.import_module(name)
        for function in PROVIDED:
            setattr(module, function.__name__, function)

    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("dsv4")(_dsv4_backend)
    # Batch-invariant kernels: sampling with a fixed seed repeats itself, with a prefix and without.
    choices.add_deterministic_attention_backend_choices(["dsv4"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["dsv4"])
    aten.install()
    _attached = True


def set_environment() -> None:
    """Set what ``ENVIRONMENT`` says where it is unset; NotAttachedError where it is set otherwise."""
    for name, value in ENVIRONMENT.items():
        found = os.environ.setdefault(name, value)
        if _SPELLINGS.get(found.lower(), found) != value:
            raise NotAttachedError(f"{name} is {found!r}; the CPU platform needs {value!r}. Unset it.")


def require_attached() -> None:
    """Raise NotAttachedError if SGLang loaded the platform but not its plugin."""
    if not _attached:
        raise NotAttachedError(
            "SGLANG_PLATFORM=cpu_ref is set but its kernels are not attached. If SGLANG_PLUGINS is "
            f"set (it is {os.environ.get('SGLANG_PLUGINS', '')!r}), add cpu_ref to it."
        )


def stop_unless(check: Callable[[], None]) -> None:
    """End the process with the message of a failed check, without a traceback."""
    try:
        check()
    except (NotAttachedError, ValueError) as error:
        sys.exit(f"SGLANG_PLATFORM=cpu_ref cannot start: {error}")


def add_rope_tables(model: torch.nn.Module) -> None:
    """Give each attention layer the decode kernel's cos and sin tables, in float32.

    Upstream registers them on HIP only, in bfloat16; float32 is what its prefill
    kernel reads, so that prefill and decode rotate alike.
    """
    from sglang.srt.models.deepseek_v4 import MQALayer

    for layer in model.modules():
        if isinstance(layer, MQALayer):
            table = torch.view_as_real(layer.freqs_cis)
            for name, part in (("cos_cache", table[..., 0]), ("sin_cache", table[..., 1])):
                layer.register_buffer(name, part.contiguous()[:, None, None], persistent=False)
