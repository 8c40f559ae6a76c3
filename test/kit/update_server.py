"""The real tree, storage, flush and weight updater of a scheduler, without a model."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.swa_bitexact.identity import storage_identity
from sglang.srt.runtime_context import get_context, get_parallel

from kit.tile_cache import TileCache
from kit.tile_pools import PAGE

TOKENS = array("q", range(1, 1 + 2 * PAGE))


class UpdateServer:
    """The real tree and storage behind the scheduler's real flush and weight updater; no model."""

    def __init__(self, cache: TileCache, boot_id: str = "boot") -> None:
        self.cache, self.tree_cache = cache, cache.tree
        self.token_to_kv_pool_allocator, self.req_to_token_pool = cache.allocator, cache.req_to_token_pool
        self.page_size, self.enable_hicache_storage = PAGE, cache.tree.enable_storage
        self.busy = self._engine_paused = False
        self.waiting_queue, self.running_batch = [], SimpleNamespace(reqs=[])
        self.draft_worker = self.memory_saver_adapter = self.metrics_collector = None
        self.grammar_manager = SimpleNamespace(clear=lambda: None)
        self.metrics_reporter = SimpleNamespace(reset_metrics=lambda: None, is_stats_logging_rank=False)
        self.result, self.seen = (True, "Succeeded."), []
        weights = SimpleNamespace(
            update_weights_from_disk=self.load,
            update_weights_from_ipc=self.load,
            update_weights_from_tensor=self.load,
            begin_weight_update=self.load,
            end_weight_update=self.load,
        )
        runner = ("target", SimpleNamespace(weight_updater=weights))
        self.tp_worker = SimpleNamespace(
            weight_update_runners=lambda: [runner], deserialize_own_rank=lambda tensors: []
        )
        group = SimpleNamespace(cpu_group=None, broadcast_object=lambda _: boot_id)
        with get_parallel().override(tp_group=group):
            Scheduler.init_weight_updater(self)

    def load(self, *_args, **_options):
        """The weights change here: whether storage is attached meanwhile."""
        self.seen.append(self.tree_cache.enable_storage)
        return self.result

    def is_fully_idle(self, ignore_waiting=False):
        return not self.busy

    def flush_cache(self, empty_cache=True):
        return Scheduler.flush_cache(self, empty_cache)

    def record_weight_version_change(self, new_version):
        if new_version is not None:
            get_context().override("test", weight_version=new_version)

    def disk(self, path="/ckpt/2", **fields):
        return self.weight_updater.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path=path, **fields))

    @property
    def attached(self):
        states = {self.tree_cache.enable_storage, self.cache.controller.enable_storage, self.enable_hicache_storage}
        (state,) = states
        return state

    @property
    def tag(self):
        return self.cache.controller.storage_host_pool.storage_format_tag

    def named(self, *weights):
        layout = self.cache.kvcache.capture_pool.layout
        return storage_identity(layout, self.cache.kvcache, page_size=PAGE, weights=weights)

    def publish(self):
        self.cache.publish_random(TOKENS, 2 * PAGE, seed=1)
        self.cache.settle()

    def found(self):
        return self.cache.prefetch(TOKENS).host_hit_length
