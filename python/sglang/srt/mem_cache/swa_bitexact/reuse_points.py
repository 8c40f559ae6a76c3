"""Remembers what became of reuse points, for the receipts of prefixes that end before them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.swa_bitexact.planner import CapturePlanner

# Some 12 MB when there are as many.
_MOST_POINTS = 1 << 16


class ReusePoints:
    """Which reuse points have no tile since the device had none free, and which had one where
    the stride keeps none: the tree does not remember why a node has no window.

    A point is a 64-bit digest of namespace and tokens. Nodes would not do: the tree splits
    them, and rows come back from storage on new ones. Two prefixes of one digest would share a
    reason in a receipt; nothing else follows from it. The last 65,536 points are known.
    """

    def __init__(self, planner: CapturePlanner) -> None:
        self._planner = planner
        # By digest: whether it was dropped. A point on the grid that is not here had a tile.
        self._dropped: OrderedDict[int, bool] = OrderedDict()

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._dropped.clear()

    def settle(
        self, key: RadixKey, *, tiles: Iterable[int] = (), dropped: Iterable[int] = ()
    ) -> None:
        """Prefixes of ``key`` have a tile, or were due and have none; the last word counts.

        Hashes ``key`` up to the last of them, unless there is nothing to write or to forget.

        Example, page_size 256, stride 4, tiles (1_024, 1_280), dropped (2_048,):
            1_280 had a tile, 2_048 was dropped, and 1_024 is known by not being there
        """
        points = dict.fromkeys(tiles, False) | dict.fromkeys(dropped, True)
        known, keeps = self._dropped, self._planner.keeps
        new = {b for b, without in points.items() if without or not keeps(b)}
        if not known and not new:
            return
        for boundary, digest in _digests(key, sorted(points)):
            # Out and in again, so that it is the newest.
            known.pop(digest, None)
            if boundary in new:
                known[digest] = points[boundary]
                if len(known) > _MOST_POINTS:
                    known.popitem(last=False)

    def was_dropped(self, key: RadixKey, after: int, up_to: int) -> bool | None:
        """Whether the longest prefix of ``key`` that was due a tile got none; None if none was due.

        Of its prefixes of (after, up_to] tokens, both whole pages.

        Example, page_size 256, stride 4, after 256, up to 1_280, of which 768 was dropped:
            False, 1_024 had one. The same up to 768: True. The same up to 512: None.
        """
        page, found = self._planner.page_size, None
        for boundary, digest in _digests(key, range(after + page, up_to + 1, page)):
            on_grid = False if self._planner.keeps(boundary) else None
            if (dropped := self._dropped.get(digest, on_grid)) is not None:
                found = dropped
        return found


def _digests(key: RadixKey, boundaries: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The digest of each prefix of ``key``; ``boundaries`` ascend."""
    digest = xxhash.xxh3_64(repr((key.extra_key, key.cache_salt)).encode())
    tokens, start = memoryview(key.token_ids), 0
    for boundary in boundaries:
        digest.update(tokens[start:boundary])
        start = boundary
        yield boundary, digest.intdigest()
