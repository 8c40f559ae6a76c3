"""What a request reused, and why not more: the receipt in its answer, and the sums of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

MODES = ("exact", "clipped", "cold")
TIERS = ("device", "host", "storage")
# What can be told apart from scheduler state; see cut_reason().
REASONS = (
    "load_rejected",
    "digest_failed",
    "storage_incomplete",
    "off_grid",
    "pool_full",
    "tile_evicted",
)
# Requests whose storage read fell short, and which have taken no slot since.
_MOST_INCOMPLETE = 1024


class MatchedForReuse(NamedTuple):
    """What a match for reuse found, in tokens of the prompt, all whole pages.

    nominal: what compressed rows alone would have matched. on_device: what can be reused
    without a load. loads: a longer prefix needs one. tile_on_host: its tile is not on the device.
    storage_end: where the rows end that storage said it had and did not deliver; 0 if it did.
    """

    nominal: int
    on_device: int
    loads: bool
    tile_on_host: bool
    storage_end: int = 0


def cut_reason(
    match: MatchedForReuse,
    effective: int,
    *,
    host_changed: bool,
    was_dropped: bool | None,
) -> str:
    """Why a request reuses ``effective`` tokens, fewer than ``match.nominal``.

    The first that holds. digest_failed: its host pages changed (host_changed). load_rejected:
    the host had more, and it was not loaded: no room on the device, or too little to be worth
    it. storage_incomplete: storage said it had more, and not all of it arrived. off_grid: no
    tile was due in what was cut (was_dropped, of ReusePoints, is None). pool_full: one was, and
    was dropped or given up, since the device had none free. tile_evicted: it is on no tier any
    more. Both are about the longest prefix there that was due one.

    Example, rows up to 1_792, of which the request reuses 512, all that the device has:
        1_024 was due a tile and got none (True)  -> "pool_full"
        it had one (False)                        -> "tile_evicted"
        neither it nor another was due one (None) -> "off_grid"
        any of these, and nothing was loaded of a prefix on the host -> "load_rejected"
    """
    if match.loads and effective == match.on_device:
        return "digest_failed" if host_changed else "load_rejected"
    if effective < match.storage_end:
        return "storage_incomplete"
    if was_dropped is None:
        return "off_grid"
    return "pool_full" if was_dropped else "tile_evicted"


@dataclass
class ReceiptCounters:
    """Since start-up: requests that took a slot by mode, their cuts by reason, restores by tier.

    nominal_tokens: what their compressed rows alone would have matched. effective_tokens: what
    they reused.
    """

    modes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    cuts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    restores: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    nominal_tokens: int = 0
    effective_tokens: int = 0


class ReuseReceipts:
    """Writes the receipts of one scheduler's requests, from what the scheduler knows alone.

    Nothing is decided here, and nothing waits: a receipt is written once, when its request
    takes its first slot.
    """

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache
        # By request id: where the rows end that storage did not deliver.
        self._incomplete: dict[str, int] = {}
        self.counters = ReceiptCounters()

    def storage_incomplete(self, rid: str, end: int) -> None:
        """Storage had the rows of ``rid``'s first ``end`` tokens, and not all of them arrived."""
        if len(self._incomplete) == _MOST_INCOMPLETE:
            del self._incomplete[next(iter(self._incomplete))]
        self._incomplete[rid] = end

    def found(self, rid: str, result: MatchResult) -> MatchedForReuse:
        """What the match for reuse found after which request ``rid`` took its slot."""
        storage_end = self._incomplete.pop(rid, 0)
        tile_on_host = result.swa_host_hit_length > 0
        return MatchedForReuse(
            max(result.full_kv_hit_length, storage_end),
            result.device_prefix_len,
            result.host_hit_length > 0 or tile_on_host,
            tile_on_host,
            storage_end,
        )

    def take(self, req: Req, match: MatchedForReuse) -> None:
        """``req`` has a slot and reuses ``req.prefix_len`` tokens: count, and write its receipt.

        A request that was retracted counts again, and keeps its first receipt, as it keeps its
        first ``cached_tokens``.
        """
        effective, reason = req.prefix_len, ""
        points = self._cache.tile_publisher.points
        key = RadixKey(
            req.full_untruncated_fill_ids, req.extra_key, cache_salt=req.cache_salt
        )
        if effective < match.nominal:
            reason = cut_reason(
                match,
                effective,
                host_changed=self._host_changed(req),
                was_dropped=points.was_dropped(key, effective, match.nominal),
            )
            self.counters.cuts[reason] += 1
        self.counters.nominal_tokens += match.nominal
        self.counters.effective_tokens += effective
        mode = "clipped" if reason else "exact" if effective else "cold"
        self.counters.modes[mode] += 1
        receipt: dict[str, int | str] = {
            "mode": mode,
            "nominal_hit": match.nominal,
            "effective_hit": effective,
            "restored_boundary": effective,
            "recomputed_tokens": len(req.full_untruncated_fill_ids) - effective,
        }
        if reason:
            receipt["reason"] = reason
        if effective:
            points.settle(key, tiles=[effective])
            receipt["tile_tier"] = tier = _tile_tier(req, match, effective)
            self.counters.restores[tier] += 1
        if req.swa_receipt is None:
            req.swa_receipt = receipt

    def _host_changed(self, req: Req) -> bool:
        """Whether a load for ``req`` was refused since its host pages are not what they were."""
        controller = self._cache.cache_controller
        digests = None if controller is None else controller.tile_digests
        if digests is None or req.best_match_node not in digests.refused_loads:
            return False
        digests.refused_loads.remove(req.best_match_node)
        return True


def _tile_tier(req: Req, match: MatchedForReuse, effective: int) -> str:
    """Where the restored tile came from: loaded or not, and read from storage for this request."""
    start = req.storage_hit_start
    if start is not None and start < effective <= start + req.storage_hit_length:
        return "storage"
    loaded = match.tile_on_host and effective > match.on_device
    return "host" if loaded else "device"
