"""Fixtures that are tied to one configuration or one mechanism; each makes its own cache."""

# SGLang is untyped.
# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

from array import array
from types import SimpleNamespace

from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedLRUList, UnifiedRadixCache
from sglang.test.kits.unified_radix_cache import core, insert_walk, kv_events, load_back, storage
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix, node_device_value
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures
from sglang.test.mem_cache_utils import finish_req
from sglang.test.test_utils import CustomTestCase

from upstream.scenarios import observe
from upstream.scenarios.recording import Recording

_FULL, _SWA, _MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA


class EvictionForAllocation(
    Recording,
    core.UnifiedRadixAllocationEvictionRealComponentsFixtures,
    CustomTestCase,
):
    _SHORTFALL = 2

    def test_it_stops_once_there_is_room(self) -> None:
        for component in (_SWA, _MAMBA):
            for sessions in core.session_radix_cache_test_values():
                cache, *nodes = self._build_internal_chain(component, sessions)
                result, drains = self._evict_for_alloc_after_first_drain(cache, component)
                self.note("evicted", [observe.evict(result), drains])
                self.note("left", [node_device_value(cache, node, component) for node in nodes])


class Disabled(Recording, core.DisabledUnifiedRadixCacheFixtures, CustomTestCase):
    def test_it_holds_nothing(self) -> None:
        cache = UnifiedRadixCache(params=self._params(disable=True))
        self.note("insert", observe.insert(cache.insert(InsertParams(key=RadixKey(array("q", [1, 2]))))))
        self.note("match", observe.match(match_prefix(cache, [1, 2])))
        self.note("events", [type(event).__name__ for event in cache.take_events()])


class LruOrder(Recording, core.UnifiedLRUListBoundedRefreshFixtures, CustomTestCase):
    components = (_FULL, _SWA)

    def test_moves_keep_the_others_order(self) -> None:
        _, nodes = self._build_chain([4, 4, 8])
        lru = UnifiedLRUList(_SWA, self.components)
        for node in nodes:
            lru.insert_mru(node)
        self.note("inserted", [nodes.index(node) for node in self._lru_order(lru)])
        lru.reset_node_mru(nodes[0])
        lru.remove_node(nodes[1])
        lru.insert_after(nodes[2], nodes[1])
        self.note("moved", [nodes.index(node) for node in self._lru_order(lru)])


class MambaStates(
    Recording,
    core.MambaCheckpointGridFixtures,
    core.UnifiedMambaLRUMatchRefreshFixtures,
    CustomTestCase,
):
    cfg = CacheConfig(
        components=(_FULL, _MAMBA),
        enable_mamba_extra_buffer=True,
        mamba_cache_size=60,
        kv_size=1024,
        max_context_len=1024,
    )

    def test_branching_follows_the_grid(self) -> None:
        for page, hit in ((1, 130), (64, 192), (128, 256)):
            self.note(f"page {page}", self._branching_seqlen(tree_page_size=page, full_hit_length=hit))

    def test_a_match_refreshes_states(self) -> None:
        cache, allocator, pool = build_fixture(self.cfg)
        chains = [list(range(1, 4)), list(range(1, 7)), list(range(50, 54))]
        for tokens in chains:
            state = self._make_req(pool).kv.mamba_pool_idx.unsqueeze(0)
            key = RadixKey(array("q", tokens))
            cache.insert(InsertParams(key=key, value=allocator.alloc(len(tokens)), mamba_value=state))
        for tokens in chains:
            self.note("match", observe.match(match_prefix(cache, tokens)))
            self.note("order", self._mamba_lru_mru_to_lru(cache))


class MambaOvershoot(Recording, core.MambaFinishedOvershootCheckpointFixtures, CustomTestCase):
    cfg = CacheConfig(page_size=4, components=(_FULL, _MAMBA), enable_mamba_extra_buffer=True, mamba_cache_size=60)
    _rid = 0

    def test_a_finished_request_keeps_a_checkpoint(self) -> None:
        for previous in (None, 4, 8):
            cache, allocator, pool = build_fixture(self.cfg)
            request, tokens = self._build_req(allocator, pool, previous)
            request.full_untruncated_fill_ids = array("q", tokens)
            request.last_node = cache.root_node_handle()
            request.lock = None
            finish_req(cache, request, len(tokens))
            self.note(f"previous {previous}", observe.match(match_prefix(cache, tokens)))
            self.note_state(f"previous {previous}", cache)


class Int8States(Recording, core.UnifiedRadixCacheInt8MambaCheckpointFixtures, CustomTestCase):
    cfg = CacheConfig(components=(_FULL, _MAMBA), enable_int8_mamba_checkpoint=True)

    def test_a_finished_request(self) -> None:
        cache, allocator, pool = build_fixture(self.cfg)
        tokens = list(range(1, 9))
        self._finished_req(cache, allocator, pool, tokens)
        self.note_match("finished", cache, tokens)
        self.note_state("finished", cache)


class DraftHistory(Recording, core.SWADraftHistoryFixtures, CustomTestCase):
    cfg = CacheConfig(
        page_size=64,
        components=(_FULL, _SWA, _MAMBA),
        sliding_window_size=128,
        draft_swa_window=256,
        enable_mamba_extra_buffer=True,
        mamba_cache_size=60,
        kv_size=4096,
        max_context_len=4096,
    )

    def test_a_wider_draft_window_is_kept(self) -> None:
        cache, allocator, pool = build_fixture(self.cfg)
        request = self._request(pool)
        rows = UnifiedRadixCacheFixtures._alloc(self, allocator, len(request.full_untruncated_fill_ids))
        pool.write((request.kv.req_pool_idx, slice(0, len(rows))), rows)
        request.last_node = cache.root_node_handle()
        cache.checkpoint(request, up_to=len(rows))
        self.note("floor", cache.swa_retain_floor(request))
        self.note_match("published", cache, list(request.full_untruncated_fill_ids))
        cache.unlock(request.lock)
        self.note_state("published", cache)


class BigramWindows(Recording, core.SWAWindowUnderBigramKeyFixtures, CustomTestCase):
    cfg = CacheConfig(page_size=4, components=(_FULL, _SWA), sliding_window_size=4, is_eagle=True)

    def test_insert_and_match(self) -> None:
        cache, allocator, _ = build_fixture(self.cfg)
        tokens = list(range(1, 18))
        key = RadixKey(array("q", tokens), is_bigram=True).page_aligned(4)
        rows = self._alloc_paged(allocator, len(tokens))
        self.note("insert", observe.insert(cache.insert(InsertParams(key=key, value=rows[: len(key)]))))
        self.note_match("all", cache, tokens)
        self.note_match("shorter", cache, tokens[:9])
        self.note_evict("windows", cache, swa_num_tokens=4)


class BoundedReplay(
    Recording,
    core.UnifiedRadixCacheDecoderSwaBoundedReplayHoldBackFixtures,
    CustomTestCase,
):
    def test_a_match_holds_the_window_back(self) -> None:
        for bounded in (False, True):
            cfg = CacheConfig(components=(_FULL, _SWA), sliding_window_size=4, decoder_swa_bounded_replay=bounded)
            cache, allocator, _ = build_fixture(cfg)
            tokens = list(range(1, 33))
            cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=allocator.alloc(len(tokens))))
            for length in (2, 5, 20, 32):
                self.note(f"bounded {bounded}, {length}", self._matched_len(cache, [*tokens[:length], 99]))
            self.note("tail", cache.swa_reprefill_tail_tokens(SimpleNamespace(session=None)))


class Sessions(Recording, insert_walk.StreamingSessionLockLifecycleFixtures, CustomTestCase):
    def test_a_later_turn_takes_the_slot_over(self) -> None:
        cache, allocator, pool = build_fixture(CacheConfig(components=(_FULL, _SWA), sliding_window_size=4))
        cache.enable_streaming_session = True
        slot, request = self._later_turn(cache, allocator, pool)
        self.note("turn", [request.prefix_len, request.kv.kv_committed_len, type(slot).__name__])
        request.finished_reason = FINISH_LENGTH(length=0)
        self.note("held", [cache.session.any_holding_kv(), allocator.available_size(), sorted(cache.session_records())])
        cache.release_session("s")
        self.note("released", [cache.session.any_holding_kv(), allocator.available_size()])


class Events(Recording, kv_events.UnifiedRadixCacheKVEventsFixtures, CustomTestCase):
    cfg = CacheConfig(page_size=4)

    def test_stored_and_removed(self) -> None:
        names, requests = kv_events.make_lora_names(adapter="adapter name")
        cache, allocator, _ = build_fixture(self.cfg, enable_kv_cache_events=True, kv_event_lora_names=names)
        tokens = list(range(1, 13))
        self._insert(cache, allocator, tokens)
        self._insert(cache, allocator, [*tokens[:8], 70, 71, 72, 73], extra_key="adapter")
        stored = self._stored_events(cache)
        assert len(requests) == 1
        self.note("stored", [(len(event.block_hashes), event.medium, list(event.token_ids)) for event in stored])
        self.note("hashes", self._event_hashes(stored))
        self.note_evict("evict", cache, num_tokens=8)
        self.note("removed", self._event_hashes(self._removed_events(cache)))

    def test_the_host_s_own(self) -> None:
        cache, allocator, _ = build_fixture(self.cfg, enable_kv_cache_events=True)
        self._init_hicache(cache)
        tokens = list(range(1, 9))
        self._insert(cache, allocator, tokens)
        leaf = self._leaf_for(cache, tokens)
        self._backup_node(cache, leaf)
        stored = self._stored_events(cache)
        self.note("stored", [(event.medium, self._event_hashes([event])) for event in stored])
        self.note_evict("evict", cache, num_tokens=8)
        self.note("removed", self._event_hashes(self._removed_events(cache)))
        self._load_back_node(cache, match_prefix(cache, tokens).best_match_node)
        self.note("loaded", [(event.medium, self._event_hashes([event])) for event in self._stored_events(cache)])


class PendingLoads(Recording, load_back.UnifiedTreeCoreLoadBackPendingFixtures, CustomTestCase):
    def test_a_commit_leaves_the_other_anchor(self) -> None:
        for write_back in (False, True):
            tree, shared, first, second = self._build_core(is_write_back=write_back)
            self._commit_load_back(tree, first, shared)
            counts = [node.load_back_pending_id is not None for node in (shared, first, second)]
            self.note(f"write back {write_back}", [counts, len(tree.full_host_duplicates)])


class HostChildren(Recording, storage.UnifiedRadixPrefetchCorruptionFixtures, CustomTestCase):
    ps = 4
    cfg = CacheConfig(page_size=4)

    def test_a_host_chain_below_a_device_leaf(self) -> None:
        cache, allocator, _ = build_fixture(self.cfg)
        self._init_hicache(cache)
        tokens = list(range(1, 9))
        parent = self._insert_device(cache, allocator, tokens)
        self.note("child", self._attach_host_child(cache, parent, 100))
        self.note_match("both", cache, [*tokens, *range(100, 108)])
        self.note_evict("device", cache, num_tokens=8)
        self.note_match("after", cache, [*tokens, *range(100, 108)])


class Backfill(Recording, storage.UnifiedRadixCacheStorageAttachBackfillFixtures, CustomTestCase):
    cfg = CacheConfig(page_size=4)
    prefix_tokens = array("q", range(8))
    suffix_tokens = array("q", range(50, 58))

    def test_hashes_come_with_storage(self) -> None:
        for early in (True, False):
            cache = self._build_two_level_tree(storage_on_from_the_start=early)
            self.note(f"early {early}", self._hashes_by_token_ids(cache))
            cache.tree_core.backfill_missing_hash_values()
            self.note("filled", self._hashes_by_token_ids(cache))
