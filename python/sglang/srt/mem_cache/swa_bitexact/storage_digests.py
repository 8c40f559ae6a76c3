"""Digests of host pages: made when a page has arrived from the device, kept beside it in host memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from sglang.srt.mem_cache.swa_bitexact.verified_storage import VerifiedStorage

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import CacheOperation
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransfer
    from sglang.srt.mem_cache.pool_host.group import HostPoolGroup

logger = logging.getLogger(__name__)

# Pools of a tile; all others, but for the anchor, which has no bytes, are pools of a FULL page.
TILE_POOLS = (
    PoolName.SWA,
    PoolName.DEEPSEEK_V4_C4_STATE,
    PoolName.DEEPSEEK_V4_C4_INDEXER_STATE,
)
_WORD_BYTES = 8
# A digest page is a multiple of this: alignment of the host pools, and of direct I/O buffers.
_LINE_BYTES = 64


class DigestGroup(NamedTuple):
    """Pools whose pages move together, and the digests of those pages.

    name: of the object in storage, beside those of the members. members: in the order of the
    words. pool: one page of int64 words per host page of the members, at the same index.
    """

    name: str
    members: tuple[PoolName, ...]
    pool: DeepSeekV4PagedHostPool


@dataclass
class TransferCounters:
    """Since start-up, on this rank. to_host, to_device, to_storage, from_storage: tiles copied
    there. host_failed: loads that found a changed page; storage_failed: pages or tiles whose
    bytes were not those that were written."""

    to_host: int = 0
    to_device: int = 0
    to_storage: int = 0
    from_storage: int = 0
    host_failed: int = 0
    storage_failed: int = 0


class StorageDigests:
    """One xxh3 (64 bits) per pool and host page.

    A worker thread waits for each copy from the device and reads what arrived, so neither the
    scheduler nor the device waits. Nothing is read while nobody asks for digests (no storage is
    attached, host pages are not verified); such pages have the word 0 and get their digest when
    they are written to storage after all.
    """

    def __init__(
        self, group: HostPoolGroup, *, layout: str, allocator_type: str
    ) -> None:
        """Allocates 64 B per host page and per host tile. layout: HiCache's memory layout."""
        # Host pages are compared with their digests before they are loaded.
        self.verifies_host = envs.SGLANG_SWA_VERIFY_HOST.get()
        self.host_pools = {entry.name: entry.host_pool for entry in group.entries}
        anchor = group.anchor_entry
        tile = tuple(name for name in TILE_POOLS if name in self.host_pools)
        page = tuple(
            name for name in self.host_pools if name not in (*tile, anchor.name)
        )
        self.groups = tuple(
            DigestGroup(
                name, members, self._pool(name, members, layout, allocator_type)
            )
            for name, members in (("bitexact_page", page), ("bitexact_tile", tile))
            if members
        )
        self.enabled = self.verifies_host
        self.counters = TransferCounters()
        # Nodes whose host pages changed, until their requests' receipts say so.
        self.refused_loads: set[int] = set()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tile-digests")

    def _pool(
        self, name: str, members: Sequence[PoolName], layout: str, allocator_type: str
    ) -> DeepSeekV4PagedHostPool:
        like = self.host_pools[members[0]]
        item_bytes = -(-len(members) * _WORD_BYTES // _LINE_BYTES) * _LINE_BYTES
        return DeepSeekV4PagedHostPool(
            pool_name=name,
            # Never copied to a device; a host pool wants to know the shape there.
            device_buffers=[torch.empty((1, item_bytes), dtype=torch.uint8)],
            item_bytes=item_bytes,
            num_host_pages=like.size // like.page_size,
            slot_page_size=like.page_size,
            layout=layout,
            pin_memory=like.pin_memory,
            allocator_type=allocator_type,
            page_aligned_only=True,
        )

    def guard(self, backend: HiCacheStorage) -> VerifiedStorage:
        """``backend``, of which only pages come back that have their digests."""
        return VerifiedStorage(backend, self)

    def intact(
        self, host_indices: torch.Tensor, transfers: Sequence[PoolTransfer] | None
    ) -> bool:
        """Whether host pages are still what arrived there; reads all their bytes.

        host_indices: of the FULL pages; of a transfer that names another pool's, that one's.
        A page without a digest, which came while nothing needed any, counts as intact.
        """
        self.wait()
        found = {PoolName.KV: host_indices}
        found |= {t.name: t.host_indices for t in transfers or ()}
        for transfer in transfers or ():
            source = transfer.indices_from_pool or transfer.name
            for index in self.indices(replace(transfer, host_indices=found[source])):
                word = self.word(transfer.name, index)
                if word and word != self.digest(transfer.name, index):
                    logger.warning(
                        "Bit-exact reuse: a page of pool %s changed in host memory (page %d). "
                        "It is not loaded, and its tokens are computed again.",
                        transfer.name,
                        index // self.host_pools[transfer.name].page_size,
                    )
                    return False
        return True

    def refused(self, node_id: int) -> None:
        """The load of the path to ``node_id`` found a page, on whatever rank, that changed."""
        self.counters.host_failed += 1
        self.refused_loads.add(node_id)

    def loaded(self, transfers: Sequence[PoolTransfer] | None) -> None:
        """These are on their way to the device."""
        self.counters.to_device += self.tiles_in(transfers)

    def tiles_in(self, transfers: Iterable[PoolTransfer] | None) -> int:
        """How many tiles ``transfers`` move: pages of their windows."""
        return sum(
            len(self.indices(t)) for t in transfers or () if t.name == PoolName.SWA
        )

    # Words -----------------------------------------------------------------------

    def copied(self, operation: CacheOperation, done: Any) -> None:
        """Pages are on their way to the host; ``done``: the event behind the copy.

        Does not wait. Whoever reads words calls wait() first.
        """
        self.counters.to_host += self.tiles_in(operation.pool_transfers)
        pages = [
            (transfer.name, index)
            for transfer in operation.pool_transfers or ()
            for index in self.indices(transfer)
        ]
        self._worker.submit(self._record, pages, done if self.enabled else None)

    def wait(self) -> None:
        """Until the pages of every copied() before this call have their words."""
        self._worker.submit(int).result()

    def _record(self, pages: Iterable[tuple[PoolName, int]], done: Any) -> None:
        if done is not None:
            done.synchronize()
        for name, index in pages:
            self.set_word(name, index, 0 if done is None else self.digest(name, index))

    def digest(self, name: PoolName, index: int) -> int:
        """xxh3 of the page of pool ``name`` at host index ``index``; signed, as int64 holds it."""
        page = self.host_pools[name].get_data_page(index, flat=True)
        return _signed(xxhash.xxh3_64_intdigest(page.view(torch.uint8).numpy()))

    def word(self, name: PoolName, index: int) -> int:
        group, position = self._place(name)
        return int(self._words(group, index)[position])

    def set_word(self, name: PoolName, index: int, value: int) -> None:
        group, position = self._place(name)
        words = self._words(group, index)
        words[position] = value
        # What a damaged file left here would spoil this page's.
        words[len(group.members) :] = 0
        group.pool.set_from_flat_data_page(index, words.view(torch.uint8))

    def is_whole(self, group: DigestGroup, index: int) -> bool:
        """Whether the words that no pool has are empty, as they are written."""
        return not self._words(group, index)[len(group.members) :].any()

    def _words(self, group: DigestGroup, index: int) -> torch.Tensor:
        """int64 [words], perhaps a copy."""
        return group.pool.get_data_page(index, flat=True).view(torch.int64)

    def _place(self, name: PoolName) -> tuple[DigestGroup, int]:
        for group in self.groups:
            if name in group.members:
                return group, group.members.index(name)
        raise KeyError(f"pool {name} has no digests")

    # Transfers -------------------------------------------------------------------

    def of(
        self, transfers: Iterable[PoolTransfer]
    ) -> Iterator[tuple[DigestGroup, list[PoolTransfer]]]:
        """The groups that occur in ``transfers``, with their members' transfers."""
        transfers = list(transfers)
        for group in self.groups:
            found = [t for t in transfers if t.name in group.members]
            if found:
                yield group, found

    def indices(self, transfer: PoolTransfer) -> list[int]:
        """The host index of each page of a transfer."""
        if transfer.host_indices is None:
            return []
        page_size = self.host_pools[transfer.name].page_size
        return transfer.host_indices[::page_size].tolist()


def _signed(value: int) -> int:
    """Example: 1 -> 1, 2**64 - 1 -> -1."""
    return value - (1 << 64) if value >> 63 else value
