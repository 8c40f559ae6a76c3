"""What the counters say, as Prometheus metrics beside SGLang's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.swa_bitexact.receipt import REASONS
from sglang.srt.mem_cache.swa_bitexact.storage_digests import TransferCounters

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

PREFIX = "sglang:bitexact_"
# Seconds of the host; within the bounds that SGLang keeps to.
_BUCKETS = (
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.5,
    1.0,
)


class Metric(NamedTuple):
    """name: without PREFIX. label: the one label beside SGLang's, "" without."""

    name: str
    kind: str
    meaning: str
    label: str = ""


METRICS = (
    Metric(
        "tiles_captured_total",
        "counter",
        "Tiles (windows and overlap states at a page boundary) taken on the device.",
    ),
    Metric(
        "tiles_published_total",
        "counter",
        "Tiles handed to the radix tree, those included that it had already.",
    ),
    Metric(
        "tiles_dropped_total",
        "counter",
        "Reuse points without a tile because none was free on the device.",
    ),
    Metric(
        "tiles_superseded_total",
        "counter",
        "Tiles of a running answer given up for a newer one of the same answer.",
    ),
    Metric(
        "tiles_evicted_total",
        "counter",
        "Tiles of cached prefixes that left a tier to make room.",
        "tier",
    ),
    Metric(
        "quarantined_total",
        "counter",
        "Digests that failed: host, loads refused (SGLANG_SWA_VERIFY_HOST); storage, pages "
        "or tiles.",
        "tier",
    ),
    Metric(
        "requests_total",
        "counter",
        "Requests that took a slot: exact, all that rows alone would have matched was "
        "reused; clipped, less; cold, there was nothing.",
        "mode",
    ),
    Metric(
        "restores_total",
        "counter",
        "Tiles restored into a slot, by the tier on which the request found them.",
        "tier",
    ),
    Metric(
        "cuts_total",
        "counter",
        "Clipped requests by what ended their prefix.",
        "reason",
    ),
    Metric(
        "nominal_tokens_total",
        "counter",
        "Tokens that compressed rows alone would have matched.",
    ),
    Metric("effective_tokens_total", "counter", "Tokens that were reused."),
    Metric(
        "tile_moved_bytes_total",
        "counter",
        "Bytes of tiles copied on this rank, by way.",
        "way",
    ),
    Metric("tile_size_bytes", "gauge", "Bytes of one tile, on every tier."),
    Metric("tiles", "gauge", "Tiles that a pool holds.", "tier"),
    Metric(
        "tiles_used",
        "gauge",
        "Tiles in use, evictable ones included. On the device also what was freed and not "
        "looked at yet.",
        "tier",
    ),
    Metric(
        "restore_host_seconds",
        "histogram",
        "Time of the scheduler and the launching thread per batch that restores a prefix; "
        "without the copies.",
    ),
)


class TileMetrics:
    """The metrics of one scheduler; published where it publishes its statistics.

    Reads counters that are there anyway: nothing is counted per token, and nothing waits for
    the device. A counter that began anew goes on where it was.
    """

    def __init__(
        self, cache: UnifiedRadixCache, collector: SchedulerMetricsCollector
    ) -> None:
        """Registers the metrics with ``collector``'s labels and metric classes.

        Call after SGLang's own collector was made, which chooses Prometheus' directory.
        """
        # Only after PROMETHEUS_MULTIPROC_DIR is set.
        from prometheus_client import Counter, Gauge, Histogram

        self._cache = cache
        self._labels = dict(collector.labels)
        classes: dict[str, Callable[..., Any]] = {
            "counter": collector._counter_cls or Counter,
            "gauge": collector._gauge_cls or Gauge,
            "histogram": collector._histogram_cls or Histogram,
        }
        options: dict[str, dict[str, Any]] = {
            "counter": {},
            "gauge": {"multiprocess_mode": "mostrecent"},
            "histogram": {"buckets": _BUCKETS},
        }
        self._metrics = {
            metric.name: classes[metric.kind](
                name=PREFIX + metric.name,
                documentation=metric.meaning,
                labelnames=[*self._labels, *filter(None, [metric.label])],
                **options[metric.kind],
            )
            for metric in METRICS
        }
        self._published: dict[tuple[str, str], int] = {}

    def publish(self) -> None:
        """Bring every metric up to date. Does not synchronize."""
        found = snapshot(self._cache)
        for metric in METRICS:
            if metric.kind == "histogram":
                continue
            now = found[metric.name]
            for value, number in ({"": now} if isinstance(now, int) else now).items():
                extra = {metric.label: value} if metric.label else {}
                series = self._metrics[metric.name].labels(**self._labels, **extra)
                if metric.kind == "gauge":
                    series.set(number)
                    continue
                before = self._published.get((metric.name, value), 0)
                self._published[metric.name, value] = number
                series.inc(number - before if number >= before else number)
        times = self._cache.token_to_kv_pool_allocator.get_kvcache().tile_reader
        histogram = self._metrics["restore_host_seconds"].labels(**self._labels)
        while times.host_seconds:
            histogram.observe(times.host_seconds.popleft())


def snapshot(cache: UnifiedRadixCache) -> dict[str, int | Mapping[str, int]]:
    """Every counter and gauge of METRICS as it is now; with a label, by its values."""
    allocator = cache.token_to_kv_pool_allocator
    tiles = allocator.capture_planner.counters
    receipts = cache.restore_queue.receipts.counters
    size, page_size = allocator.capture_pool.layout.nbytes, allocator.page_size
    controller = cache.cache_controller
    digests = None if controller is None else controller.tile_digests
    moved = TransferCounters() if digests is None else digests.counters
    pools = {"device": (allocator.capture_pool.num_tiles, allocator.swa_attn_allocator)}
    if digests is not None:
        host = cache.host_pool_group.get_pool(PoolName.SWA)
        pools["host"] = (host.size // page_size, host)
    return {
        "tiles_captured_total": tiles.captured,
        "tiles_published_total": cache.tile_publisher.published,
        "tiles_dropped_total": tiles.dropped,
        "tiles_superseded_total": tiles.superseded,
        "tiles_evicted_total": cache.tile_publisher.evicted,
        "quarantined_total": {
            "host": moved.host_failed,
            "storage": moved.storage_failed,
        },
        "requests_total": receipts.modes,
        "restores_total": receipts.restores,
        "cuts_total": {reason: receipts.cuts[reason] for reason in REASONS},
        "nominal_tokens_total": receipts.nominal_tokens,
        "effective_tokens_total": receipts.effective_tokens,
        "tile_moved_bytes_total": {
            way: size * count
            for way, count in (
                ("capture", tiles.captured),
                ("restore", sum(receipts.restores.values())),
                ("device_to_host", moved.to_host),
                ("host_to_device", moved.to_device),
                ("host_to_storage", moved.to_storage),
                ("storage_to_host", moved.from_storage),
            )
        },
        "tile_size_bytes": size,
        "tiles": {tier: count for tier, (count, _) in pools.items()},
        "tiles_used": {
            tier: count - pool.available_size() // page_size
            for tier, (count, pool) in pools.items()
        },
    }
