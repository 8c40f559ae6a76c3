"""L3 in a directory, for servers that come and go."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.server_args import ServerArgs

from kit.tile_cache import TileCache, file_storage, stored_files
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest

# Pools with a file for every page, and those with a file for every page that has a window.
COMPRESSED = ("kv", "deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128", "bitexact_page")
TILE = ("swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state", "bitexact_tile")


class TileStorage:
    """Storage for the ``server()`` of one tree core; ``arguments`` are its server arguments."""

    def __init__(self, directory: Path, core: str) -> None:
        self.directory, self.core = directory, core
        self.arguments = file_storage(directory)

    def server(self, args: ServerArgs, **others: Any) -> TileCache:
        """A cache that begins empty, over what is stored; ``others`` are TileCache's."""
        return TileCache(args, core=self.core, publishes=True, **others)

    def holds(self, *, pages: int, tiles: int) -> bool:
        """Whether exactly this many pages are stored, and windows with their states."""
        expected = dict.fromkeys(COMPRESSED, pages) | dict.fromkeys(TILE, tiles)
        return stored_files(self.directory) == {name: count for name, count in expected.items() if count}

    def path(self, cache: TileCache, pool: str, tokens: array[int]) -> Path:
        """One pool's file for the last page of ``tokens``, which ``cache`` has on the device with a tile."""
        key = cache.tree.get_last_hash_value(cache.match(tokens).last_device_node)
        (path,) = self.directory.glob(f"{key}_tiny*" if pool == "kv" else f"{key}.{pool}_tiny*")
        return path

    def remove(self, cache: TileCache, pool: str, tokens: array[int]) -> None:
        """Remove the file of path()."""
        self.path(cache, pool, tokens).unlink()


def wait_for_storage(cache: TileCache) -> None:
    """Until storage is done with everything that it was given; the scheduler does not look."""
    for _ in range(500):
        if cache.controller.ack_backup_queue.qsize() == len(cache.tree.ongoing_backup):
            return
        time.sleep(0.01)
    raise AssertionError("storage is not done after 5 s")


def computed(cache: TileCache, tokens: array[int], end: int, *captures: int, seed: int) -> TileRequest:
    """A finished request that computed everything that was not on the device, and its backups."""
    request = TileRequest(cache, tokens, seed=seed).admit(loads=False).extend(end, *captures).finish()
    cache.settle()
    return request


def host_free(cache: TileCache) -> tuple[int, int]:
    """Free pages and free tiles on the host, as (pages, tiles)."""
    group = cache.tree.host_pool_group
    return group.available_size() // PAGE, group.available_size(PoolName.SWA) // PAGE


def emptied(cache: TileCache) -> tuple[tuple[int, int], tuple[int, int]]:
    """Everything leaves device and host; then what is free: (tiles, pages), and (pages, tiles) on the host.

    What is missing of the pools' sizes was leaked, or is locked by someone.
    """
    cache.settle()
    cache.evict_device()
    for component in (ComponentType.SWA, ComponentType.FULL):
        cache.tree.evict_host(1 << 20, component)
    for _ in range(3):
        cache.tree.check_hicache_events()
    return cache.free(), host_free(cache)


def host_size(cache: TileCache) -> tuple[int, int]:
    """Pages and tiles of the host pools."""
    group = cache.tree.host_pool_group
    return group.size // PAGE, group.get_pool(PoolName.SWA).size // PAGE


def start_prefetch(cache: TileCache, tokens: array[int], rid: str) -> CacheRequestHandle:
    """Ask storage for ``tokens``; nobody looks at what comes back."""
    handle = CacheRequestHandle(rid=rid, attempt_id=0)
    cache.tree.prefetch_from_storage(handle, cache.match(tokens).last_host_node, tokens)
    return handle


def events_until(cache: TileCache, done: Callable[[], bool]) -> None:
    """The scheduler's looks at HiCache, until ``done``; AssertionError after 10 s."""
    for _ in range(1000):
        cache.tree.check_hicache_events()
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("still not done after 10 s")
