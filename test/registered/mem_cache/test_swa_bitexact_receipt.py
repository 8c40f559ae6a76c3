"""What a request is told about its reuse: how much, from where, and why not more."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from sglang.srt.entrypoints.openai.utils import cached_tokens_details_from_dict
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import CachedTokensDetails
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.swa_bitexact.evict import evict_tiles
from sglang.srt.mem_cache.swa_bitexact.receipt import MODES, REASONS, MatchedForReuse, ReceiptCounters, cut_reason
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import TileCache, server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest, prefill
from kit.tile_storage import TILE, TileStorage, computed, events_until, start_prefetch, wait_for_storage

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

P = PAGE
TOKENS = tokens_from(1, 4)


def counters(modes=(), cuts=(), restores=()):
    """ReceiptCounters with one of each that is named."""
    expected = ReceiptCounters()
    for counts, names in ((expected.modes, modes), (expected.cuts, cuts), (expected.restores, restores)):
        for name in names:
            counts[name] += 1
    return expected


def receipt(cache, request, end=3 * P + 1):
    """Of a request that takes its slot now, computes up to ``end`` and is gone."""
    request.extend(end)
    if request.take_restores() is not None:
        cache.settle()
    found = request.req.swa_receipt
    request.abort()
    return found


@pytest.fixture
def filled(cache):
    """TOKENS with tiles at 1 and 3 pages; counted from here."""
    computed(cache, TOKENS, 3 * P, P, 3 * P, seed=1)
    start_counting(cache)
    return cache


def start_counting(cache):
    cache.tree.restore_queue.receipts.counters = ReceiptCounters()
    cache.tree.tile_publisher.evicted = {"device": 0, "host": 0}


def counted(cache):
    """Without tokens."""
    return replace(cache.tree.restore_queue.receipts.counters, nominal_tokens=0, effective_tokens=0)


# The decision ------------------------------------------------------------------


@pytest.mark.parametrize(("was_dropped", "reason"), [(None, "off_grid"), (True, "pool_full"), (False, "tile_evicted")])
def test_what_ended_a_prefix(was_dropped, reason):
    """What was not loaded comes first, and storage second."""
    match = MatchedForReuse(nominal=1792, on_device=256, loads=True, tile_on_host=True, storage_end=1792)
    assert cut_reason(match, 256, host_changed=False, was_dropped=was_dropped) == "load_rejected"
    assert cut_reason(match, 256, host_changed=True, was_dropped=was_dropped) == "digest_failed"
    assert cut_reason(match, 1024, host_changed=False, was_dropped=was_dropped) == "storage_incomplete"
    match = match._replace(storage_end=1024)
    assert cut_reason(match, 1024, host_changed=False, was_dropped=was_dropped) == reason


# Receipts ----------------------------------------------------------------------


def test_all_that_rows_would_have_matched(filled):
    a = TileRequest(filled, TOKENS, seed=2).admit()
    assert receipt(filled, a) == {
        "mode": "exact",
        "nominal_hit": 3 * P,
        "effective_hit": 3 * P,
        "restored_boundary": 3 * P,
        "recomputed_tokens": P,
        "tile_tier": "device",
    }
    assert counted(filled) == counters(["exact"], restores=["device"])


def test_nothing_was_there(filled):
    a = TileRequest(filled, tokens_from(9000, 2), seed=2).admit()
    assert receipt(filled, a, 2 * P) == {
        "mode": "cold",
        "nominal_hit": 0,
        "effective_hit": 0,
        "restored_boundary": 0,
        "recomputed_tokens": 2 * P,
    }
    assert counted(filled) == counters(["cold"])


@pytest.mark.parametrize(("stride", "reason"), [(1, "tile_evicted"), (4, "off_grid")])
def test_rows_without_a_tile(filled, stride, reason):
    """The rows of 2 pages are there, the tile of the first alone."""
    filled.allocator.capture_planner.stride = stride
    a = TileRequest(filled, TOKENS[: 2 * P] + tokens_from(5000, 1), seed=2).admit()
    assert receipt(filled, a) == {
        "mode": "clipped",
        "nominal_hit": 2 * P,
        "effective_hit": P,
        "restored_boundary": P,
        "recomputed_tokens": 2 * P,
        "reason": reason,
        "tile_tier": "device",
    }
    assert counted(filled) == counters(["clipped"], [reason], ["device"])


@pytest.mark.parametrize(
    ("fate", "prompt", "effective", "reason"),
    [
        ("dropped", 2 * P + 9, 0, "pool_full"),
        ("evicted", 2 * P + 9, 0, "tile_evicted"),
        ("not due", 2 * P - 9, P, "off_grid"),
    ],
)
def test_what_became_of_the_last_page_of_a_prompt(cache, fate, prompt, effective, reason):
    """Without a grid, so that its history alone tells; the answer's end has a tile, and another prompt parts before."""
    cache.allocator.capture_planner.stride = 0
    held = cache.allocator.alloc_tiles(cache.allocator.tiles_available) if fate == "dropped" else None
    a = TileRequest(cache, TOKENS[:prompt], seed=1).admit()
    prefill(cache, (a, prompt))
    a.checkpoint()
    if held is not None:
        cache.allocator.free_tiles(held)
    a.decode(3 * P, 3 * P).finish()
    cache.settle()
    if fate == "evicted":
        evict_tiles(cache.tree, 1)
        cache.tree.evict_host(P, ComponentType.SWA)
    start_counting(cache)
    known = (a.req.origin_input_ids + a.req.output_ids)[: 2 * P]
    found = receipt(cache, TileRequest(cache, known + tokens_from(5000, 1), seed=2).admit())
    assert (found["mode"], found["nominal_hit"], found["effective_hit"]) == ("clipped", 2 * P, effective)
    assert found["reason"] == reason
    assert counted(cache) == counters(["clipped"], [reason], ["device"] if effective else [])


def test_a_tile_from_the_host(filled):
    filled.evict_device()
    a = receipt(filled, TileRequest(filled, TOKENS, seed=2).admit())
    assert (a["mode"], a["effective_hit"], a["tile_tier"]) == ("exact", 3 * P, "host")
    assert counted(filled) == counters(["exact"], restores=["host"])


def test_a_load_that_was_rejected(filled):
    filled.evict_device()
    a = receipt(filled, TileRequest(filled, TOKENS, seed=2).admit(loads=False))
    assert (a["mode"], a["nominal_hit"], a["effective_hit"], a["reason"]) == ("clipped", 3 * P, 0, "load_rejected")
    assert "tile_tier" not in a
    assert counted(filled) == counters(["clipped"], ["load_rejected"])


def test_a_host_page_that_changed(core):
    with (
        envs.SGLANG_SWA_VERIFY_HOST.override(True),
        server_context() as args,
        TileCache(args, core=core, publishes=True) as cache,
    ):
        computed(cache, TOKENS, 3 * P, 3 * P, seed=1)
        cache.evict_device()
        start_counting(cache)
        digests = cache.controller.tile_digests
        digests.wait()
        for page in digests.host_pools["swa"].kv_buffer:
            page.view(torch.uint8).flatten()[::1000] ^= 1
        a = receipt(cache, TileRequest(cache, TOKENS, seed=2).admit())
        assert (a["mode"], a["effective_hit"], a["reason"]) == ("clipped", 0, "digest_failed")
        assert (digests.counters.host_failed, digests.refused_loads) == (1, set())
        # The next one that is not loaded has another reason.
        a = receipt(cache, TileRequest(cache, TOKENS, seed=3).admit(loads=False))
        assert a["reason"] == "load_rejected"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_tile_from_storage(core, damaged):
    """Read whole it is reused; damaged, the receipt names what storage had."""
    with tempfile.TemporaryDirectory() as directory:
        storage = TileStorage(Path(directory), core)
        with server_context(**storage.arguments) as args:
            with storage.server(args) as cache:
                computed(cache, TOKENS, 3 * P, 3 * P, seed=1)
                wait_for_storage(cache)
                cache.settle()
                digests = cache.controller.tile_digests.counters
                assert (digests.to_host, digests.to_storage, digests.from_storage) == (1, 1, 0)
                path = storage.path(cache, TILE[0], TOKENS[: 3 * P])
            if damaged:
                path.write_bytes(bytes(path.stat().st_size))
            with storage.server(args) as cache:
                a = TileRequest(cache, TOKENS, seed=2)
                handle = start_prefetch(cache, TOKENS, a.req.rid)
                events_until(cache, lambda: cache.tree.check_prefetch_progress(handle))
                a.req.storage_hit_length, a.req.storage_hit_start = cache.tree.pop_prefetch_loaded_span(handle)
                found = receipt(cache, a.admit())
                assert found["nominal_hit"] == 3 * P
                digests = cache.controller.tile_digests.counters
                if damaged:
                    assert (found["effective_hit"], found["reason"]) == (0, "storage_incomplete")
                    assert (digests.storage_failed, digests.from_storage, digests.to_device) == (1, 0, 0)
                else:
                    assert (found["effective_hit"], found["tile_tier"]) == (3 * P, "storage")
                    assert (digests.storage_failed, digests.from_storage, digests.to_device) == (0, 1, 1)


def test_a_request_keeps_its_first_receipt(filled):
    """As it keeps its first cached_tokens; what is counted are slots."""
    a = TileRequest(filled, TOKENS, seed=2).admit().extend(3 * P + 1)
    a.take_restores()
    a.retract()
    filled.evict_device()
    first = receipt(filled, a.admit(loads=False))
    assert (first["mode"], first["tile_tier"]) == ("exact", "device")
    assert counted(filled) == counters(["exact", "clipped"], ["load_rejected"], ["device"])


def test_a_match_that_is_repeated_remembers_what_storage_did_not_deliver(filled):
    receipts = filled.tree.restore_queue.receipts
    a = TileRequest(filled, TOKENS, seed=2)
    receipts.storage_incomplete(a.req.rid, 4 * P)
    a.match()
    found = receipt(filled, a.admit())
    assert (found["nominal_hit"], found["reason"]) == (4 * P, "storage_incomplete")
    assert receipt(filled, TileRequest(filled, TOKENS, seed=2).admit())["mode"] == "exact"


def test_requests_that_never_come_back_are_forgotten(filled):
    receipts = filled.tree.restore_queue.receipts
    for number in range(1025):
        receipts.storage_incomplete(f"gone {number}", P)
    assert (len(receipts._incomplete), "gone 0" in receipts._incomplete) == (1024, False)


def test_it_travels_with_the_cached_token_details(filled):
    """Between processes they are of a type; what an OpenAI client gets without it is stock's."""
    tiers = {"device": 3 * P, "host": 0}
    details = {**tiers, "reuse_receipt": receipt(filled, TileRequest(filled, TOKENS, seed=2).admit())}
    packed = msgspec.msgpack.encode(details)
    assert msgspec.msgpack.decode(packed, type=CachedTokensDetails) == details
    assert cached_tokens_details_from_dict(details).model_dump() == details
    assert cached_tokens_details_from_dict(tiers).model_dump_json() == '{"device":768,"host":0}'
    stored = {**tiers, "storage": P, "storage_backend": "File"}
    assert cached_tokens_details_from_dict(stored).model_dump() == stored


def test_values_are_of_the_bounded_sets(filled):
    assert (tuple(counted(filled).modes), tuple(counted(filled).cuts)) == (MODES, REASONS)


# Evictions ---------------------------------------------------------------------


def test_evicted_tiles_are_counted_by_tier(filled):
    """Two leave the device, in whatever way; then both leave the host."""
    evicted = filled.tree.tile_publisher.evicted
    filled.evict_device()
    assert evicted == {"device": 2, "host": 0}
    filled.tree.evict_host(1 << 20, ComponentType.SWA)
    assert evicted == {"device": 2, "host": 2}


def test_a_leafs_tile_goes_with_its_rows(filled):
    """Evicted for rows alone, as an allocation does it."""
    filled.tree.evict(EvictParams(num_tokens=1))
    assert filled.tree.tile_publisher.evicted["device"] == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
