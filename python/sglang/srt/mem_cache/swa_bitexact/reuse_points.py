"""Remembers what became of reuse points, for the receipts of prefixes that end before them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.swa_bitexact.planner import CapturePlanner

# Some 12 MB when there are as many.
_MOST_POINTS = 1 << 16


class KnownPoint(NamedTuple):
    """boundary: the length of the prefix, 0 if none is known. dropped: it never had a tile."""

    boundary: int
    dropped: bool


class ReusePoints:
    """Which reuse points got no tile since the device's pool was full, and which had one where
    the stride keeps none: the tree does not remember why a prefix has no window.

    A point is a 64-bit digest of namespace and tokens. Nodes would not do: the tree splits
    them, and rows come back from storage on new ones. Two prefixes of one digest would share a
    reason in a receipt; nothing else follows from it. The last 65,536 points are known.
    """

    def __init__(self, planner: CapturePlanner) -> None:
        self._planner = planner
        # By digest: whether it was dropped. A point on the grid that is not here had a tile.
        self._dropped: OrderedDict[int, bool] = OrderedDict()

    def settle(
        self, key: RadixKey, *, published: Iterable[int], dropped: Iterable[int]
    ) -> None:
        """Prefixes of ``key`` got a tile, or were due and got none; the last word counts.

        Hashes ``key`` up to the last of them, unless there is nothing to write or to forget.

        Example, page_size 256, stride 4, published (1_024, 1_280), dropped (2_048,):
            1_280 had a tile, 2_048 was dropped, and 1_024 is known by not being there
        """
        were_dropped = dict.fromkeys(published, False) | dict.fromkeys(dropped, True)
        known = self._dropped
        if not known and all(map(self._goes_without_saying, were_dropped.items())):
            return
        for boundary, digest in _digests(key, sorted(were_dropped)):
            # Out and in again, so that it is the newest.
            known.pop(digest, None)
            if not self._goes_without_saying((boundary, were_dropped[boundary])):
                known[digest] = were_dropped[boundary]
                if len(known) > _MOST_POINTS:
                    known.popitem(last=False)

    def deepest(self, key: RadixKey, after: int, up_to: int) -> KnownPoint:
        """The longest known prefix of ``key`` of (after, up_to] tokens, both whole pages."""
        found = KnownPoint(0, False)
        page = self._planner.page_size
        if self._dropped:
            for boundary, digest in _digests(key, range(after + page, up_to + 1, page)):
                if (dropped := self._dropped.get(digest)) is not None:
                    found = KnownPoint(boundary, dropped)
        return found

    def _goes_without_saying(self, point: tuple[int, bool]) -> bool:
        boundary, dropped = point
        return not dropped and self._planner.keeps(boundary)


def _digests(key: RadixKey, boundaries: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The digest of each prefix of ``key``; ``boundaries`` ascend."""
    digest = xxhash.xxh3_64(repr((key.extra_key, key.cache_salt)).encode())
    tokens, start = memoryview(key.token_ids), 0
    for boundary in boundaries:
        digest.update(tokens[start:boundary])
        start = boundary
        yield boundary, digest.intdigest()
