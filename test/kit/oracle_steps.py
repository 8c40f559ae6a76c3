"""What requests do in an OracleWorld, from admission to their end, step by step as a scheduler does it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.swa_bitexact.evict import evict_tiles
from sglang.srt.mem_cache.swa_bitexact.tile_table import CapturePlan

from kit.oracle_bytes import STATES, tokens_of
from kit.oracle_model import PAGE, Path, Stay, reusable
from kit.oracle_world import OracleRequest, OracleWorld
from kit.tile_storage import COMPRESSED, TILE


class OracleSteps(OracleWorld):
    """The operations. Each leaves real caches and model equal; compare() finds where they are not."""

    # Admission -------------------------------------------------------------------

    def start(self, path: Path, length: int, *, loads: bool) -> OracleRequest:
        self.count += 1
        return self.admit(OracleRequest(self.cache, path, length, seed=self.count), loads=loads)

    def admit(self, request: OracleRequest, *, loads: bool) -> OracleRequest:
        """Match, load, lock: what is reused is what the model says, or the device's part if there is no room."""
        path = request.reusable
        device, best, rows_alone = self.expect_match(path)
        pages, tiles = self.oracle.to_load(path)
        request.match(for_reuse=False).admit(loads=loads)
        got = request.req.prefix_len // PAGE
        if loads and best > device and got == best:
            self.oracle.load(path, best)
        else:
            assert got == device, f"{got} pages are reused, the device has {device}, device and host {best}"
        branch = request.req.swa_branching_seqlen
        request.stay = Stay(request.path, request.known, got * PAGE, got, branch and branch // PAGE)
        request.nominal, request.rejected = rows_alone, device == got < best
        self.oracle.stays.append(request.stay)
        self.running.append(request)
        self.observe()
        if loads and got < best:
            free = self.cache.free()
            assert free[1] < pages or free[0] < tiles, (
                f"{pages} pages, {tiles} tiles were not loaded; free {free[::-1]}"
            )
        return request

    # Steps -----------------------------------------------------------------------

    def _room(self, *parts: tuple[OracleRequest, int]) -> bool:
        """Evict for the rows that a step needs; without room its requests are dropped."""
        held = [-(-request.stay.done // PAGE) for request, _ in parts if request.stay is not None]
        needed = sum(-(-end // PAGE) for _, end in parts) - sum(held)
        self.cache.allocator.evict_to_free_tokens(self.cache.tree, needed * PAGE)
        self.observe()
        if self.oracle.free_pages >= needed:
            return True
        for request, _ in parts:
            self.drop(request, OracleRequest.abort)
        return False

    def chunk(self, *parts: tuple[OracleRequest, int], publish: bool) -> None:
        """One prefill step of (request, end in tokens)."""
        if not self._room(*parts):
            return
        for request, end in parts:
            new = not request.req.kv.holds_kv
            request.take_rows(end)
            if new:
                self._restore(request)
        stays = [(cast(Stay, request.stay), end) for request, end in parts]
        wanted = [(stay, n) for stay, end in stays for n in self.oracle.placed(stay, end)]
        batch = SimpleNamespace(
            reqs=[request.req for request, _ in parts],
            prefix_lens=[request.req.prefix_len for request, _ in parts],
            extend_lens=[end - request.req.prefix_len for request, end in parts],
            tree_cache=self.cache.tree,
        )
        plan = self.planner.plan_extend(cast(ScheduleBatch, batch))
        self._planned(plan, wanted, decode=False)
        if plan is not None:
            self._capture_flat(plan, [(stay.path, stay.done, end) for stay, end in stays])
        for request, end in parts:
            self._computed(request, end)
        self._capture_at_end(plan)
        for request, end in parts:
            if publish:
                self.watch.path = request.path
                request.checkpoint()
                self._published(request)
            else:
                request.req.prefix_len = end

    def decode(self, requests: list[OracleRequest], end: int) -> None:
        """Decode steps up to ``end`` tokens, at most to the next boundary; ``end`` is the shortest one's."""
        steps = end - min(cast(Stay, request.stay).done for request in requests)
        parts = [(request, cast(Stay, request.stay).done + steps) for request in requests]
        if not self._room(*parts):
            return
        for request, end in parts:
            stay = cast(Stay, request.stay)
            stay.path = request.path = (*request.path, *(0,) * (end // PAGE + 1 - len(request.path)))
            tokens = tokens_of(request.path, end + 1)
            request.req.output_ids.extend(tokens[request.known :])
            request.req.refresh_fill_ids()
            request.take_rows(end)
            self._computed(request, end)
        wanted = [(cast(Stay, r.stay), end // PAGE) for r, end in parts if end % PAGE == 0]
        wanted = [(stay, n) for stay, n in wanted if n not in stay.tiles]
        if wanted:
            self.oracle.superseded(wanted)
        batch = SimpleNamespace(
            reqs=[request.req for request in requests],
            seq_lens_cpu=torch.tensor([end for _, end in parts]),
            tree_cache=self.cache.tree,
        )
        plan = self.planner.plan_decode(cast(ScheduleBatch, batch))
        self._planned(plan, wanted, decode=True)
        self._capture_at_end(plan)

    def _computed(self, request: OracleRequest, end: int) -> None:
        """Rings and pages get what computing [done, end) writes."""
        stay, slot, rows = cast(Stay, request.stay), int(request.req.kv.req_pool_idx), request.rows
        self.contents.write_ring(stay.path, slot, stay.done, end)
        for n in range(stay.done // PAGE + 1, end // PAGE + 1):
            self.contents.write_page(int(rows[n * PAGE - 1]) // PAGE, stay.path[:n])
        stay.done = end
        self.expect_ring(request)

    def _restore(self, request: OracleRequest) -> None:
        """The slot just taken is restored as the forward does it, from the tile of its prefix."""
        stay, slot = cast(Stay, request.stay), int(request.req.kv.req_pool_idx)
        plan = request.take_restores()
        assert plan is not None and (plan.slots, plan.boundaries) == ([slot], [stay.done])
        self.points.take(request.reusable, stay.published, request.nominal, rejected=request.rejected)
        # The last step of the slot's former owner may come behind the scheduler's clear.
        self.contents.poison_ring(slot)
        self.cache.kvcache.tile_reader.restore(plan)
        if plan.layer_wise:
            for layer, ratio in enumerate(self.cache.kvcache.compression_ratios):
                self.cache.kvcache.get_unified_kv(layer)
                if ratio == 4:
                    self.cache.kvcache.get_attention_compress_states(layer)
                    self.cache.kvcache.get_indexer_compress_states(layer)
        if stay.done:
            self.expect_rows(stay.path[: stay.published], int(plan.tile_ids), request.rows)
        self.expect_ring(request)

    def _planned(self, plan: CapturePlan | None, wanted: list[tuple[Stay, int]], *, decode: bool) -> None:
        """The plan is the model's; it may end early where tiles are short and nothing can be evicted."""
        stays = {id(request.req.swa_tiles): cast(Stay, request.stay) for request in self.running}
        got = [(stays[id(c.owner)], c.boundary // PAGE) for c in (plan.captures if plan is not None else ())]
        expected = self.oracle.ranked(wanted)
        assert [(id(stay), n) for stay, n in got] == [(id(stay), n) for stay, n in expected[: len(got)]]
        self.oracle.capture(got)
        for stay, n in expected[len(got) :]:
            stay.dropped[n] = decode
        self.observe()
        if len(got) < len(wanted):
            unlocked = self.oracle.device.windows - self.oracle.locked().pages
            assert self.oracle.free_tiles == 0 and not (self.watch.settled and unlocked), "dropped with tiles to be had"
        if plan is not None:
            self.flying.append((plan, [(stay, n, decode) for stay, n in got]))

    def _capture_flat(self, plan: CapturePlan, parts: list[tuple[Path, int, int]]) -> None:
        writer = self.cache.kvcache.tile_writer
        for stream, layers in writer.layer_index.items():
            for layer_id, layer in layers.items():
                flat = self.contents.flat(stream, layer, parts)
                if stream in STATES:
                    writer.state_rows(layer_id, flat, plan, is_indexer=stream == "indexer_state")
                else:
                    writer.window_rows(layer_id, flat, None, plan)

    def _capture_at_end(self, plan: CapturePlan | None) -> None:
        if plan is not None:
            self.cache.kvcache.tile_writer.windows_at_end(plan)
            self.cache.kvcache.tile_writer.states_at_end(plan)

    def land(self) -> None:
        """The oldest step's result is processed."""
        if self.flying:
            plan, captures = self.flying.pop(0)
            self.planner.finish(plan)
            self.oracle.finish(captures)

    # Ends ------------------------------------------------------------------------

    def _published(self, request: OracleRequest) -> None:
        stay = cast(Stay, request.stay)
        captured, dropped = self.oracle.publish(stay)
        self.observe()
        self.points.publish(stay, captured, dropped, *self.oracle.near)
        self.files.see(stay.path[: stay.published])

    def drop(self, request: OracleRequest, how: Callable[[OracleRequest], object]) -> None:
        """A request ends by ``how``, or is unlocked if it never got a slot."""
        stay, slot = cast(Stay, request.stay), request.req.kv.req_pool_idx
        self.watch.path = request.path
        if request.req.kv.holds_kv:
            how(request)
        else:
            # What was queued to be loaded for it is loaded all the same.
            self.cache.tree.ready_to_load_host_cache()
            self.cache.tree.unlock(request.req.lock)
        self.running.remove(request)
        if how is OracleRequest.finish and slot is not None:
            self._published(request)
        elif how is OracleRequest.retract and slot is not None:
            self.waiting.append(request)
        self.oracle.release(stay)
        request.stay = None
        if slot is not None:
            self.contents.poison_ring(int(slot))

    # Evictions -------------------------------------------------------------------

    def evict_windows(self, count: int) -> None:
        """As a shortage of tiles does: inner carriers first."""
        before = set(self.oracle.device.pages)
        evict_tiles(self.cache.tree, count)
        self.observe()
        if before != self.oracle.device.pages and self.watch.settled:
            parents = {path[:-1] for path in self.oracle.device.pages}
            inner = (self.oracle.device.windows & parents) - self.oracle.locked().pages
            assert not inner, f"a leaf went, and inner windows could have: {inner}"

    # Servers ---------------------------------------------------------------------

    def idle(self) -> None:
        """All requests end, and all steps' results are processed."""
        for request in list(self.running):
            self.drop(request, OracleRequest.finish)
        while self.flying:
            self.land()
        self.waiting.clear()
        self.settle()
        self.compare()

    def flush(self, pages: int) -> None:
        """The cache is emptied, and has ``pages`` FULL pages from now on."""
        self.idle()
        self.cache.tree.reset()
        self.points.fates.clear()
        self.cache.req_to_token_pool.clear()
        size = SimpleNamespace(full_max_total_num_tokens=pages * PAGE, swa_max_total_num_tokens=pages * PAGE)
        self.cache.allocator.resize(size)
        self.oracle.empty()
        self.oracle.pages = pages

    def restart(self, lost: tuple[int, int, str]) -> Path:
        """Another server over the same directory, where a file was damaged meanwhile: (path, pool, how).

        how: "gone", "short", or "changed" for one byte.

        Returns the path; () if nothing is stored.
        """
        self.idle()
        self.leave()
        stored = sorted(self.oracle.storage.windows)
        path: Path = stored[lost[0] % len(stored)] if stored else ()
        if path:
            pools = (*TILE, *COMPRESSED, "none")
            pool, how = pools[lost[1] % len(pools)], lost[2]
            kind = int(pool in TILE)
            damaged = self.oracle.damaged.kinds()[kind]
            for file in self.files.files(path, pool):
                self.tally["damaged"] += 1
                if how == "gone":
                    file.unlink()
                    self.oracle.storage.kinds()[kind].discard(path)
                    damaged.get(path, set()).discard(pool)
                    continue
                content = bytearray(file.read_bytes())
                # The rows' own file is empty: it stands for those of the other pools.
                if content:
                    at = lost[0] * len(content) // 10
                    content[at] = (content[at] + 1) % 256
                    file.write_bytes(content if how == "changed" else content[: len(content) // 2])
                    damaged.setdefault(path, set()).add(pool)
        self.oracle.empty()
        self._start_server()
        return path

    def close(self) -> None:
        """The end: nothing is lost, and everything that can be reused holds the right bytes."""
        self.idle()
        for path in sorted(self.oracle.device.pages):
            if reusable(path, self.oracle.device) == len(path):
                self.expect_match(path)
        self.compare()
