"""HiCache between device and host: backup, eviction, loads back; any configuration that has it."""

# SGLang is untyped.
# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import hicache, load_back
from sglang.test.kits.unified_radix_cache.config import (
    requires,
    requires_hicache,
    requires_mamba,
    requires_swa,
    requires_swa_only,
)
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix, node_device_value

from upstream.scenarios import observe
from upstream.scenarios.recording import Recording

_no_mamba = requires(lambda cfg: not cfg.has_mamba, "the load of a Mamba state needs a request's slot")


class Host(
    Recording,
    hicache.UnifiedRadixCacheHiCacheFixtures,
    load_back.UnifiedRadixCacheLoadBackFixtures,
):
    def _backed_up(self, pages: int = 3) -> tuple[Any, Any, Any, list[int], Any]:
        """A chain with known bytes, on the host as well; and its rows' bytes."""
        cache, allocator, pool = self._build_hicache_fixture()
        tokens = self._make_seq(1, pages)
        self._insert(cache, allocator, pool, tokens)
        leaf = match_prefix(cache, tokens).last_device_node
        rows = cache.path_device_indices(leaf)
        self._fill_full_kv(allocator, rows, 5)
        if self.cfg.has_mamba:
            self._fill_mamba_state(pool, node_device_value(cache, leaf, ComponentType.MAMBA), 7)
        written = self._snapshot_full_kv(allocator, rows)
        self._backup_node(cache, leaf)
        return cache, allocator, pool, tokens, written

    @requires_hicache
    def test_backup_and_eviction_leave_a_host_hit(self) -> None:
        cache, *_, tokens, _ = self._backed_up()
        self.note_state("backed up", cache)
        self.note_evict("device", cache, num_tokens=self.cfg.kv_size)
        found = self.note_match("host", cache, tokens)
        assert (found.device_prefix_len, found.host_hit_length) == (0, len(tokens))
        for step in range(2):
            cache.evict_host(len(tokens))
            self.note_state(f"host evicted {step}", cache)
            self.note_match(f"after {step}", cache, tokens)

    @requires_hicache
    @_no_mamba
    def test_a_load_brings_the_bytes_back(self) -> None:
        cache, allocator, _, tokens, written = self._backed_up()
        self.note_evict("device", cache, num_tokens=self.cfg.kv_size)
        leaf = match_prefix(cache, tokens).best_match_node
        self.note("loaded", self._load_back_node(cache, leaf))
        found = self.note_match("device again", cache, tokens)
        assert found.device_prefix_len == len(tokens)
        read = self._snapshot_full_kv(allocator, cache.path_device_indices(found.last_device_node))
        for ours, theirs in zip(read, written, strict=True):
            assert ours.equal(theirs)
        self.note("bytes", read)
        self.note_state("loaded", cache)

    @requires_hicache
    def test_an_admission_starts_the_load(self) -> None:
        cache, allocator, pool, tokens, written = self._backed_up()
        self.note_evict("device", cache, num_tokens=self.cfg.kv_size)
        request = self._load_back_through_admission(cache, pool, tokens)
        self.note("request", [request.prefix_len, request.host_hit_length, request.swa_host_hit_length])
        self._finish_pending_loads(cache)
        self._release_ongoing_load_back_locks(cache)
        found = self.note_match("device again", cache, tokens)
        read = self._snapshot_full_kv(allocator, cache.path_device_indices(found.last_device_node))
        assert read[0].equal(written[0])
        if self.cfg.has_mamba and request.kv.mamba_pool_idx is not None:
            self.note("state", self._snapshot_mamba_state(pool, request.kv.mamba_pool_idx))
        self.note_state("loaded", cache)

    @requires_hicache
    def test_branches_are_backed_up_parents_first(self) -> None:
        cache, allocator, pool = self._build_hicache_fixture()
        trunk = self._make_seq(1, 3)
        for tokens in (trunk, trunk[: self.cfg.page_size] + self._make_seq(9000, 2)):
            self._insert(cache, allocator, pool, tokens)
        self._backup_tree(cache)
        self.note_state("backed up", cache)
        self.note_evict("device", cache, num_tokens=2 * self.cfg.page_size)
        self.note_match("trunk", cache, trunk)
        chain = self._path_chain(cache, match_prefix(cache, trunk).best_match_node)
        self.note("tokens", self._match_tokens_for_chain(cache, chain))

    @requires_hicache
    @requires_mamba
    def test_an_inner_node_with_a_state(self) -> None:
        for policy in ("write_through", "write_back"):
            cache, _, tokens = self._build_internal_mamba_fixture(policy)
            self.note_match(policy, cache, tokens)
            self.note_evict(policy, cache, mamba_num=1)
            self.note_match(f"{policy}, evicted", cache, tokens)

    @requires_hicache
    @requires_swa
    def test_an_inner_node_with_a_window(self) -> None:
        for policy in ("write_through", "write_back"):
            cache, _, shorter, longer = self._build_internal_swa_fixture(policy)
            for _ in range(2):
                self.note_match(policy, cache, shorter)
                self.note_match(policy, cache, longer)
                self.note_evict(policy, cache, swa_num_tokens=self.cfg.page_size)

    @requires_swa_only
    def test_a_window_on_the_host_alone(self) -> None:
        cache, _, _, chain, pages = self._swa_finalize_setup()
        self.note_state("host-backed", cache)
        self._set_aux_host_tombstone(cache, chain[-1], ComponentType.SWA)
        tokens = self._swa_anchor_chain_tokens(len(chain))
        self.note("window pages", pages)
        self.note_match("tombstone at the end", cache, tokens)
        self._evict_device_component(cache, chain[0], ComponentType.SWA)
        self.note_match("and at the start", cache, tokens)
        self.note_match("short", cache, tokens[: self.cfg.page_size])

    @requires_swa_only
    def test_a_hole_before_the_window(self) -> None:
        cache, _, _, _, _, tokens = self._swa_anchor_setup()
        for pages in range(1, len(tokens) // self.cfg.page_size + 1):
            self.note_match(f"{pages} pages", cache, tokens[: pages * self.cfg.page_size])

    def test_a_simulated_backup(self) -> None:
        cache, allocator, pool = build_fixture(self.cfg)
        tokens = self._make_seq(1, 3)
        self.note("insert", observe.insert(self._insert(cache, allocator, pool, tokens)))
        self._simulate_backup_tree(cache)
        self.note_match("on both", cache, tokens)
        self.note_state("on both", cache)
