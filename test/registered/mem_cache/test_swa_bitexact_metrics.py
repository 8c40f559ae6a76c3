"""Metrics say what the counters say, and the start-up line what the pools are."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from sglang.srt.mem_cache.swa_bitexact.attach_observe import attach_observe, describe
from sglang.srt.mem_cache.swa_bitexact.metrics import METRICS, PREFIX, TileMetrics, snapshot
from sglang.srt.mem_cache.swa_bitexact.startup_line import (
    TilePoolFacts,
    geometry_text,
    reuse_points_per_gb,
    startup_line,
    stride_advice,
)
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import TileCache, server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest, prefill
from kit.tile_storage import computed

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

P = PAGE
TOKENS = tokens_from(1, 4)
LABELS = {"model_name": "tiny", "tp_rank": 0}
TILE_BYTES = 4 * 131_072 + 2 * 32_768 + 2 * 8_192


class Published:
    """TileMetrics of a cache, in a registry of their own."""

    def __init__(self, cache: TileCache) -> None:
        self.registry = CollectorRegistry()
        collector = SimpleNamespace(
            labels=LABELS,
            _counter_cls=partial(Counter, registry=self.registry),
            _gauge_cls=partial(Gauge, registry=self.registry),
            _histogram_cls=partial(Histogram, registry=self.registry),
        )
        self.metrics = TileMetrics(cache.tree, collector)

    def value(self, name: str, **label: str) -> float | None:
        labels = {**LABELS, "tp_rank": "0", **label}
        return self.registry.get_sample_value(PREFIX + name, labels)


def test_every_series_is_there_from_the_start(cache):
    published = Published(cache)
    published.metrics.publish()
    assert {metric.name for metric in METRICS} == {*snapshot(cache.tree), "restore_host_seconds"}
    for metric in METRICS:
        if metric.kind == "histogram":
            assert published.value(f"{metric.name}_count") == 0
            continue
        found = snapshot(cache.tree)[metric.name]
        for value, number in {"": found}.items() if isinstance(found, int) else found.items():
            extra = {metric.label: value} if metric.label else {}
            assert published.value(metric.name, **extra) == number


def test_what_a_request_does_is_seen(cache):
    published = Published(cache)
    a = TileRequest(cache, TOKENS, seed=1).admit()
    cache.allocator.capture_planner.finish(prefill(cache, (a, 3 * P)))
    a.take_restores()
    a.finish()
    cache.settle()
    published.metrics.publish()
    assert published.value("tiles_captured_total") == 3
    assert published.value("tiles_published_total") == 3
    assert published.value("requests_total", mode="cold") == 1
    assert published.value("tile_moved_bytes_total", way="capture") == 3 * TILE_BYTES
    assert published.value("tile_moved_bytes_total", way="device_to_host") == 3 * TILE_BYTES
    assert published.value("tiles", tier="device") == 8
    assert (published.value("tiles_used", tier="device"), published.value("tiles_used", tier="host")) == (3, 3)
    # It is loaded and restored for the next one.
    cache.evict_device()
    b = TileRequest(cache, TOKENS, seed=2).admit().extend(3 * P + 1)
    plan = b.take_restores()
    cache.settle()
    plan.layer_wise = False
    cache.kvcache.tile_reader.restore(plan)
    published.metrics.publish()
    assert published.value("requests_total", mode="exact") == 1
    assert published.value("restores_total", tier="host") == 1
    assert published.value("tiles_evicted_total", tier="device") == 3
    assert (published.value("nominal_tokens_total"), published.value("effective_tokens_total")) == (3 * P, 3 * P)
    assert published.value("tile_moved_bytes_total", way="host_to_device") == TILE_BYTES
    assert published.value("tile_moved_bytes_total", way="restore") == TILE_BYTES
    assert published.value("restore_host_seconds_count") == 1
    b.abort()


def test_a_cold_batch_has_no_restore_time(cache):
    a = TileRequest(cache, TOKENS, seed=1).admit().extend(P)
    cache.kvcache.tile_reader.restore(a.take_restores())
    assert not cache.kvcache.tile_reader.host_seconds
    a.abort()


def test_counters_go_on_and_gauges_follow(cache):
    published = Published(cache)
    planner = cache.allocator.capture_planner
    planner.counters.dropped = 5
    published.metrics.publish()
    published.metrics.publish()
    assert published.value("tiles_dropped_total") == 5
    planner.counters.dropped = 7
    published.metrics.publish()
    assert published.value("tiles_dropped_total") == 7
    # Pools that were made anew count from 0.
    planner.counters.dropped = 2
    published.metrics.publish()
    assert published.value("tiles_dropped_total") == 9
    computed(cache, TOKENS, 2 * P, 2 * P, seed=1)
    cache.evict_device()
    # A tile that was freed counts as used until the host has looked.
    assert cache.allocator.tiles_available == 8
    published.metrics.publish()
    assert published.value("tiles_used", tier="device") == 0


def test_without_hicache_there_is_the_device_alone(core):
    with server_context() as args, TileCache(args, core=core, publishes=True, hicache=False) as cache:
        published = Published(cache)
        published.metrics.publish()
        assert published.value("tiles", tier="device") == 8
        assert published.value("tiles", tier="host") is None
        assert "Host: no HiCache." in describe(cache.tree)
        assert "identity" not in describe(cache.tree)


# The start-up line ----------------------------------------------------------------


@pytest.mark.parametrize("enable_metrics", [False, True])
def test_the_line_says_what_the_pools_are(cache, caplog, enable_metrics):
    collector = SimpleNamespace(
        labels=LABELS,
        _counter_cls=partial(Counter, registry=None),
        _gauge_cls=partial(Gauge, registry=None),
        _histogram_cls=partial(Histogram, registry=None),
    )
    reporter = SimpleNamespace(enable_metrics=enable_metrics, metrics_collector=collector, tile_metrics=None)
    with caplog.at_level("INFO"):
        attach_observe(cache.tree, reporter)
    (line,) = [r.getMessage() for r in caplog.records if r.name.endswith("attach_observe")]
    identity = cache.tree.host_pool_group.anchor_entry.host_pool.storage_format_tag
    assert identity.startswith("bitexact1-")
    assert line == (
        "Bit-exact reuse is on. A reuse point is 4 layers' windows of 128 tokens and 2 c4 and 2 c4-indexer states, "
        f"at every page of 256 tokens. It costs {TILE_BYTES} B; 1 GB holds 1649. Device: 8 reuse points, 0.01 GB per "
        "rank (0.93 of KV memory). Host: 7 reuse points, 0.00 GB per rank (0.5 of HiCache's). Storage: none, "
        f"identity {identity}. Page stride at which tiles last as long as their rows, for contexts of 8192 / 32768 / "
        "131072 tokens: 7 / 5 / 5."
    )
    assert isinstance(reporter.tile_metrics, TileMetrics) is enable_metrics


def test_the_line_of_a_large_model():
    geometry = geometry_text(window_layers=43, window=128, state_layers=21, indexer_layers=21, page_size=256, stride=4)
    line = startup_line(
        geometry,
        6_496_256,
        TilePoolFacts(768, 0.05),
        TilePoolFacts(14_623, 0.5),
        storage="file",
        identity="bitexact1-5c0e",
        advice=("More.",),
    )
    assert line == (
        "Bit-exact reuse is on. A reuse point is 43 layers' windows of 128 tokens and 21 c4 and 21 c4-indexer states, "
        "at every 4th page of 256 tokens. It costs 6496256 B; 1 GB holds 153. Device: 768 reuse points, 5.00 GB per "
        "rank (0.05 of KV memory). Host: 14623 reuse points, 94.99 GB per rank (0.5 of HiCache's). Storage: file, "
        "identity bitexact1-5c0e. More."
    )
    assert reuse_points_per_gb(9_224_192) == 108


def test_the_advice_of_a_large_model():
    assert stride_advice(14_623, 59_575, P) == (
        "Page stride at which tiles last as long as their rows, for contexts of 8192 / 32768 / 131072 tokens: "
        "7 / 5 / 5."
    )


@pytest.mark.parametrize(
    ("stride", "where"),
    [
        (0, "at the ends of prompts and answers, and at branch points, in pages of 256 tokens"),
        (1, "at every page of 256 tokens"),
        (2, "at every 2nd page of 256 tokens"),
        (3, "at every 3rd page of 256 tokens"),
        (11, "at every 11th page of 256 tokens"),
        (21, "at every 21st page of 256 tokens"),
    ],
)
def test_where_reuse_points_are(stride, where):
    text = geometry_text(window_layers=1, window=128, state_layers=0, indexer_layers=0, page_size=256, stride=stride)
    assert text == f"1 layers' windows of 128 tokens and 0 c4 and 0 c4-indexer states, {where}"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
