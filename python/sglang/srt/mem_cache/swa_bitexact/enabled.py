"""Whether this server is an exact one, and the classes that it then builds.

The only module of the package that a server without the feature imports.
"""

from __future__ import annotations

import sys
from typing import Any

from sglang.srt.environ import envs


def bit_exact_enabled() -> bool:
    """The switch is on, the unified_kv path is taken, and there are prefixes to reuse.

    A PD decode node receives windows and states with each request; it keeps stock matching.
    Without a radix cache nothing is reused, and nothing is captured.
    """
    if not envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.get():
        return False
    from sglang.srt.layers.attention.dsv4.unified_kv_gate import is_unified_kv_triton
    from sglang.srt.runtime_context import get_disagg, get_memory

    return (
        is_unified_kv_triton()
        and get_disagg().disaggregation_mode != "decode"
        and not get_memory().disable_radix_cache
    )


def refusal() -> str | None:
    """The message, if the exception that is being handled refuses this launch; None otherwise."""
    if not envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.get():
        return None
    from sglang.srt.mem_cache.swa_bitexact.launch_error import LaunchError

    error = sys.exc_info()[1]
    return str(error) if isinstance(error, LaunchError) else None


def pool_configurator_class(stock: type) -> type:
    """The class that sizes DeepSeek-V4's pools: ``stock``, or ours that leaves room for tiles."""
    if not bit_exact_enabled():
        return stock
    from sglang.srt.mem_cache.swa_bitexact.device_size import TilePoolConfigurator

    return TilePoolConfigurator


def swa_allocator_class(stock: type, kvcache: Any) -> type:
    """The class that allocates for ``kvcache``: ``stock``, or ours where its rings are ringed.

    Ours comes with a capture pool, for which HiCache needs the strategy registered here.
    """
    if kvcache.swa_req_ring_size is None or not bit_exact_enabled():
        return stock
    from sglang.srt.mem_cache.swa_bitexact.allocator import TileTokenToKVPoolAllocator
    from sglang.srt.mem_cache.swa_bitexact.host_stack import register_tile_stack

    register_tile_stack()
    return TileTokenToKVPoolAllocator


def storage_refusal(kvcache: Any, backend: str, write_policy: str | None) -> str | None:
    """Why a server on ``kvcache`` must not attach this storage while it runs; None if it may.

    The launch checks look at the same two settings, and a request can change both later.
    """
    if getattr(kvcache, "capture_pool", None) is None:
        return None
    from sglang.srt.mem_cache.swa_bitexact.guards import STORAGE_BACKENDS

    if backend not in STORAGE_BACKENDS:
        return (
            f"storage backend {backend} does not keep windows and states beside this "
            f"model's pages; bit-exact reuse needs one of {', '.join(STORAGE_BACKENDS)}."
        )
    if write_policy not in (None, "write_through"):
        return (
            f"write policy {write_policy} evicts windows before they are written; "
            f"bit-exact reuse needs write_through."
        )
    return None
