"""Which windows leave the device when tiles run short."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

# A walk passes all leaves before it finds that no inner carrier is left. This share of the
# pool goes in one walk, so that a pool that holds leaves only is not walked for every tile.
_SHARE = 16


def evict_tiles(cache: UnifiedRadixCache, count: int) -> None:
    """Evict windows from the device until ``count`` more tiles are free, or none is left.

    Takes unlocked carriers, the least recently used first: inner ones, which a longer carrier
    of the same path supersedes, and leaves only where too few inner ones are there, since a
    leaf's compressed rows leave the device with it. Under HiCache an unlocked carrier is on
    the host: its node is locked until its backup is acknowledged, and stays unbacked only if
    the host had no room. Up to a sixteenth of the pool goes at once.

    Every rank evicts the same: the walk follows the tree, not what a device holds.

    Example, LRU order A (inner), B (leaf), C (inner), count 2: A and C. count 3: A, C and B,
    and B's page of compressed rows.
    """
    allocator = cache.token_to_kv_pool_allocator
    page_size = allocator.page_size
    wanted = max(count, allocator.capture_pool.num_tiles // _SHARE) * page_size
    evicted = _walk(cache, wanted, take_leaves=False)
    if evicted < count * page_size:
        _walk(cache, count * page_size - evicted, take_leaves=True)


def _walk(cache: UnifiedRadixCache, wanted: int, *, take_leaves: bool) -> int:
    """One pass of SGLang's eviction over the windows' LRU; SWA slots evicted."""
    core = cache.tree_core
    tracker = dict.fromkeys(cache.tree_components, 0)
    core.evict_device_start(ComponentType.SWA, wanted)
    try:
        while tracker[ComponentType.SWA] < wanted:
            # An inner carrier is evicted by this step; a leaf is only named, and stays if
            # nothing follows.
            leaf, made_progress = cache._evict_device_next_node(
                ComponentType.SWA, tracker
            )
            if leaf is not None:
                if take_leaves:
                    backup = cache._evict_device_leaf(leaf, tracker)
                    assert backup is None, "write_back is refused at start"
            elif not made_progress:
                break
    finally:
        core.evict_device_end(ComponentType.SWA)
    return tracker[ComponentType.SWA]
