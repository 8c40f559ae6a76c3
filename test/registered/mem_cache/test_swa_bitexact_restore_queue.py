"""Which slots are restored, once each, from which tile; and what is counted as reuse."""

from __future__ import annotations

import sys

import pytest
import torch
from sglang.srt.mem_cache.swa_bitexact.receipt import ReceiptCounters
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import TileCache, server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

P = PAGE
TOKENS = tokens_from(1, 4)


@pytest.fixture(params=["python", "rust"])
def cache(request):
    """Tiles of TOKENS at 1 and 3 pages."""
    with server_context() as args, TileCache(args, core=request.param, tiles=8, publishes=True) as cache:
        cache.first = TileRequest(cache, TOKENS, seed=1).admit().extend(3 * P, P, 3 * P)
        assert cache.first.take_restores().boundaries == [0]
        cache.first.finish()
        cache.settle()
        cache.tree.restore_queue.receipts.counters = ReceiptCounters()
        yield cache


def counted(cache):
    """Slots with a prefix and without; tokens that rows alone would have matched, and that were reused."""
    counters = cache.tree.restore_queue.receipts.counters
    reused = sum(counters.restores.values())
    return reused, sum(counters.modes.values()) - reused, counters.nominal_tokens, counters.effective_tokens


def queued(request):
    """What was queued, as (slots, boundaries)."""
    plan = request.take_restores()
    return None if plan is None else (plan.slots, plan.boundaries)


def test_a_match_for_reuse_arms_the_slot_that_follows(cache):
    a = TileRequest(cache, TOKENS, seed=2).admit().extend(3 * P + 1)
    plan = a.take_restores()
    assert (plan.slots, plan.boundaries, plan.warm) == ([a.req.kv.req_pool_idx], [3 * P], 1)
    assert (plan.layer_wise, plan.executed, plan.tile_ids.dtype) == (False, False, torch.int64)
    assert plan.tile_ids.tolist() == [cache.tile_id_at(cache.match(TOKENS))]
    assert counted(cache) == (1, 0, 3 * P, 3 * P)
    assert a.take_restores() is None


def test_a_probe_arms_nothing(cache):
    """Priority, load estimates and chunk sizes look the prefix up, too."""
    a = TileRequest(cache, TOKENS, seed=2).match(for_reuse=False)
    cache.match(TOKENS)
    assert (a.req.prefix_len, a.req.swa_match) == (3 * P, None)
    a.req.lock = cache.tree.lock(a.req.last_node)
    a.extend(3 * P + 1)
    assert a.take_restores() is None
    assert counted(cache) == (0, 0, 0, 0)


def test_a_probe_does_not_disarm(cache):
    a = TileRequest(cache, TOKENS, seed=2).match()
    a.match(for_reuse=False)
    a.req.lock = cache.tree.lock(a.req.last_node)
    a.extend(3 * P + 1)
    assert queued(a) == ([a.req.kv.req_pool_idx], [3 * P])


def test_a_later_chunk_is_not_restored(cache):
    a = TileRequest(cache, TOKENS + tokens_from(5000, 2), seed=2).admit().extend(4 * P)
    assert queued(a) == ([a.req.kv.req_pool_idx], [3 * P])
    a.checkpoint().req.init_next_round_input(for_reuse=True)
    a.extend(5 * P)
    assert a.take_restores() is None
    assert counted(cache)[:2] == (1, 0)


def test_a_rejected_admission_counts_when_it_takes_a_slot(cache):
    """What it reuses is what the last match found, and what it took the slot with."""
    a = TileRequest(cache, TOKENS, seed=2)
    for _ in range(3):
        a.match()
        assert (a.req.prefix_len, a.req.swa_match.full_kv_hit_length) == (3 * P, 3 * P)
    assert counted(cache) == (0, 0, 0, 0)
    cache.evict_device()
    a.admit(loads=False).extend(3 * P + 1)
    assert queued(a) == ([a.req.kv.req_pool_idx], [0])
    assert counted(cache) == (0, 1, 3 * P, 0)


def test_a_retracted_request_is_armed_by_its_next_match(cache):
    a = TileRequest(cache, TOKENS, seed=2).admit().extend(3 * P + 1)
    assert queued(a) is not None
    a.retract()
    assert a.req.swa_match is None
    a.admit().extend(3 * P + 1)
    assert queued(a) == ([a.req.kv.req_pool_idx], [3 * P])
    assert counted(cache) == (2, 0, 6 * P, 6 * P)
    # Retracted between its match and its slot: the match is stale, and the next one replaces it.
    a.retract().match()
    a.admit().extend(3 * P + 1)
    assert queued(a) == ([a.req.kv.req_pool_idx], [3 * P])
    assert counted(cache)[0] == 3
    a.abort()
    cache.check()


def test_a_clipped_match_is_counted_with_both_lengths(cache):
    """The rows of 2 pages are there, the window of the first alone."""
    a = TileRequest(cache, TOKENS[: 2 * P] + tokens_from(5000, 1), seed=2).admit().extend(2 * P + 1)
    assert queued(a) == ([a.req.kv.req_pool_idx], [P])
    assert counted(cache) == (1, 0, 2 * P, P)


def test_one_plan_for_the_batch_with_cold_slots_last(cache):
    prompts = [tokens_from(9000, 1), TOKENS, tokens_from(8000, 1), TOKENS[: P + 9]]
    requests = [TileRequest(cache, tokens, seed=i).admit() for i, tokens in enumerate(prompts)]
    slots = cache.req_to_token_pool.alloc([r.req for r in requests])
    for request, slot in zip(requests, slots, strict=True):
        node = request.req.last_node if request.req.prefix_len else requests[3].req.last_node
        # A cold slot may have rows with a tile, too: they say nothing about it.
        rows = cache.tree.path_device_indices(node)
        cache.req_to_token_pool.write((slot, slice(0, len(rows))), rows.to(torch.int32))
    cache.tree.restore_swa_windows([r.req for r in requests], torch.tensor(slots))
    plan = requests[0].take_restores()
    assert plan.slots == [slots[1], slots[3], slots[0], slots[2]]
    assert plan.boundaries == [3 * P, P, 0, 0]
    at = [cache.tile_id_at(cache.match(tokens)) for tokens in (TOKENS, TOKENS[:P])]
    assert (plan.tile_ids.tolist(), plan.warm) == ([*at, 0, 0], 2)
    assert counted(cache) == (2, 2, 4 * P, 4 * P)


def test_a_prefix_that_ends_inside_a_page_is_a_programming_error(cache):
    a = TileRequest(cache, TOKENS, seed=2).admit()
    a.req.prefix_len = P + 3
    with pytest.raises(AssertionError, match="reuses 259 tokens, expected whole pages of 256: no tile ends there"):
        a.extend(3 * P)


def test_a_load_under_way_makes_the_plan_layer_wise(cache):
    cache.evict_device()
    a = TileRequest(cache, TOKENS, seed=2).admit().extend(3 * P + 1)
    plan = a.take_restores()
    assert (plan.layer_wise, plan.boundaries) == (True, [3 * P])
    cache.settle()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
