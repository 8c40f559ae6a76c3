"""What all scenarios share."""

from __future__ import annotations

from array import array
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from upstream.scenarios import observe


class Recording:
    """Mix into a test case: ``note`` adds to what the trees are compared by."""

    recorded: list[Any]

    def note(self, label: str, value: Any) -> None:
        if "recorded" not in vars(self):
            self.recorded = []
        self.recorded.append([label, observe.plain(value)])

    def note_state(self, label: str, cache: Any) -> None:
        self.note(label, observe.cache_state(cache))

    def note_match(self, label: str, cache: Any, tokens: list[int]) -> Any:
        """Match, record the result, its rows and the windows they map to; returns the result."""
        found = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        rows = cache.path_device_indices(found.last_device_node)[: found.device_prefix_len]
        self.note(label, [observe.match(found), rows, observe.window_values(cache, rows)])
        return found

    def note_evict(self, label: str, cache: Any, **amounts: int) -> None:
        self.note(label, observe.evict(cache.evict(EvictParams(**amounts))))
        self.note_state(f"{label}: left", cache)
