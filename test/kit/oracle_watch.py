"""What a TileCache's tiers hold, without touching a tree's order: nodes by id, storage by file name.

Works with both tree cores: their common interface cannot list nodes, so their ids are collected from
what inserts, prefetches and matches return.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as Directory
from typing import Any

from sglang.srt.mem_cache.swa_bitexact.verified_storage import QUARANTINED
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.utils import get_hash_str

from kit.oracle_bytes import tokens_of
from kit.oracle_model import PAGE, Path, Tier
from kit.tile_cache import TileCache
from kit.tile_storage import COMPRESSED, TILE


class Watch:
    """Follows one cache. evicted: tiers that an eviction walked; refused: the host had no room for a copy."""

    def __init__(self, cache: TileCache) -> None:
        self.cache = cache
        self.evicted: set[str] = set()
        self.refused = False
        # What is inserted or matched now.
        self.path: Path = ()
        self._nodes: dict[Any, Path] = {}
        tree, core = cache.tree, cache.tree.tree_core
        self._after(tree, "insert", lambda result: self.learn(result.last_device_node))
        self._after(core, "insert_host", lambda result: self.learn(result.inserted_host_node))
        self._after(core, "match_prefix", lambda result: self.learn(result.last_visited_node_id))
        self._after(core, "evict_device_start", lambda _: self.evicted.add("device"))
        self._after(core, "drive_host_eviction", lambda _: self.evicted.add("host"))
        self._after(tree, "_execute_kv_backup", self._written)

    @staticmethod
    def _after(owner: Any, name: str, then: Callable[[Any], None]) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            then(result)
            return result

        setattr(owner, name, call)

    def _written(self, rows: Any) -> None:
        self.refused |= rows is None

    def learn(self, node: Any) -> None:
        """A node on the way of ``path``, and those above it."""
        if node is not None:
            for info in self.cache.tree.tree_core.collect_path_info([node])[0]:
                self._nodes[info.node_id] = self.path[: info.path_end // PAGE]

    def depth(self, node: Any) -> int:
        """Pages from the root to the end of a node."""
        (path,) = self.cache.tree.tree_core.collect_path_info([node])
        return path[-1].path_end // PAGE if path else 0

    @property
    def settled(self) -> bool:
        tree = self.cache.tree
        return not (tree.ongoing_write_through or tree.ongoing_backup or tree.ongoing_load_back)

    def look(self) -> tuple[Tier, Tier]:
        """What is on the device and on the host. While transfers are under way, a device window's copy
        is taken for granted."""
        core = self.cache.tree.tree_core
        device, host = Tier(), Tier()
        known, self._nodes = self._nodes, {}
        for node, path in sorted(known.items(), key=lambda item: -len(item[1])):
            if node in self._nodes:
                continue
            try:
                (infos,) = core.collect_path_info([node])
            except KeyError:
                continue
            for info in infos:
                end = info.path_end // PAGE
                if info.node_id not in self._nodes:
                    self._nodes[info.node_id] = path[:end]
                    self._add(info, path[:end], device, host)
        return device, host

    def _add(self, info: Any, path: Path, device: Tier, host: Tier) -> None:
        core, swa = self.cache.tree.tree_core, ComponentType.SWA
        pages = {path[: n + 1] for n in range(info.path_start // PAGE, len(path))}
        has_window = core.get_component_device_value(info.node_id, swa) is not None
        copied = core.component_has_host_value_only(info.node_id, swa)
        if has_window:
            device.windows.add(path)
            # A backup would have nothing to copy.
            copied = core.is_backuped(info.node_id) and swa not in core.build_backup_spec(info.node_id)[1]
        if copied:
            host.windows.add(path)
        assert not (has_window or copied) or len(pages) == 1, f"a window of {len(pages)} pages ends at {path}"
        if info.full_value_len is not None:
            device.pages |= pages
        if core.is_backuped(info.node_id):
            host.pages |= pages


class StoredFiles:
    """What a directory holds, of paths that were seen; a file is <hash>[.<pool>]_tiny<identity>.bin."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._names: dict[str, Path] = {}
        self._seen: set[Path] = set()

    def see(self, path: Path) -> None:
        """``path`` and what it begins with may be stored from now on."""
        if path not in self._seen:
            self._seen.add(path)
            names = get_hash_str(tokens_of(path, len(path) * PAGE), None, PAGE)
            self._names |= {name: path[: n + 1] for n, name in enumerate(names)}

    def look(self) -> Tier:
        """Pages and windows that are stored in all of their pools.

        Raises:
            AssertionError: there is a file of something that was never seen.
        """
        pools: dict[Path, set[str]] = {}
        for file in self.directory.iterdir():
            if file.name.endswith(QUARANTINED):
                continue
            name, _, pool = file.name.split("_tiny")[0].partition(".")
            assert name in self._names, f"{file.name} is stored, and nobody computed its tokens"
            pools.setdefault(self._names[name], set()).add(pool or "kv")
        return Tier(
            {path for path, found in pools.items() if found.issuperset(COMPRESSED)},
            {path for path, found in pools.items() if found.issuperset(TILE)},
        )

    def files(self, path: Path, pool: str) -> list[Directory]:
        """The file of one pool for the last page of ``path``."""
        name = next(name for name, seen in self._names.items() if seen == path)
        return list(self.directory.glob(f"{name}_tiny*" if pool == "kv" else f"{name}.{pool}_tiny*"))
