"""HiCache's file storage: write, prefetch and load, through the host cache and through buffers."""

# SGLang is untyped.
# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import storage
from sglang.test.kits.unified_radix_cache.config import requires, requires_hicache, requires_swa_only
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix

from upstream.scenarios.recording import Recording

_no_mamba = requires(lambda cfg: not cfg.has_mamba, "buffers here hold no Mamba state")
_several_pages = requires(
    lambda cfg: cfg.sliding_window_size > cfg.page_size, "a window of more pages than its live tail"
)

_PATIENCE_S = 120.0


class Stored(Recording, storage.AnchorLockOutcomePolicyFixtures):
    _REQ = CacheRequestHandle("anchored", 0)
    _PREFIX: tuple[int, ...] = ()

    # The fixtures give up after 10 s, which a busy disk takes; how long it takes is not compared.
    def _flush_l3_backups(self, cache: Any, timeout: float = _PATIENCE_S) -> None:
        super()._flush_l3_backups(cache, timeout)

    def _run_prefetch_to_completion(self, cache: Any, req_id: Any, timeout: float = _PATIENCE_S) -> None:
        super()._run_prefetch_to_completion(cache, req_id, timeout)

    def _pump_hicache_until(self, cache: Any, cond: Any, msg: str, timeout: float = _PATIENCE_S) -> None:
        super()._pump_hicache_until(cache, cond, msg, max(timeout, _PATIENCE_S))

    def _pages(self) -> list[int]:
        return self._buffer_swa_seq(min_pages=4)  # type: ignore[no-any-return]

    @requires_hicache
    @_no_mamba
    def test_a_second_server_reads_what_the_first_wrote(self) -> None:
        directory, tokens = self._make_storage_dir(), self._pages()
        written = self._l3_produce(directory, tokens, marker=3)
        cache, allocator, _ = self._l3_consumer(directory)
        self.note_match("before", cache, tokens)
        self._consume_prefetch(cache, tokens, CacheRequestHandle("reader", 0))
        found = self.note_match("prefetched", cache, tokens)
        assert found.host_hit_length == len(tokens)
        self.note_state("prefetched", cache)
        self._load_back_node(cache, found.best_match_node)
        found = self.note_match("loaded", cache, tokens)
        read = self._snapshot_full_kv(allocator, cache.path_device_indices(found.last_device_node))
        for ours, theirs in zip(read, written, strict=True):
            assert ours.equal(theirs)

    @requires_hicache
    def test_what_is_stored_is_found_by_name(self) -> None:
        directory, tokens = self._make_storage_dir(), self._make_seq(1, 3)
        cache, allocator, pool = build_fixture(self.cfg)
        self._init_hicache(cache, storage_backend="file", storage_dir=directory, prefetch_threshold=1)
        self._insert(cache, allocator, pool, tokens)
        leaf = match_prefix(cache, tokens).last_device_node
        self._backup_node(cache, leaf)
        names = self._all_page_hashes(cache, leaf)
        self.note("names", names)
        self._write_path_to_l3(cache, leaf)
        self._flush_l3_backups(cache)
        stored = self._storage_exists_count(cache, names, storage.aux_storage_key_transfers(cache, leaf))
        assert stored == 3
        self.note("asked", cache.query_storage_hit_length(cache.root_node_handle(), tokens, None, None))
        self.note("detached", cache.detach_storage_backend())
        self.note("attached", cache.attach_storage_backend("file"))
        self.note_state("attached", cache)

    @requires_swa_only
    def test_ranks_agree_on_the_window(self) -> None:
        prepared = self._setup_swa_tp_prefetch()
        directory, tokens = prepared
        for drop in (False, True):
            cache, *_ = self._l3_consumer(directory)
            self._patch_tp_prefetch_sync(cache, drop_swa=drop)
            self._consume_prefetch(cache, tokens, CacheRequestHandle(f"drop {drop}", 0))
            found = self._swa_host_on_path(cache, tokens)
            assert found == (not drop)
            self.note_match(f"drop {drop}", cache, tokens)

    @requires_hicache
    @_no_mamba
    def test_buffers_carry_the_bytes(self) -> None:
        directory, tokens = self._make_storage_dir(), self._pages()
        _, written = self._produce_buffer_l3(directory, tokens, marker=9)
        cache, allocator, _ = self._build_buffer_hicache_fixture(directory)
        free = self._host_avail_sizes(cache)
        self._consume_prefetch(cache, tokens, CacheRequestHandle("reader", 0))
        found = self.note_match("loaded", cache, tokens)
        assert found.device_prefix_len == len(tokens)
        read = self._snapshot_full_kv(allocator, cache.path_device_indices(found.last_device_node))
        assert read[0].equal(written[0])
        assert self._host_avail_sizes(cache) == free
        self._drain_buffer_writes(cache)
        self.note_state("loaded", cache)

    @requires_hicache
    @_no_mamba
    def test_a_sibling_came_first(self) -> None:
        self._assert_sibling_head_is_trimmed(self._make_storage_dir(), self._pages(), window_sized=False)

    @requires_swa_only
    @_several_pages
    def test_full_rows_whose_window_is_gone(self) -> None:
        directory, tokens = self._make_storage_dir(), self._pages()
        self._produce_buffer_l3(directory, tokens, marker=9)
        self._assert_masked_full_is_reused(directory, tokens, live_tail=self.cfg.page_size)

    @requires_hicache
    @_no_mamba
    def test_a_pool_of_a_component_s_own(self) -> None:
        directory, tokens = self._make_storage_dir(), self._pages()
        registry = {ComponentType.FULL: storage.ExtraPoolFullComponent}
        cache, allocator, pool = build_fixture(self.cfg, component_registry_override=registry)
        self._init_buffer_hicache(cache, directory)
        self._insert(cache, allocator, pool, tokens)
        leaf = match_prefix(cache, tokens).last_device_node
        controller = cache.cache_controller
        with storage.mock.patch.object(controller, "write_storage", wraps=controller.write_storage) as write:
            self._buffer_backup_and_wait(cache, leaf)
        kv, extra = self._writes_by_pool(write, storage.ExtraPoolFullComponent.EXTRA_POOL)
        self.note("kv", sorted(kv))
        self.note("extra", sorted(extra))

    @requires_hicache
    @requires(lambda cfg: not (cfg.has_mamba or cfg.has_swa) and cfg.page_size == 1, "full attention, page size 1")
    def test_an_anchored_prefix(self) -> None:
        tokens: Any = list(range(1, 9))
        cache, pipeline = self._make_buffer_cache(resident=tokens, cap_tokens=64, prefix=tokens)
        self.note("anchors", [pipeline.anchor_locked_tokens_, len(pipeline.anchor_locks)])
        self.note_match("resident", cache, tokens)
        self.note_state("resident", cache)
