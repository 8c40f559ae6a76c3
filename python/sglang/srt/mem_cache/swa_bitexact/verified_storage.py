"""A storage backend that gives out only pages whose bytes are those that were written."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageExtraInfo,
        PoolTransferResult,
    )
    from sglang.srt.mem_cache.swa_bitexact.storage_digests import (
        DigestGroup,
        StorageDigests,
    )

logger = logging.getLogger(__name__)

Results = dict[str, list[bool]]
QUARANTINED = ".quarantined"


class VerifiedStorage:
    """Any of SGLang's storage backends, with one more object per page and per tile: digests.

    The object is written with the page, is needed for a hit, is read with the page, and decides
    whether what was read counts. A page that fails is quarantined: with the file backend its
    files are renamed, so that the next backup writes it anew; with others its key is not read
    again by this process. Everything else is the backend's.

    Called from HiCache's storage threads, one at a time per direction.
    """

    def __init__(self, backend: HiCacheStorage, digests: StorageDigests) -> None:
        self._backend = backend
        self._digests = digests
        self._refused: set[tuple[str, str]] = set()
        # Pages that were read and compared since the start.
        self.checked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    @property
    def quarantined(self) -> int:
        """Keys that failed, of every backend since the start."""
        return self._digests.counters.storage_failed

    def on_host_pools_registered(self) -> None:
        for group in self._digests.groups:
            self._backend.register_mem_host_pool_v2(group.pool, group.name)
        self._backend.on_host_pools_registered()
        self._digests.enabled = True

    def close(self) -> None:
        self._digests.enabled = self._digests.verifies_host
        # Not every backend has something to close.
        close = getattr(self._backend, "close", None)
        if close is not None:
            close()

    # Write -----------------------------------------------------------------------

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> Results:
        """Pages and their digests; a page whose digest was not stored counts as not stored."""
        self._digests.wait()
        for transfer in transfers:
            for index in self._indices(transfer):
                if self._digests.word(transfer.name, index) == 0:
                    value = self._digests.digest(transfer.name, index)
                    self._digests.set_word(transfer.name, index, value)
        results = self._with_digests(self._backend.batch_set_v2, transfers, extra_info)
        self._digests.counters.to_storage += sum(results.get(PoolName.SWA, ()))
        return results

    # Look ------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """What can be reused: the prefix that ends where every pool, and every digest, exists."""
        transfers = list(pool_transfers or ())
        found = self._backend.batch_exists_v2(
            keys, transfers + self._digest_transfers(transfers), extra_info
        )
        for group, members in self._digests.of(transfers):
            found.extra_pool_hit_pages.pop(group.name, None)
            bad = [(group.name, key) in self._refused for key in keys]
            if any(bad):
                self._cut(found, bad, members[0])
        return found

    @staticmethod
    def _cut(
        found: PoolTransferResult, bad: Sequence[bool], member: PoolTransfer
    ) -> None:
        """Leave what ends before a bad page, or for trailing pools, not with one.

        Example: pages 0..3 stored and page 1 bad. A pool of all pages leaves the prefix of 1
        page; a trailing pool of one page leaves those of 1, 3 and 4.
        """
        trailing = None
        if member.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            trailing = max(1, len(member.keys or ()))
        ends = found.restorable_prefix_pages
        # A backend without such a list vouches for every shorter prefix of all-pages pools.
        known = range(1, found.kv_hit_pages + 1) if ends is None else ends
        left = [
            end
            for end in known
            if not any(bad[0 if trailing is None else max(0, end - trailing) : end])
        ]
        if ends is None and trailing is not None:
            left = [end for end in left if end == found.kv_hit_pages]
        found.restorable_prefix_pages = left if ends is not None else None
        found.kv_hit_pages = max(left, default=0)

    # Read ------------------------------------------------------------------------

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> Results:
        """Read into host pages; True only for bytes that have the digest they were written with."""
        # A word that is still being made would replace one that is read now.
        self._digests.wait()
        results = self._with_digests(self._read, transfers, extra_info)
        for group, members in self._digests.of(transfers):
            for position, key in enumerate(members[0].keys or ()):
                if all(results[t.name][position] for t in members):
                    bad = self._differing(group, members, position)
                    if bad is not None:
                        results[bad][position] = False
                        self._quarantine(
                            bad, key, "its bytes are not those that were written"
                        )
        self._digests.counters.from_storage += sum(results.get(PoolName.SWA, ()))
        return results

    def _differing(
        self, group: DigestGroup, members: Sequence[PoolTransfer], position: int
    ) -> PoolName | None:
        """The first pool whose page is not what its digest says."""
        for transfer in members:
            index = self._indices(transfer)[position]
            self.checked += 1
            expected = self._digests.word(transfer.name, index)
            if self._digests.digest(transfer.name, index) != expected:
                return transfer.name
        index = self._indices(members[0])[position]
        return None if self._digests.is_whole(group, index) else members[0].name

    def _read(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> Results:
        """The backend's read; where it raises, page by page, so that one page fails alone."""
        with contextlib.suppress(Exception):
            return self._backend.batch_get_v2(transfers, extra_info)
        results: Results = {}
        for transfer in transfers:
            keys = transfer.keys or []
            assert transfer.host_indices is not None
            rows = transfer.host_indices.numel() // max(1, len(keys))
            results[transfer.name] = [
                self._read_one(
                    replace(
                        transfer,
                        keys=[key],
                        host_indices=transfer.host_indices[i * rows : (i + 1) * rows],
                    ),
                    extra_info,
                )
                for i, key in enumerate(keys)
            ]
        return results

    def _read_one(
        self, transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None
    ) -> bool:
        assert transfer.keys
        try:
            return self._backend.batch_get_v2([transfer], extra_info)[transfer.name][0]
        except (
            Exception
        ) as error:  # A backend may raise anything; the page is not reused.
            if getattr(error, "errno", None) is None:
                # The backend says that the content is wrong: too short, for one.
                self._quarantine(transfer.name, transfer.keys[0], str(error))
            else:
                logger.warning("Bit-exact reuse: storage cannot be read: %s", error)
            return False

    # -----------------------------------------------------------------------------

    def _with_digests(
        self, call: Any, transfers: list[PoolTransfer], extra_info: Any
    ) -> Results:
        """``call`` with the digests' transfers added; a page is as good as its digest."""
        found = dict(call(transfers + self._digest_transfers(transfers), extra_info))
        for group, members in self._digests.of(transfers):
            digests = found.pop(group.name)
            for transfer in members:
                found[transfer.name] = [
                    ok and digest
                    for ok, digest in zip(found[transfer.name], digests, strict=True)
                ]
        return found

    def _digest_transfers(self, transfers: Sequence[PoolTransfer]) -> list[Any]:
        return [
            replace(members[0], name=group.name, indices_from_pool=None)
            for group, members in self._digests.of(transfers)
        ]

    def _indices(self, transfer: PoolTransfer) -> list[int]:
        return self._digests.indices(transfer)

    def _quarantine(self, name: str, key: str, reason: str) -> None:
        """Let nobody read ``key`` in the group of ``name`` again, and count it."""
        self._digests.counters.storage_failed += 1
        group = next(g for g in self._digests.groups if name in (*g.members, g.name))
        logger.warning(
            "Bit-exact reuse: page %s of pool %s was read from storage and is not reused: %s. "
            "It is quarantined (%d so far) and computed again.",
            key,
            name,
            reason,
            self.quarantined,
        )
        try:
            for file in _files(self._backend, key, group):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(file, file.with_name(file.name + QUARANTINED))
        except OSError as error:
            logger.warning(
                "Bit-exact reuse: it cannot be renamed, and stays: %s", error
            )
            self._refused.add((group.name, key))


def _files(backend: HiCacheStorage, key: str, group: DigestGroup) -> list[Path]:
    """The files of ``key`` in the file backend, which then does not know them any more.

    Raises:
        OSError: another backend, which has no files.
    """
    # SGLang's failure injector stands before the backend in its own tests.
    backend = getattr(backend, "_backend", backend)
    if not isinstance(backend, HiCacheFile):
        raise OSError(f"{type(backend).__name__} keeps no files")
    stems = [
        backend._get_component_key(key, str(n)) for n in (*group.members, group.name)
    ]
    if backend.metadata_cache is not None:
        for stem in stems:
            backend.metadata_cache.remove(stem)
    return [Path(backend.file_path) / f"{stem}.bin" for stem in stems]
