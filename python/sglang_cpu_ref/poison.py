"""Everything free is garbage: a test aid that makes a read of rows nobody owns show.

With SGLANG_CPU_REF_POISON=1 what is free is overwritten before every extend allocation, before
host pages are loaded back and, on the host, after a flush. An answer that depends on such a row
then differs from a cold run's, and from its own repetition.

Free is what the free lists hold. Whatever is in use, or the target or source of a transfer under
way, is allocated and not in them: nothing here knows of requests, nodes or transfers. On a CPU
a step has run when it is launched, so that no later write or read of it is outstanding.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from sglang_cpu_ref.poison_garbage import Garbage

logger = logging.getLogger(__name__)

SWITCH = "SGLANG_CPU_REF_POISON"
_SEED = 20_250_801


class Free(NamedTuple):
    """Records of one buffer of which some are free.

    records: [n, ...]; which: int64 ids of the free ones.
    """

    records: torch.Tensor
    which: torch.Tensor


class Poisoned(NamedTuple):
    """How many request slots, FULL pages, tiles and host pages (over all host pools) were overwritten."""

    slots: int = 0
    pages: int = 0
    tiles: int = 0
    host_pages: int = 0


class Poison:
    """Overwrites what is free; the same calls with the same seed write the same bytes."""

    def __init__(self, seed: int = _SEED) -> None:
        self._garbage = Garbage(seed)

    def device(self, allocator: Any, request_slots: Any) -> Poisoned:
        """Window and state rows of free request slots, rows and index keys of free FULL pages, free tiles.

        allocator: SGLang's SWA allocator over a DeepSeek-V4 pool on unified_kv, with or without
        tiles. request_slots: its ReqToTokenPool. Row 0, page 0 and tile 0 are padding and are
        in no free list: they stay.
        """
        slots = torch.tensor(request_slots.free_slots, dtype=torch.int64)
        pages = allocator.full_attn_allocator.get_all_free_pages()
        tiles = free_tiles(allocator)
        for free in (
            *_of_slots(allocator.get_kvcache(), slots),
            *_of_pages(allocator.get_kvcache(), pages),
            *_of_tiles(allocator, tiles),
        ):
            self._garbage.fill(*free)
        return Poisoned(slots=len(slots), pages=len(pages), tiles=len(tiles))

    def host(self, cache: Any) -> Poisoned:
        """The free pages of every host pool of the cache's HiCache stack; nothing without HiCache.

        A pool that another one's indices address (compressed rows, the states of tiles) has no
        free list of its own, or one that nobody takes from: its pages are free where the
        other's are. The lock keeps a page from being taken while it is overwritten.
        """
        group = getattr(cache, "host_pool_group", None)
        if group is None:
            return Poisoned()
        count = 0
        for source in group.entries:
            followers = _followers(cache, source.name)
            if not followers:
                continue
            with source.host_pool.lock:
                for pool in followers:
                    which = free_host_pages(source.host_pool, pool.page_size)
                    for records in _host_buffers(pool):
                        self._garbage.fill(records, which)
                    count += len(which)
        return Poisoned(host_pages=count)


def free_tiles(allocator: Any) -> torch.Tensor:
    """Ids of the free tiles, int64; none on an allocator without tiles."""
    if getattr(allocator, "capture_pool", None) is None:
        return torch.empty(0, dtype=torch.int64)
    # Counting them is what brings freed tiles into the free list.
    _ = allocator.tiles_available
    free: torch.Tensor = allocator.swa_attn_allocator.get_all_free_pages()
    return free


def free_host_pages(source: Any, page_size: int) -> torch.Tensor:
    """Ids, int64, of the pages all of whose ``page_size`` slots are in the free list of a host pool."""
    slots = torch.cat((source.free_slots, *source.release_slots))
    return (torch.bincount(slots // page_size) == page_size).nonzero().flatten()


def _of_slots(kvcache: Any, slots: torch.Tensor) -> Iterator[Free]:
    """Rings of the window, one per layer, and of every compressor's and indexer's state."""
    unified = kvcache.unified_kv_pool
    for buffer in unified.kv_buffer:
        yield Free(buffer[: unified.swa_pages].view(unified.num_slots, -1), slots)
    for pool in (*kvcache.compress_state_pools, *kvcache.indexer_compress_state_pools):
        if pool is not None:
            rows = pool.kv_score_buffer.kv_score[: unified.num_slots * pool.ring_size]
            yield Free(rows.view(unified.num_slots, -1), slots)


def _of_pages(kvcache: Any, pages: torch.Tensor) -> Iterator[Free]:
    """Compressed rows of every layer that has them, behind its rings, and pages of index keys."""
    unified = kvcache.unified_kv_pool
    ratios = kvcache.compression_ratios[kvcache.start_layer : kvcache.end_layer]
    for buffer, ratio in zip(unified.kv_buffer, ratios, strict=True):
        if ratio:
            rows = buffer[unified.swa_pages :]
            yield Free(rows.view(-1, kvcache.page_size // ratio * rows.shape[1]), pages)
    for pool in kvcache.index_pools.values():
        for buffer in pool.contiguous_page_row_buffers():
            yield Free(buffer, pages)


def _of_tiles(allocator: Any, tiles: torch.Tensor) -> Iterator[Free]:
    if len(tiles):
        for stream in allocator.capture_pool.buffers.values():
            for layer in stream:
                yield Free(layer, tiles)


def _followers(cache: Any, source: Any) -> list[Any]:
    """The host pools that the indices of the pool named ``source`` address; none if it is itself addressed so."""
    sources = {spec.pool_name: spec.indices_from_pool for spec in cache.sidecar_pool_specs}
    entries = cache.host_pool_group.entries
    return [entry.host_pool for entry in entries if sources.get(entry.name, entry.name) == source]


def _host_buffers(pool: Any) -> list[torch.Tensor]:
    """Buffers of a host pool by page: one per layer, or one with all layers. The anchor has none."""
    if pool.kv_buffer is None:
        return []
    return pool.kv_buffer if isinstance(pool.kv_buffer, list) else [pool.kv_buffer]


# Hooks ---------------------------------------------------------------------------

_poison: Poison | None = None


def requested() -> bool:
    """Whether the switch is on; ValueError if it is neither 0 nor 1."""
    value = os.environ.get(SWITCH, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {value!r}; it takes 0 or 1. Set one of them, or unset it.")
    return value == "1"


def _instance() -> Poison:
    global _poison
    if _poison is None:
        _poison = Poison()
    return _poison


def before_extend(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``alloc_for_extend``: before slots are taken, since SGLang clears their state as it hands them out."""
    cache = batch.tree_cache
    _everything(cache, cache.token_to_kv_pool_allocator, batch.req_to_token_pool)
    return original(batch, *args, **kwargs)


def before_load_back(original: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``UnifiedRadixCache.load_back``, which hands out pages ahead of the extend allocation.

    They may be the very pages that the same rows left: a load that copies nothing would pass.
    """
    _everything(cache, cache.token_to_kv_pool_allocator, cache.req_to_token_pool)
    return original(cache, *args, **kwargs)


def after_reset(original: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``UnifiedRadixCache.reset``: a flush frees all host pages, and storage fills them before any extend."""
    result = original(cache, *args, **kwargs)
    _log("reset", _instance().host(cache))
    return result


def _everything(cache: Any, allocator: Any, request_slots: Any) -> None:
    device = _instance().device(allocator, request_slots)
    _log("allocation", device._replace(host_pages=_instance().host(cache).host_pages))


def _log(when: str, done: Poisoned) -> None:
    logger.debug(
        "Poisoned at %s: %d request slots, %d pages, %d tiles, %d host pages.",
        when,
        *done,
    )
