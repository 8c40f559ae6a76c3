"""L3 in a directory, for servers that come and go."""

from __future__ import annotations

import time
from array import array
from pathlib import Path

from sglang.srt.server_args import ServerArgs

from kit.tile_cache import TileCache, file_storage, stored_files
from kit.tile_requests import TileRequest

# Pools with a file for every page, and those with a file for every page that has a window.
COMPRESSED = ("kv", "deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128", "bitexact_page")
TILE = ("swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state", "bitexact_tile")


class TileStorage:
    """Storage for the ``server()`` of one tree core; ``arguments`` are its server arguments."""

    def __init__(self, directory: Path, core: str) -> None:
        self.directory, self.core = directory, core
        self.arguments = file_storage(directory)

    def server(self, args: ServerArgs) -> TileCache:
        """A cache that begins empty, over what is stored."""
        return TileCache(args, core=self.core, publishes=True)

    def holds(self, *, pages: int, tiles: int) -> bool:
        """Whether exactly this many pages are stored, and windows with their states."""
        expected = dict.fromkeys(COMPRESSED, pages) | dict.fromkeys(TILE, tiles)
        return stored_files(self.directory) == {name: count for name, count in expected.items() if count}

    def remove(self, cache: TileCache, pool: str, tokens: array[int]) -> None:
        """Remove one pool's file for the last page of ``tokens``, which ``cache`` has on the device."""
        self.file(cache, pool, tokens).unlink()

    def file(self, cache: TileCache, pool: str, tokens: array[int]) -> Path:
        """One pool's file for the last page of ``tokens``, which ``cache`` has on the device."""
        key = cache.tree.get_last_hash_value(cache.match(tokens).last_device_node)
        (path,) = self.directory.glob(f"{key}.{pool}_tiny*")
        return path


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
