"""The tree on the device: sharing, splitting, locks, eviction, requests; any configuration."""

# SGLang is untyped.
# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

import random
from typing import Any

from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import core, insert_walk
from sglang.test.kits.unified_radix_cache.config import (
    requires,
    requires_full_swa_ps1,
    requires_swa_only,
)
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from sglang.test.mem_cache_utils import finish_req

from upstream.scenarios import observe
from upstream.scenarios.recording import Recording

_page_sized_window = requires(lambda cfg: cfg.sliding_window_size % cfg.page_size == 0, "window of whole pages")
_lock_path_fits = requires(
    lambda cfg: 2 * cfg.sliding_window_size * cfg.page_size <= cfg.kv_size, "two windows' count of pages fits"
)
_no_mamba = requires(lambda cfg: not cfg.has_mamba, "requests here carry no Mamba state")


class Tree(Recording, core.UnifiedRadixCacheCoreFixtures):
    def _family(self) -> tuple[Any, Any, Any, list[list[int]]]:
        """A cache with a trunk, two branches off its middle, and a stranger."""
        cache, allocator, pool = build_fixture(self.cfg)
        trunk = self._make_seq(1, 4)
        head = trunk[: 2 * self.cfg.page_size]
        chains = [trunk, head + self._make_seq(10_000, 2), head + self._make_seq(20_000, 1), self._make_seq(30_000, 2)]
        for number, tokens in enumerate(chains):
            result = self._insert(cache, allocator, pool, tokens, priority=number)
            self.note(f"insert {number}", observe.insert(result))
        return cache, allocator, pool, chains

    def test_chains_share_and_split(self) -> None:
        cache, allocator, pool, chains = self._family()
        self.note_state("inserted", cache)
        for number, tokens in enumerate(chains):
            found = self.note_match(f"match {number}", cache, tokens)
            assert found.device_prefix_len == len(tokens)
            self.note_match(f"match beyond {number}", cache, [*tokens, *self._make_seq(90_000, 1)])
            self.note_match(f"match inside {number}", cache, tokens[:-1])
        self.note("again", observe.insert(self._insert(cache, allocator, pool, chains[0])))
        self.note_state("inserted again", cache)

    def test_names_keep_chains_apart(self) -> None:
        cache, allocator, pool = build_fixture(self.cfg)
        tokens = self._make_seq(1, 2)
        for name in (None, "a", "b"):
            result = self._insert(cache, allocator, pool, tokens, extra_key=name, cache_salt=name and f"{name} salt")
            assert result.prefix_len == 0
            self.note(f"insert {name}", observe.insert(result))
        self.note_match("unnamed", cache, tokens)
        self.note_state("inserted", cache)

    def test_eviction_in_steps(self) -> None:
        cache, *_, chains = self._family()
        page = self.cfg.page_size
        for step in range(4):
            self.note_evict(f"step {step}", cache, num_tokens=page)
            if self.cfg.has_swa:
                self.note_evict(f"windows {step}", cache, swa_num_tokens=page)
            if self.cfg.has_mamba:
                self.note_evict(f"states {step}", cache, mamba_num=1)
            for number, tokens in enumerate(chains):
                self.note_match(f"match {step} {number}", cache, tokens)
        self.note_evict("rest", cache, num_tokens=self.cfg.kv_size)
        assert match_prefix(cache, chains[0]).device_prefix_len == 0

    def test_a_lock_holds_against_eviction(self) -> None:
        cache, *_, chains = self._family()
        leaf = match_prefix(cache, chains[1]).last_device_node
        lock = cache.lock(leaf)
        self.note_state("locked", cache)
        self.note_evict("evicted", cache, num_tokens=self.cfg.kv_size)
        assert self.note_match("held", cache, chains[1]).device_prefix_len == len(chains[1])
        cache.release_swa(lock)
        self.note_evict("window released", cache, num_tokens=1, swa_num_tokens=self.cfg.kv_size)
        cache.unlock(lock)
        self.note_evict("unlocked", cache, num_tokens=self.cfg.kv_size)

    @_no_mamba
    def test_a_request_is_published_in_chunks(self) -> None:
        cache, allocator, pool = build_fixture(self.cfg)
        page = self.cfg.page_size
        tokens, answer = self._make_seq(1, 3), self._make_seq(50_000, 1)
        request, rows = self._make_inflight_req(cache, allocator, pool, tokens, answer, allocated=True)
        request.lock = cache.lock(request.last_node)
        for pages in (1, 3):
            cache.checkpoint(request, up_to=pages * page)
            self.note(f"row after {pages}", pool.req_to_token[request.kv.req_pool_idx, : len(rows)])
            self.note_match(f"match after {pages}", cache, [*tokens, *answer])
            self.note_state(f"after {pages}", cache)
        finish_req(cache, request, len(rows))
        assert self.note_match("finished", cache, [*tokens, *answer]).device_prefix_len == 4 * page
        self.note_state("finished", cache)
        follower, _ = self._make_inflight_req(cache, allocator, pool, [*tokens, *answer], allocated=True)
        follower.lock = cache.lock(follower.last_node)
        finish_req(cache, follower, 4 * page)
        self.note_state("a second of the same tokens", cache)

    @requires_swa_only
    def test_a_branch_point_and_an_early_release(self) -> None:
        cache, allocator, pool = build_fixture(self.cfg)
        page = self.cfg.page_size
        tokens = self._make_seq(1, 4)
        request, rows = self._make_inflight_req(cache, allocator, pool, tokens, allocated=True)
        request.lock = cache.lock(request.last_node)
        request.swa_branching_seqlen = 2 * page
        cache.checkpoint(request, up_to=4 * page)
        self.note("branch point", [request.swa_branching_seqlen, request.kv.cache_protected_len])
        assert self.note_match("cut", cache, tokens).device_prefix_len == 2 * page
        cache.release_swa_prefix_lock(request)
        # A window as long as the prefix is locked up to the root, and kept.
        self.note("released", request.lock.swa_released)
        self.note_state("after", cache)
        self.note_evict("windows", cache, swa_num_tokens=self.cfg.kv_size)
        finish_req(cache, request, len(rows))
        self.note_match("finished", cache, tokens)
        self.note_state("finished", cache)

    @requires_swa_only
    def test_lru_order_of_windows(self) -> None:
        cache, *_, chains = self._family()
        for number, tokens in enumerate(chains):
            self.note("match", observe.match(match_prefix(cache, tokens)))
            self.note(f"order {number}", self._swa_lru_order(cache))
        self.note("pinning fits", self._swa_pinning_cfg_supported())


class Walk(
    Recording,
    insert_walk.ResumableInsertWalkSWAFixtures,
    insert_walk.SegmentLockProtocolFixtures,
    insert_walk.SegmentLockFuzzFixtures,
):
    @requires_swa_only
    @_page_sized_window
    def test_an_insert_brings_evicted_windows_back(self) -> None:
        for lock_full in (False, True):
            result, length = self._recover_swa_tombstone_with_tracking(lock_full=lock_full)
            self.note(f"lock {lock_full}", [observe.insert(result), length, result.adopted_ranges])

    @requires_swa_only
    @_lock_path_fits
    def test_a_lock_covers_its_window(self) -> None:
        cache, allocator, leaf = self._leaf_with_lock_path()
        self.note("nodes", [self._segment(cache, leaf, self.cfg.sliding_window_size), self._full_path(cache, leaf)])
        receipt = cache.inc_lock_ref(leaf)
        self.note_state("locked", cache)
        self.note("boundaries", sorted(uuid is not None for uuid in receipt.component_lock_uuids.values()))
        self.note("locks", self._locked_path_state(cache, allocator, leaf))
        self.note("window lock", self._swa_ref(cache, leaf))
        cache.dec_lock_ref(leaf, receipt.to_dec_params())
        self.note_state("released", cache)

    @requires_swa_only
    @_lock_path_fits
    def test_a_receipt_of_another_node_is_rejected(self) -> None:
        cache, allocator, leaf = self._leaf_with_lock_path()
        other = cache.root_node_handle()
        receipt = cache.inc_lock_ref(leaf)
        self._assert_unanchored_release_rejected(
            cache,
            allocator,
            leaf,
            lambda: cache.dec_lock_ref(other, receipt.to_dec_params()),
            lambda: cache.dec_lock_ref(leaf, receipt.to_dec_params()),
        )

    @requires_full_swa_ps1
    def test_random_steps_at_page_1(self) -> None:
        for seed in (1, 2, 3):
            self._run_seed(seed)

    @_no_mamba
    def test_random_steps(self) -> None:
        """Page-aligned, so at any page size: insert, match, lock, unlock, evict."""
        rng, page = random.Random(5), self.cfg.page_size
        cache, allocator, pool = build_fixture(self.cfg)
        chains: list[list[int]] = []
        locks: list[Any] = []
        for step in range(40):
            choice = rng.random()
            if choice < 0.4 or not chains:
                base = rng.choice(chains)[: page * rng.randrange(1, 3)] if chains and rng.random() < 0.6 else []
                tokens = base + self._make_seq(1000 * (step + 1), rng.randrange(1, 3))
                if allocator.available_size() < len(tokens):
                    self.note_evict(f"{step} evict", cache, num_tokens=len(tokens))
                if min(observe.free_rows(allocator)) >= len(tokens):
                    self._insert(cache, allocator, pool, tokens)
                    chains.append(tokens)
            elif choice < 0.6:
                leaf = self.note_match(f"{step} match", cache, rng.choice(chains)).last_device_node
                if not cache.is_root(leaf):
                    locks.append(cache.lock(leaf))
            elif choice < 0.75 and locks:
                cache.unlock(locks.pop(rng.randrange(len(locks))))
            else:
                amounts = {"num_tokens": page * rng.randrange(3)}
                if ComponentType.SWA in self.cfg.components:
                    amounts["swa_num_tokens"] = page * rng.randrange(3)
                self.note_evict(f"{step} evict", cache, **amounts)
        for lock in locks:
            cache.unlock(lock)
        self.note_state("end", cache)
