"""Online weight updates: what the old weights computed is not reused from storage."""

from __future__ import annotations

import dataclasses
import json
import logging
import uuid
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager,
)
from sglang.srt.mem_cache.swa_bitexact.identity import storage_identity
from sglang.srt.mem_cache.swa_bitexact.model_identity import (
    model_files,
    startup_weights,
)
from sglang.srt.runtime_context import get_memory, get_parallel, get_serving

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


class StorageEpoch:
    """Keeps the storage identity of one scheduler in step with the weights it computes with.

    changing() before any byte of the weights changes: storage is detached. Until the cache is
    flushed the tree mixes what old and new weights computed, and none of that may be stored
    or found under a name that outlives it. flushed() after the tree was emptied: storage is
    attached again, under the identity of the new weights.

    Both run on the scheduler thread. Under DP attention the ranks flush at different times,
    and attaching is collective: there, storage stays detached until the operator attaches it.

    weights: all that was loaded, oldest first. An update from disk with a weight version is
    named by files and version, so servers with the same history share pages. Any other update
    cannot be named: pages written after it are private to this server until it restarts.
    """

    def __init__(self, scheduler: Scheduler, boot_id: str) -> None:
        self.scheduler = scheduler
        self.boot_id = boot_id
        self.weights: tuple[dict[str, Any], ...] = (startup_weights(),)
        self.updates = 0
        # The tree may hold what older weights computed.
        self.stale = False
        # Arguments that attach again what changing() detached.
        self._detached: dict[str, Any] | None = None

    def changing(self) -> None:
        """Weights are about to change: detach storage; what follows is private until named."""
        self.updates += 1
        self.stale = True
        self.weights += ({"private": f"{self.boot_id}-{self.updates}"},)
        # Nobody comes back to this name, even if storage is attached by hand meanwhile.
        self._retag({"unflushed": True})
        if self._detach():
            logger.info(
                "Bit-exact reuse: weights change, storage is detached until the cache is flushed."
            )

    def loaded_from(self, path: str) -> None:
        """The change that began last was a complete load from ``path``, with a weight version."""
        self.weights = (
            *self.weights[:-1],
            {
                "files": model_files(path),
                "weight_version": get_serving().weight_version,
            },
        )

    def flushed(self) -> None:
        """The tree is empty: attach storage under the identity of the present weights.

        Does nothing unless weights changed since the last flush. If storage cannot be
        attached it stays detached, with one error line.
        """
        if not self.stale:
            return
        self.stale = False
        self._detach()
        self._retag()
        if self._detached is None or get_memory().hicache_storage_backend is None:
            return
        if get_parallel().attn_dp_size > 1:
            logger.warning(
                "Bit-exact reuse: weights changed, so storage was detached. Under DP attention "
                "it is not attached again by itself; send an attach request for backend '%s'.",
                self._detached["storage_backend"],
            )
            return
        self._attach(self._detached)

    def _attach(self, arguments: dict[str, Any]) -> None:
        done, message = self.scheduler.tree_cache.attach_storage_backend(**arguments)
        if not done:
            logger.error(
                "Bit-exact reuse: weights changed, and storage backend '%s' could not be "
                "attached for the new ones: %s. It stays detached; send an attach request.",
                arguments["storage_backend"],
                message,
            )
            return
        self._detached = None
        self.scheduler.enable_hicache_storage = True
        logger.info(
            "Bit-exact reuse: storage is attached for the updated weights as %s.",
            self.scheduler.tree_cache.cache_controller.storage_host_pool.storage_format_tag,
        )

    def _detach(self) -> bool:
        """Detach what is attached; whether there was anything."""
        cache = self.scheduler.tree_cache
        controller = getattr(cache, "cache_controller", None)
        if controller is None or not cache.enable_storage:
            return False
        self._detached = _attach_arguments(cache)
        done, message = cache.detach_storage_backend()
        if not done:
            # A thread is still at work. It is given nothing more, and what it brings back
            # is dropped with its queues.
            cache.enable_storage = controller.enable_storage = False
            logger.error(
                "Bit-exact reuse: weights change, and storage could not be detached cleanly: "
                "%s. It is not used any more.",
                message,
            )
        self.scheduler.enable_hicache_storage = False
        return True

    def _retag(self, *more: dict[str, Any]) -> None:
        controller = getattr(self.scheduler.tree_cache, "cache_controller", None)
        if controller is None:
            return
        kvcache = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        controller.storage_host_pool.storage_format_tag = storage_identity(
            kvcache.capture_pool.layout,
            kvcache,
            page_size=self.scheduler.page_size,
            weights=self.weights + more,
        )


class ExactWeightUpdater(SchedulerWeightUpdaterManager):
    """The stock weight updater, which tells a StorageEpoch what happens to the weights."""

    epoch: StorageEpoch
    # A flush inside an open update session: weights may still change until it ends.
    _flush_at_end: bool = False

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        self.epoch.changing()
        return super().update_weights_from_disk(recv_req)

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        self.epoch.changing()
        return super().update_weights_from_ipc(recv_req)

    def begin_weight_update(self, recv_req: Any) -> Any:
        # Tensor and distributed updates come within a session, remote writes unannounced.
        if self._session is None:
            self.epoch.changing()
        return super().begin_weight_update(recv_req)

    def end_weight_update(self, recv_req: Any) -> Any:
        output = super().end_weight_update(recv_req)
        if output.success and self._flush_at_end:
            self._flush_at_end = False
            if not self.flush_cache(empty_cache=False):
                logger.warning(
                    "Bit-exact reuse: storage stays detached, because requests are running "
                    "after a weight update. Finish them, then call /flush_cache."
                )
        return output

    def flush_cache_after_weight_update(
        self, recv_req: Any, success: bool, message: str
    ) -> tuple[bool, str]:
        named = (
            isinstance(recv_req, UpdateWeightFromDiskReqInput)
            and recv_req.weight_version is not None
        )
        if success and named:
            self.epoch.loaded_from(recv_req.model_path)
        return super().flush_cache_after_weight_update(recv_req, success, message)

    def cache_flushed(self) -> None:
        """The scheduler emptied the tree and its pools."""
        if self._session is None:
            self.epoch.flushed()
        else:
            self._flush_at_end = True


def exact_weight_updater(stock: SchedulerWeightUpdaterManager) -> ExactWeightUpdater:
    """``stock`` with a StorageEpoch. Collective in the TP group: its ranks agree on a boot id."""
    fields = [field.name for field in dataclasses.fields(stock) if field.init]
    updater = ExactWeightUpdater(**{name: getattr(stock, name) for name in fields})
    boot_id = get_parallel().tp_group.broadcast_object(uuid.uuid4().hex)
    updater.epoch = StorageEpoch(updater.scheduler, boot_id)
    return updater


def _attach_arguments(cache: Any) -> dict[str, Any]:
    """What attach_storage_backend() takes to attach what is attached now."""
    controller = cache.cache_controller
    config = controller.storage_config
    extra = dict(config.extra_config or {})
    if config.tp_lcm_size is not None:
        extra["tp_lcm_size"] = config.tp_lcm_size
    extra |= {
        "prefetch_threshold": controller.prefetch_threshold,
        "prefetch_timeout_base": cache.prefetch_timeout_base,
        "prefetch_timeout_per_ki_token": cache.prefetch_timeout_per_page
        * 1024
        / cache.page_size,
        "hicache_storage_pass_prefix_keys": cache.hicache_storage_pass_prefix_keys,
    }
    return {
        "storage_backend": controller.storage_backend_type,
        "storage_backend_extra_config_json": json.dumps(extra),
        "served_model_name": get_serving().served_model_name,
    }
