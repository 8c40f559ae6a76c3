"""Puts a request's tiles onto the radix nodes that end at their boundaries."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.swa_bitexact.reuse_points import ReusePoints
from sglang.srt.mem_cache.swa_bitexact.tile_table import RequestTiles
from sglang.srt.mem_cache.unified_cache.cache_action import (
    BackupKV,
    RecoverSWAWithLockedFull,
    SWARebuild,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult
    from sglang.srt.mem_cache.swa_bitexact.allocator import TileTokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_cache.cache_action import ComponentAction
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
        BaseEvictionResult,
        NodeId,
    )
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

logger = logging.getLogger(__name__)


class TilePublisher:
    """Publishes tiles through one tree's own inserts; it owns nothing.

    A tile belongs to the request's table until its page is mapped, here, just before the
    insert that hands page and tile to the tree. What is mapped earlier would leak with an
    abort, and travel to the next owner of the rows.

    points: what became of reuse points, for receipts.
    published: tiles handed to the tree since start-up, duplicates that it freed included.
    refused: windows that an insert wanted to publish where no tile is; must stay 0.
    evicted: tiles of cached prefixes that left a tier to make room.
    """

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache
        self._allocator: TileTokenToKVPoolAllocator = cache.token_to_kv_pool_allocator
        self._page_size = cache.page_size
        # Whether the insert under way ends at a tile.
        self._ends_at_tile = False
        self.points = ReusePoints(self._allocator.capture_planner)
        self.published = 0
        self.evicted = {"device": 0, "host": 0}
        self.refused = 0

    def insert(self, req: Req, insert: InsertParams) -> InsertResult:
        """The tree's insert of a checkpoint, with ``req``'s tiles; returns what it returned.

        ``insert``'s key and value are whole pages. One insert per tile, ascending, each from
        where the last one ended, so that no page is freed twice; then one for what is left.
        Each insert's window floor lets through the page before its tile and nothing else:
        without a tile the floor is the end, and the new nodes have no window.

        Takes the published tiles out of ``req.swa_tiles``, and moves ``insert``'s floor and
        inserted lengths. Tiles beyond its end stay in the table, and so do those inside the
        protected prefix, which the tree has already. ``points`` learns what has a tile now, and
        what was due one and has none.

        Example, page_size 256, protected prefix 256, key of 1,280, tiles at 768 and 1,280:
            insert [0, 768):    prev_prefix_len 256, floor 512, mapped [512, 768)
            insert [0, 1_280):  prev_prefix_len 768, floor 1_024, mapped [1_024, 1_280)
        The same without the tile at 1,280: floor 1_280, nothing mapped.
        """
        end, owner = len(insert.key), req.swa_tiles or RequestTiles()
        new = range(insert.prev_prefix_len + 1, end + 1)
        published = sorted(boundary for boundary in owner.tiles if boundary in new)
        for boundary in published:
            if boundary == end:
                result = self._insert_at_tile(insert, owner.tiles.pop(boundary))
                break
            inner = replace(
                insert,
                key=insert.key[:boundary],
                value=insert.value[:boundary],
                component_evicted_seqlens=dict(insert.component_evicted_seqlens),
            )
            self._insert_at_tile(inner, owner.tiles.pop(boundary))
            insert.prev_prefix_len = boundary
            # The request's second insert of these nodes: not another hit.
            insert.inserted_len = max(insert.inserted_len, boundary)
        else:
            insert.set_evicted_seqlen(ComponentType.SWA, end)
            result = self._cache.insert(insert)
        dropped = self._dropped(owner, new, result.last_device_node)
        self.points.settle(insert.key, tiles=published, dropped=dropped)
        return result

    def _dropped(self, owner: RequestTiles, new: range, last_node: NodeId) -> set[int]:
        """What in ``new`` was due a tile and has none, whoever else captured it.

        An answer's tile off the grid is due at the answer's end alone: a newer one replaces it.
        """
        keeps = self._allocator.capture_planner.keeps
        dropped = {
            boundary
            for boundary, decoded in owner.dropped.items()
            if boundary in new
            and (not decoded or keeps(boundary) or boundary == new[-1])
        }
        if not dropped:
            return dropped
        core = self._cache.tree_core
        (path,) = core.collect_path_info([last_node])
        return dropped - {
            node.path_end
            for node in path
            if core.get_component_device_value(node.node_id, ComponentType.SWA)
            is not None
            or core.component_has_host_value_only(node.node_id, ComponentType.SWA)
        }

    def _insert_at_tile(
        self, insert: InsertParams, tile_id: torch.Tensor
    ) -> InsertResult:
        """Map the last page of ``insert`` to the tile, and let this insert publish it."""
        floor = len(insert.key) - self._page_size
        self._allocator.map_tile(insert.value[floor:], tile_id)
        insert.set_evicted_seqlen(ComponentType.SWA, floor)
        self.published += 1
        self._ends_at_tile = True
        try:
            return self._cache.insert(insert)
        finally:
            self._ends_at_tile = False

    def accepts(self, action: ComponentAction) -> bool:
        """Whether the tree may give a node the window that its rows are mapped to.

        Decided on the host: the one page at the end of an insert that ends at a tile is
        mapped, and no other. An insert from anywhere else would publish mapping 0, which
        the match would accept as a window; its node stays without one. Frees the incoming
        rows of a refused recovery, as accepting it would have; counts and logs.
        """
        if not isinstance(action, SWARebuild | RecoverSWAWithLockedFull):
            return True
        recovers = isinstance(action, RecoverSWAWithLockedFull)
        rows = action.incoming_full if recovers else action.source_value
        if self._ends_at_tile and len(rows) == self._page_size:
            return True
        self.refused += 1
        logger.error(
            "Bit-exact reuse: an insert wanted to publish %d rows as a window, and no tile "
            "was captured for them; the node stays without a window.",
            len(rows),
        )
        if recovers:
            self._allocator.free_segment(rows, start_pos=0)
        return False

    def count_evicted(self, result: BaseEvictionResult) -> None:
        """A step of the tree's eviction is about to free what ``result`` names."""
        for tier, frees in (
            ("device", result.device_frees),
            ("host", result.host_frees),
        ):
            slots = sum(len(value) for value in frees.get(ComponentType.SWA, ()))
            self.evicted[tier] += slots // self._page_size

    def backup_late(self, node_ids: Iterable[int]) -> None:
        """Back up windows that came while their node's earlier backup was under way.

        Call when that backup is acknowledged, with its nodes. SGLang looks for such a window
        only when a later insert ends on the node.
        """
        core = self._cache.tree_core
        for node_id in node_ids:
            # Builds no transfer, and does nothing, where the window is on the host already.
            if core.get_component_device_value(node_id, ComponentType.SWA) is not None:
                self._cache._execute_and_commit_kv_backup(BackupKV(node_ids=[node_id]))
