"""The real tree, controller, host pools and file storage over tiles, on CPU tensors.

No model and no scheduler: a tile is published by hand, as a checkpoint will publish it. The
CPU platform must be chosen before this is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import time
import unittest.mock
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.pool_host import base as pool_host
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_bitexact import guards
from sglang.srt.mem_cache.swa_bitexact.allocator import TileTokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_bitexact.host_stack import register_tile_stack
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
from sglang.srt.server_args import ServerArgs

from kit.checkpoint import shared_checkpoint
from kit.tile_pools import PAGE, RATIOS, WINDOW, tile_pools

_COPIES = {"hicache_io_backend", "hicache_mem_layout"}
# By stream, uint8 [layers, bytes]: bytes, since a NaN is equal to nothing.
Tile = dict[str, torch.Tensor]


@contextlib.contextmanager
def server_context(**arguments: Any) -> Iterator[ServerArgs]:
    """SGLang's globals of a scheduler with these arguments; the former ones come back.

    With the flag on as well: it would be refused as long as the parts that reuse tiles are missing.
    """
    load_plugins()
    with unittest.mock.patch.object(guards, "_is_complete", return_value=True), _context(arguments) as args:
        yield args


@contextlib.contextmanager
def _context(arguments: dict[str, Any]) -> Iterator[ServerArgs]:
    args = ServerArgs(
        model_path=str(shared_checkpoint()),
        device="cpu",
        page_size=PAGE,
        served_model_name="tiny",
        enable_hierarchical_cache=True,
        hicache_write_policy="write_through",
        hicache_storage_prefetch_policy="wait_complete",
        **{"hicache_io_backend": "direct", "hicache_ratio": 2.0, **arguments},
    )
    context = create_context(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    # The CPU platform has no kernels, and resolves the backend to another.
    overrides = {name: arguments[name] for name in _COPIES & arguments.keys()}
    # Its default on this platform is for the tiny model's server.
    overrides["hicache_swa_host_tile_fraction"] = arguments.get("hicache_swa_host_tile_fraction", 0.5)
    context.override("test", **overrides)
    with use_context(context):
        yield args


def tokens_from(start: int, pages: int) -> array[int]:
    """The tokens of ``pages`` pages: start, start + 1, ..."""
    return array("q", range(start, start + pages * PAGE))


def file_storage(directory: Path) -> dict[str, Any]:
    """Server arguments for L3 in ``directory``, asked for prefixes of any length."""
    return {
        "hicache_storage_backend": "file",
        "file_storage_path": str(directory),
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": 1}),
    }


def stored_files(directory: Path) -> Counter[str]:
    """Files in ``directory`` by pool; a file is <hash>[.<pool>]_tiny<identity>.bin, the anchor's are "kv"."""
    stems = (path.name.split("_tiny")[0] for path in directory.iterdir())
    return Counter(stem.partition(".")[2] or "kv" for stem in stems)


def tree_params(allocator: Any, core: str, **others: Any) -> CacheInitParams:
    """What a tree over ``allocator``'s pools is made with: rows and windows, on tree core ``core``."""
    return CacheInitParams(
        req_to_token_pool=allocator._req_to_token_pool,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        disable=False,
        sliding_window_size=WINDOW,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
        tree_core_backend=core,
        **others,
    )


class TileCache:
    """One rank's pools and tree, inside a ``server_context``. A context; its end ends the threads."""

    def __init__(
        self,
        args: ServerArgs,
        *,
        core: str = "python",
        tiles: int = 8,
        ratios: tuple[int, ...] = RATIOS,
        publishes: bool = False,
        hicache: bool = True,
        tp_group: torch.distributed.ProcessGroup | None = None,
        allocator: TileTokenToKVPoolAllocator | None = None,
    ) -> None:
        """publishes: as on a server, requests publish (see TileRequest), and publish() is refused.

        hicache: with host pools; without, there is the device only. tp_group: ranks that decide together.
        allocator: pools of other sizes than tile_pools(tiles=tiles, ratios=ratios).
        """
        self.allocator = allocator or tile_pools(tiles=tiles, ratios=ratios)
        if publishes:
            # Here and in check(): tests of part 2 run where later parts are missing.
            from sglang.srt.mem_cache.swa_bitexact.attach import attach_capture

            attach_capture(self.allocator)
        self.kvcache = self.allocator.get_kvcache()
        self.req_to_token_pool = self.allocator._req_to_token_pool
        self.params = tree_params(self.allocator, core, swa_gates_prefix_match=True, tp_cache_group=tp_group)
        register_tile_stack()
        self.tree = UnifiedRadixCache(params=self.params)
        if hicache:
            # SGLang leaves 10 GiB to others, which a machine that runs these tests need not have.
            with unittest.mock.patch.object(pool_host, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0):
                self.tree.init_hicache(args, self.params)
            atexit.unregister(self.tree.shutdown)
        self.controller = self.tree.cache_controller

    def __enter__(self) -> TileCache:
        return self

    def __exit__(self, *_: object) -> None:
        if self.controller is not None:
            self.controller._stop_storage_threads()

    def settle(self) -> None:
        """Until no transfer is under way."""
        tree = self.tree
        if self.controller is None:
            return
        for _ in range(500):
            tree.check_hicache_events()
            if not (tree.ongoing_write_through or tree.ongoing_backup or tree.ongoing_load_back):
                return
            time.sleep(0.01)
        raise AssertionError("transfers are still under way after 5 s")

    def check(self, *requests: Any, refused: int = 0) -> None:
        """SGLang's invariants and ours; ``requests``: the TileRequests that hold tiles and locks.

        SGLang's own holds while nothing is locked only. ``refused``: windows that were refused so far.
        """
        from sglang.srt.mem_cache.swa_bitexact.integrity import check_tree

        if not requests:
            self.settle()
            self.tree.sanity_check()
        held = [tile for request in requests if request.req.swa_tiles for tile in request.req.swa_tiles.tiles.values()]
        check_tree(self.tree, held)
        assert self.tree.tile_publisher is None or self.tree.tile_publisher.refused == refused

    def free(self) -> tuple[int, int]:
        """Free tiles, and free FULL pages."""
        return self.allocator.tiles_available, self.allocator.full_available_size() // PAGE

    # Tiles ---------------------------------------------------------------------

    def tile(self, tile_id: int) -> Tile:
        """A copy of one tile."""
        tile = self.kvcache.capture_pool.tile(tile_id)
        return {name: rows.view(torch.uint8).flatten(1) for name, rows in tile.items()}

    def fill(self, tile_id: int, seed: int) -> None:
        """Random bytes, the same for the same seed, into every stream of a tile."""
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.kvcache.capture_pool.buffers.values():
            rows = buffer[:, tile_id].view(torch.uint8)
            rows.copy_(torch.randint(0, 256, rows.shape, generator=generator, dtype=torch.uint8))

    def poison(self) -> None:
        """Overwrite every tile, so that what is equal afterwards was transferred."""
        for buffer in self.kvcache.capture_pool.buffers.values():
            buffer.view(torch.uint8).fill_(0xA5)

    def poison_free_tiles(self) -> None:
        """Overwrite the tiles that nobody owns."""
        self.free()
        tiles = self.allocator.swa_attn_allocator.get_all_free_pages()
        for buffer in self.kvcache.capture_pool.buffers.values():
            buffer.view(torch.uint8)[:, tiles] = 0xA5

    def publish(self, tokens: array[int], end: int, capture: Callable[[int], None]) -> int:
        """Insert the first ``end`` tokens, with fresh FULL rows and a tile at their end.

        ``capture`` is called with the tile's id, which is returned.
        """
        full = self.allocator.full_attn_allocator.alloc(end)
        tile_id = self.allocator.alloc_tiles(1)
        capture(int(tile_id))
        self.allocator.map_tile(full[end - PAGE : end], tile_id)
        self.insert(tokens, full, floor=end - PAGE)
        return int(tile_id)

    def publish_random(self, tokens: array[int], end: int, seed: int) -> Tile:
        """publish() with a tile of random bytes; returns a copy of it."""
        return self.tile(self.publish(tokens, end, lambda tile_id: self.fill(tile_id, seed)))

    def insert(self, tokens: array[int], full: torch.Tensor, *, floor: int, known: int = 0) -> None:
        """Insert ``full``'s tokens; below ``floor`` nothing has a window, ``known`` of them are the tree's."""
        self.tree.insert(
            InsertParams(
                key=RadixKey(tokens[: len(full)]),
                value=full,
                prev_prefix_len=known,
                component_evicted_seqlens={ComponentType.SWA: floor},
            )
        )

    # Reuse ---------------------------------------------------------------------

    def match(self, tokens: array[int]) -> MatchResult:
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def evict_device(self) -> None:
        """Everything leaves the device, and its tiles are overwritten."""
        self.tree.evict(EvictParams(num_tokens=1 << 20, swa_num_tokens=1 << 20))
        self.poison()

    def load_back(self, tokens: array[int]) -> MatchResult:
        """Load what the host has of ``tokens``; the match afterwards."""
        self.tree.load_back_threshold = 0
        assert self.tree.load_back(self.match(tokens).best_match_node)
        self.tree.ready_to_load_host_cache()
        self.settle()
        return self.match(tokens)

    def prefetch(self, tokens: array[int]) -> MatchResult:
        """Read what L3 has of ``tokens`` into host memory; the match afterwards."""
        handle = CacheRequestHandle(rid="prefetch", attempt_id=0)
        self.tree.prefetch_from_storage(handle, self.match(tokens).last_host_node, tokens)
        for _ in range(1000):
            self.tree.check_hicache_events()
            if self.tree.check_prefetch_progress(handle):
                return self.match(tokens)
            time.sleep(0.01)
        raise AssertionError("the prefetch is not done after 10 s")

    def holds(self, match: MatchResult, expected: Tile) -> bool:
        """Whether the end of a device match is mapped to a tile of these bytes."""
        found = self.tile_at(match)
        return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)

    def tile_at(self, match: MatchResult) -> Tile:
        """A copy of the tile that the end of a device match is mapped to."""
        return self.tile(self.tile_id_at(match))

    def tile_id_at(self, match: MatchResult) -> int:
        """The tile that the end of a device match is mapped to."""
        rows = self.tree.path_device_indices(match.last_device_node)[: match.device_prefix_len]
        slots = self.allocator.full_to_swa_index_mapping[rows[-WINDOW:]]
        (tile_id,) = set((slots // PAGE).tolist())
        assert tile_id > 0, "the end of the match is mapped to no tile"
        return int(tile_id)
