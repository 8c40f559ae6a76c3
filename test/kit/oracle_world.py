"""Drives a TileCache and the model of it side by side; every operation ends with a full comparison."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path as Directory
from typing import Any, cast

import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.swa_bitexact import integrity
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.server_args import ServerArgs

from kit.oracle_bytes import Contents, tokens_of
from kit.oracle_model import PAGE, Oracle, Path, Stay, Tier, nominal, prefixes, reusable
from kit.oracle_points import Points
from kit.oracle_watch import StoredFiles, Watch
from kit.tile_cache import TileCache
from kit.tile_requests import TileRequest

TILES, PAGES, SLOTS = 5, 16, 4
RATIOS = (4, 128, 4)


class OracleRequest(TileRequest):
    """A request whose tokens are those of ``path``; ``stay`` is the model's record while it has a slot."""

    def __init__(self, cache: TileCache, path: Path, length: int, *, seed: int) -> None:
        super().__init__(cache, tokens_of(path, length), seed=seed)
        self.path = path
        self.stay: Stay | None = None
        # Of its admission: pages that rows alone would have given it, and whether a load was left out.
        self.nominal, self.rejected = 0, False

    @property
    def known(self) -> int:
        """Tokens of prompt and output."""
        return len(self.req.origin_input_ids) + len(self.req.output_ids)

    @property
    def reusable(self) -> Path:
        """Whole pages that a match may find: the last token must be computed."""
        return self.path[: (self.known - 1) // PAGE]


class OracleWorld:
    """One server after another over ``directory``; with ``hicache`` off, the device alone."""

    def __init__(self, args: ServerArgs, directory: Directory, core: str, *, hicache: bool, stride: int) -> None:
        self.args, self.core, self.hicache = args, core, hicache
        self.oracle = Oracle(TILES, PAGES, stride, host=Tier() if hicache else None)
        self.files = StoredFiles(directory)
        self.count = self.reused = self.compared = 0
        # What storage suffered, what its digests found, and why requests reused less.
        self.tally: Counter[str] = Counter(servers=0, damaged=0, digests=0, quarantined=0)
        self._start_server()

    def _start_server(self) -> None:
        self.oracle.pages = PAGES
        self.cache = TileCache(
            self.args, core=self.core, tiles=TILES, ratios=RATIOS, publishes=True, hicache=self.hicache
        )
        self.planner = self.cache.allocator.capture_planner
        self.planner.stride = self.oracle.stride
        self.points = Points(self.oracle.stride)
        self.watch, self.contents = Watch(self.cache), Contents(self.cache)
        self.running: list[OracleRequest] = []
        self.waiting: list[OracleRequest] = []
        self.flying: list[tuple[Any, list[tuple[Stay, int, bool]]]] = []
        self._clean: tuple[set[int], set[int]] = (set(), set())
        for slot in range(1, SLOTS + 1):
            self.contents.poison_ring(slot)
        self.compare()

    def leave(self) -> None:
        """The server ends; what its storage did is added up."""
        self.tally["servers"] += 1
        self.tally.update(self.points.cuts)
        if self.cache.controller is not None:
            storage = self.cache.controller.storage_backend
            self.tally.update(digests=storage.checked, quarantined=storage.quarantined)
        self.cache.__exit__()

    # Evictions -------------------------------------------------------------------

    def evict_pages(self, pages: int) -> None:
        self.cache.allocator.evict_to_free_tokens(self.cache.tree, pages * PAGE)

    def evict_host(self, count: int, *, windows: bool) -> None:
        if self.hicache:
            self.cache.tree.evict_host(count * PAGE, ComponentType.SWA if windows else ComponentType.FULL)

    # Comparison ------------------------------------------------------------------

    def observe(self) -> None:
        """Take over what was evicted, and compare what is left."""
        device, host = self.watch.look()
        self.oracle.reconcile(
            device, host, evicted=self.watch.evicted, refused=self.watch.refused, settled=self.watch.settled
        )
        self.watch.evicted, self.watch.refused = set(), False

    def compare(self) -> None:
        """Everything that can be looked at without changing anything."""
        self.compared += 1
        self.observe()
        oracle, allocator = self.oracle, self.cache.allocator
        held = []
        for request in self.running:
            table = request.req.swa_tiles.tiles if request.req.swa_tiles else {}
            assert request.stay is not None and {b // PAGE for b in table} == request.stay.tiles
            held += table.values()
        zombies = {id(c.owner): c.owner for plan, _ in self.flying for c in plan.captures if c.owner.released}
        held += [tile for owner in zombies.values() for tile in owner.tiles.values()]
        integrity.check_tree(self.cache.tree, held)
        cuts = self.cache.tree.restore_queue.receipts.counters.cuts
        assert cuts == {**dict.fromkeys(cuts, 0), **self.points.cuts}, f"reasons {cuts}, the model {self.points.cuts}"
        assert self.cache.tree.tile_publisher.refused == 0, "an insert wanted to publish a window without a tile"
        free = (allocator.tiles_available, allocator.full_available_size() // PAGE)
        assert free == (oracle.free_tiles, oracle.free_pages), f"free tiles and pages {free}"
        if not self.running and not held and self.watch.settled:
            self.cache.tree.sanity_check()
        tiles = set(allocator.swa_attn_allocator.get_all_free_pages().tolist())
        pages = set(allocator.full_attn_allocator.get_all_free_pages().tolist())
        self.contents.poison(list(tiles - self._clean[0]), list(pages - self._clean[1]))
        self._clean = tiles, pages

    def expect_rows(self, path: Path, tile_id: int, rows: torch.Tensor) -> None:
        """Tile and pages of ``path`` hold what is computed from its tokens."""
        assert self.contents.tile_is(tile_id, path), f"tile {tile_id} is not the window and states of {path}"
        for n in range(1, len(path) + 1):
            page = int(rows[n * PAGE - 1]) // PAGE
            assert self.contents.page_is(page, path[:n]), f"FULL page {page} is not the rows of {path[:n]}"
        self.reused += 1

    def expect_ring(self, request: OracleRequest) -> None:
        stay, slot = request.stay, int(request.req.kv.req_pool_idx)
        assert stay is not None
        assert self.contents.ring_is(slot, stay.path, stay.done), f"the ring of slot {slot} is not that of a cold run"

    # Matches ---------------------------------------------------------------------

    def expect_match(self, path: Path) -> tuple[int, int, int]:
        """Match ``path`` and compare with the model's gate; (device, device and host, rows alone) in pages."""
        near, device = self.oracle.near, reusable(path, self.oracle.device)
        best, full = reusable(path, *near), nominal(path, *near)
        self.watch.path = path
        match = self.cache.match(tokens_of(path, len(path) * PAGE))
        found = (match.device_prefix_len, self.watch.depth(match.best_match_node) * PAGE, match.full_kv_hit_length)
        expected = (device * PAGE, best * PAGE, full * PAGE)
        assert found == expected, f"device, device and host, rows alone: the tree has {found}, the model {expected}"
        on_host = set() if self.oracle.host is None else self.oracle.host.pages
        host_hit = sum(path[:n] in on_host for n in range(device + 1, best + 1))
        window = int(best > 0 and path[:best] not in self.oracle.device.windows)
        assert (match.host_hit_length, match.swa_host_hit_length) == (host_hit * PAGE, window * PAGE)
        branch = full * PAGE if full > device + host_hit else None
        assert match.swa_branching_seqlen == branch
        if device:
            rows = self.cache.tree.path_device_indices(match.last_device_node)
            self.expect_rows(path[:device], self.cache.tile_id_at(match), rows)
        return device, best, full

    def prefetch(self, path: Path) -> None:
        """Ask storage for what device and host lack of ``path``, as the scheduler does for a waiting request."""
        self.settle()
        self.expect_match(path)
        tree, tokens = self.cache.tree, tokens_of(path, len(path) * PAGE)
        match = self.cache.match(tokens)
        known, best = reusable(path, *self.oracle.near), self.oracle.prefetched(path)
        matched = match.device_prefix_len + match.host_hit_length
        self.count += 1
        handle = CacheRequestHandle(rid=f"prefetch {self.count}", attempt_id=0)
        node = match.last_host_node
        if tree.is_root(node) or tree.is_backuped(node):
            last_hash = tree.get_last_hash_value(node)
            tree.prefetch_from_storage(
                handle, node, tokens[matched:], last_hash, matched_prefix_tokens=tokens[:matched]
            )
        self._until(lambda: tree.check_prefetch_progress(handle))
        self._until(lambda: self.watch.settled)
        got = self.watch.depth(self.cache.match(tokens).best_match_node)
        if got < best:
            # Less is right only where the host is full, or was: then it may be another boundary.
            pool = self.cache.tree.host_pool_group
            free = (pool.available_size() // PAGE, pool.get_pool(PoolName.SWA).available_size() // PAGE)
            alone = bool(self.oracle.unbacked.pages & prefixes(path, len(path)))
            assert alone or free[0] < best - known or free[1] < 1, f"{got} of {best} pages came; free: {free}"
            best = got
            stored = path[:got] in self.oracle.storage.windows and not self.oracle.damaged.windows.get(path[:got])
            assert got <= known or stored
        if best > known:
            assert self.oracle.host is not None
            self.oracle.host.pages |= {path[:n] for n in range(known + 1, best + 1)}
            self.oracle.host.windows.add(path[:best])
        self.observe()
        # Before anything is stored again, see what was damaged, and is out of the way now.
        self.oracle.stored(self.files.look(), settled=False)
        self.expect_match(path)

    def _until(self, done: Any) -> None:
        # Long, since the first prefetch imports modules and a busy machine gives this process little time.
        end = time.monotonic() + 60
        while time.monotonic() < end:
            self.cache.tree.check_hicache_events()
            if done():
                return
            time.sleep(0.0005)
        raise AssertionError("transfers are still under way after 60 s")

    def tick(self) -> None:
        """One look of the scheduler at the transfers, when storage is done with what it was given."""
        controller, tree = self.cache.controller, self.cache.tree
        if controller is not None:
            for _ in range(100_000):
                if controller.ack_backup_queue.qsize() == len(tree.ongoing_backup):
                    break
                time.sleep(0.0005)
            tree.check_hicache_events()

    def settle(self) -> None:
        """Until no transfer is under way; then the tiers' copies are complete."""
        if not self.hicache:
            return
        self._until(lambda: self.watch.settled)
        # What a transfer gave back is free after one more look.
        self.cache.tree.check_hicache_events()
        self.observe()
        self.oracle.stored(self.files.look(), settled=True)
        host = cast(Tier, self.oracle.host)
        for name, owned in ((PoolName.KV, host.pages), (PoolName.SWA, host.windows)):
            pool = self.cache.tree.host_pool_group.get_pool(name)
            free = (pool.available_size() // PAGE, pool.size // PAGE - len(owned))
            assert free[0] == free[1], f"{name} on the host: {free[0]} free, the model has {free[1]}"
