"""What a scenario records: plain values that are equal in two processes if the caches are."""

from __future__ import annotations

import hashlib
import json
import unittest
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType

# By name, not all that there is: a tree under test may have fields of its own.
_MATCH = (
    *("device_prefix_len", "last_device_node", "last_host_node", "best_match_node", "host_hit_length"),
    *("swa_host_hit_length", "swa_branching_seqlen", "mamba_host_hit_length", "mamba_branching_seqlen"),
    *("cache_protected_len", "full_kv_hit_length", "full_device_match_len"),
)
_INSERT = ("prefix_len", "total_len", "last_device_node", "mamba_exist", "swa_branch_inserted")
_EVICT = ("num_tokens_evicted", "swa_num_tokens_evicted", "mamba_num_evicted")
_LONG = 48


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it; long lists and tensors as their length and a digest."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous()
        if raw.numel() > _LONG or raw.is_floating_point():
            data = raw.reshape(-1).view(torch.uint8).numpy().tobytes() if raw.numel() else b""
            return [str(raw.dtype), list(raw.shape), hashlib.sha256(data).hexdigest()[:16]]
        return raw.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        if len(items) > _LONG:
            return [len(items), hashlib.sha256(json.dumps(items).encode()).hexdigest()[:16]]
        return items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__


def match(result: Any) -> dict[str, Any]:
    return {name: plain(getattr(result, name, "absent")) for name in _MATCH}


def insert(result: Any) -> dict[str, Any]:
    return {name: plain(getattr(result, name, "absent")) for name in _INSERT}


def evict(result: Any) -> dict[str, Any]:
    return {name: plain(getattr(result, name, "absent")) for name in _EVICT}


def free_rows(allocator: Any) -> list[int]:
    """In all, and of full attention and the window where they are separate."""
    names = ("available_size", "full_available_size", "swa_available_size")
    return [int(getattr(allocator, name)()) for name in names if hasattr(allocator, name)]


def cache_state(cache: Any) -> dict[str, Any]:
    """Every device slot with its position and predecessor, sizes, free slots, and each node's data.

    Nodes are described where the core can be inspected; the tree's own check runs first.
    """
    cache.sanity_check()
    core, allocator = cache.tree_core, cache.token_to_kv_pool_allocator
    walk = core.walk_for_kv_canary(False, False)
    rows = zip(*(list(column) for column in (walk.slot_indices, walk.positions, walk.prev_slot_indices)), strict=True)
    state: dict[str, Any] = {
        "rows": plain(sorted(tuple(map(int, row)) for row in rows)),
        "total": plain(cache.total_size()),
        "free": free_rows(allocator),
    }
    for component in cache.tree_components:
        state[f"{component.name} evictable"] = int(core.component_evictable_size(component))
        state[f"{component.name} protected"] = int(core.component_protected_size(component))
    if cache.cache_controller is not None:
        group = cache.cache_controller.mem_pool_host
        state["host free"] = {str(entry.name): int(entry.host_pool.available_size()) for entry in group.entries}
    if (nodes := _all_nodes(core)) is not None:
        state["nodes"] = {str(node): _node(cache, node) for node in sorted(nodes)}
        state["device lru"] = {
            component.name: plain(list(core.get_component_device_lru_node_ids(component)))
            for component in cache.tree_components
        }
    return state


def _node(cache: Any, node: int) -> list[Any]:
    core = cache.tree_core
    described: list[Any] = [
        plain(list(core.get_node_token_ids(node))),
        core.get_parent_node_id(node),
        core.get_node_hit_count(node),
        plain(list(core.get_hash_values(node) or ())),
    ]
    for component in cache.tree_components:
        described += [
            plain(core.get_component_device_value(node, component)),
            plain(core.get_component_host_value(node, component)),
            core.get_component_device_lock_ref(node, component),
            core.get_component_host_lock_ref(node, component),
            bool(core.is_node_in_host_lru(node, component)),
        ]
    return described


def _all_nodes(core: Any) -> list[int] | None:
    """None where the core cannot be inspected."""
    try:
        return list(core.get_all_node_ids()) if hasattr(core, "get_all_node_ids") else None
    except unittest.SkipTest:
        return None


def window_values(cache: Any, rows: torch.Tensor) -> Any:
    """The SWA rows that full rows map to, where there are any and they are mapped row by row."""
    if ComponentType.SWA not in cache.tree_components:
        return None
    mapping = getattr(cache.token_to_kv_pool_allocator, "full_to_swa_index_mapping", None)
    return None if mapping is None else plain(mapping[rows])
