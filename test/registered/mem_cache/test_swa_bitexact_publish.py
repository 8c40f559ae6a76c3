"""What a checkpoint publishes: each tile on the node that ends at its boundary, and nothing else."""

from __future__ import annotations

import sys

import pytest
import torch
from sglang.srt.mem_cache.swa_bitexact.tile_table import CapturePlan, TileCapture
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import TileCache, server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

P = PAGE
TILES, PAGES = 8, 16


@pytest.fixture(params=["python", "rust"])
def cache(request):
    with server_context() as args, TileCache(args, core=request.param, tiles=TILES, publishes=True) as cache:
        assert cache.free() == (TILES, PAGES)
        yield cache


def hit(cache, tokens, length=None):
    """What a request of the first ``length`` tokens would reuse on the device."""
    return cache.match(tokens[:length]).device_prefix_len


def reuses(cache, tokens, boundary, owner):
    """The match of ``tokens`` ends at ``boundary``, and with the tile that ``owner`` captured there."""
    match = cache.match(tokens)
    return match.device_prefix_len == boundary and cache.holds(match, owner.captured[boundary])


def free_sets(cache):
    """The free tiles and the free FULL pages themselves."""
    cache.free()
    pools = cache.allocator.swa_attn_allocator, cache.allocator.full_attn_allocator
    return [set(pool.get_all_free_pages().tolist()) for pool in pools]


def test_a_finished_request(cache):
    tokens = tokens_from(1, 3)
    a = TileRequest(cache, tokens, seed=1).admit().extend(2 * P + 10, 2 * P)
    assert (hit(cache, tokens), cache.free()) == (0, (7, 13))
    a.finish()
    cache.check()
    assert reuses(cache, tokens, 2 * P, a)
    # The unaligned end is the request's alone.
    assert cache.free() == (7, 14)
    assert cache.tree.tile_publisher.published == 1


def test_an_unfinished_request_goes_on_from_what_it_published(cache):
    tokens = tokens_from(1, 5)
    a = TileRequest(cache, tokens, seed=1).admit().extend(2 * P + 100, 2 * P).checkpoint()
    cache.check(a)
    assert reuses(cache, tokens, 2 * P, a)
    assert (a.req.kv.cache_protected_len, a.req.swa_tiles.tiles, cache.free()) == (2 * P, {}, (7, 13))
    a.extend(3 * P + 1, 3 * P).finish()
    cache.check()
    assert reuses(cache, tokens[: 2 * P + 100], 2 * P, a)
    assert reuses(cache, tokens, 3 * P, a)
    assert cache.free() == (6, 13)


def test_a_generated_boundary(cache):
    a = TileRequest(cache, tokens_from(1, 2)[: P + 5], seed=1).admit().extend(P + 5, P).checkpoint()
    a.decode(3 * P, 2 * P, 3 * P).finish()
    cache.check()
    whole = a.req.origin_input_ids + a.req.output_ids
    assert [reuses(cache, whole[: n * P + 1], n * P, a) for n in (1, 2, 3)] == [True] * 3
    assert cache.free() == (5, 13)


def test_a_chunk_without_a_tile_at_its_end(cache):
    tokens = tokens_from(1, 5)
    a = TileRequest(cache, tokens, seed=1).admit().extend(3 * P, P).checkpoint()
    cache.check(a)
    assert [hit(cache, tokens, n * P) for n in (1, 2, 3)] == [P, P, P]
    assert a.req.kv.cache_protected_len == 3 * P
    a.extend(4 * P + 9, 4 * P).checkpoint()
    cache.check(a)
    assert reuses(cache, tokens, 4 * P, a)
    assert [hit(cache, tokens, n * P) for n in (1, 2, 3, 4)] == [P, P, P, 4 * P]
    a.finish()
    cache.check()
    assert cache.free() == (6, 12)


def test_several_boundaries_at_once(cache):
    tokens = tokens_from(1, 6)
    a = TileRequest(cache, tokens, seed=1).admit().extend(5 * P + 1, P, 2 * P, 4 * P, 5 * P).checkpoint()
    cache.check(a)
    assert [hit(cache, tokens, n * P) for n in range(1, 7)] == [P, 2 * P, 2 * P, 4 * P, 5 * P, 5 * P]
    for n in (1, 2, 4, 5):
        assert reuses(cache, tokens[: n * P], n * P, a)
    assert cache.free() == (4, 10)
    a.abort()
    cache.check()
    assert cache.free() == (4, 11)


def test_one_boundary_of_several_below_the_end(cache):
    """The last insert has no tile, and does not publish the one before it again."""
    tokens = tokens_from(1, 4)
    a = TileRequest(cache, tokens, seed=1).admit().extend(3 * P + 1, P, 2 * P).finish()
    cache.check()
    assert [hit(cache, tokens, n * P) for n in (1, 2, 3)] == [P, 2 * P, 2 * P]
    assert reuses(cache, tokens, 2 * P, a)
    assert cache.free() == (6, 13)


def test_a_tile_in_flight_is_the_trees_once_it_is_published(cache):
    """The next chunk is scheduled before the last one's result is processed."""
    tokens = tokens_from(1, 5)
    planner = cache.allocator.capture_planner
    a = TileRequest(cache, tokens, seed=1).admit().extend(2 * P, 2 * P, in_flight=True)
    owner, tile_id = a.req.swa_tiles, a.req.swa_tiles.tiles[2 * P]
    first = CapturePlan((TileCapture(owner, 2 * P, a.req.kv.req_pool_idx, 0, 0, True, False),), tile_id)
    a.checkpoint().extend(4 * P, 4 * P, in_flight=True)
    cache.check(a)
    planner.finish(first)
    cache.check(a)
    assert (owner.in_flight, sorted(owner.tiles)) == ({4 * P}, [4 * P])
    # Released while the second chunk is under way: its tile stays until the step is done.
    second = CapturePlan((first.captures[0]._replace(boundary=4 * P),), owner.tiles[4 * P])
    a.abort()
    assert cache.free() == (6, 14)
    planner.finish(second)
    cache.check()
    assert cache.free() == (7, 14)
    assert reuses(cache, tokens, 2 * P, a)
    assert planner.counters.returned == 1


@pytest.mark.parametrize("branch_has_tile", [True, False])
def test_after_a_clamped_match_branch_and_last_boundary_come_together(cache, branch_has_tile):
    common = tokens_from(1, 3)
    first, second = common + tokens_from(5000, 2), common + tokens_from(7000, 3)
    a = TileRequest(cache, first, seed=1).admit().extend(4 * P, P, 4 * P).finish()
    cache.check()
    assert cache.free() == (6, 12)
    b = TileRequest(cache, second, seed=2).admit()
    assert (b.req.prefix_len, b.req.swa_branching_seqlen) == (P, 3 * P)
    captures = (3 * P, 5 * P) if branch_has_tile else (5 * P,)
    b.extend(5 * P + 7, *captures).checkpoint()
    cache.check(b)
    assert reuses(cache, second, 5 * P, b)
    assert reuses(cache, first, 4 * P, a)
    branch = cache.match(common + tokens_from(9000, 1))
    assert branch.device_prefix_len == (3 * P if branch_has_tile else P)
    assert cache.holds(branch, (b.captured[3 * P] if branch_has_tile else a.captured[P]))
    # Of b's own four whole pages, two were the tree's already; its last one is unaligned.
    assert cache.free() == (6 - len(captures), 12 - 2 - 1)
    b.finish()
    cache.check()
    assert cache.free() == (6 - len(captures), 12 - 2)


def test_a_duplicate_leaves_both_free_lists_as_they_were(cache):
    tokens = tokens_from(1, 4)
    a, b = (TileRequest(cache, tokens, seed=seed).admit() for seed in (1, 2))
    a.extend(3 * P + 1, 2 * P, 3 * P).checkpoint()
    before = free_sets(cache)
    b.extend(3 * P + 1, 2 * P, 3 * P)
    assert cache.free() == (4, 8)
    b.checkpoint()
    cache.check(a, b)
    assert a.rows[: 3 * P].tolist() == b.rows[: 3 * P].tolist()
    b.finish()
    assert free_sets(cache) == before
    a.finish()
    cache.check()
    assert cache.free() == (6, 13)
    assert reuses(cache, tokens, 3 * P, a) and reuses(cache, tokens[: 2 * P], 2 * P, a)


@pytest.mark.parametrize("where", [0, 100])
def test_divergence_at_and_above_a_carrier(cache, where):
    first = tokens_from(1, 4)
    second = first[: 2 * P + where] + tokens_from(5000, 2)
    a = TileRequest(cache, first, seed=1).admit().extend(4 * P, 2 * P, 4 * P).finish()
    b = TileRequest(cache, second, seed=2).admit()
    assert (b.req.prefix_len, b.req.swa_branching_seqlen) == (2 * P, None)
    b.extend(4 * P, 4 * P).finish()
    cache.check()
    assert reuses(cache, first, 4 * P, a) and reuses(cache, second, 4 * P, b)
    assert reuses(cache, first[: 2 * P], 2 * P, a)
    assert cache.free() == (5, 10)


@pytest.mark.parametrize("at", [2, 3])
def test_a_split_above_and_at_a_carrier(cache, at):
    """[0, 3P) is one node and the carrier [3P, 4P) another; a shorter request ends inside the first, or at its end."""
    tokens = tokens_from(1, 5)
    a = TileRequest(cache, tokens, seed=1).admit().extend(4 * P, 4 * P).finish()
    b = TileRequest(cache, tokens[: at * P + 1], seed=2).admit()
    assert b.req.prefix_len == 0
    b.extend(at * P + 1, at * P).finish()
    cache.check()
    assert [hit(cache, tokens, n * P) for n in range(1, 5)] == [at * P * (n >= at) for n in (1, 2, 3)] + [4 * P]
    assert reuses(cache, tokens[: at * P], at * P, b) and reuses(cache, tokens, 4 * P, a)
    assert cache.free() == (6, 12)


def test_probes_split_the_nodes_before_a_carrier(cache):
    tokens = tokens_from(1, 5)
    a = TileRequest(cache, tokens, seed=1).admit().extend(5 * P, 5 * P).checkpoint()
    for n in (3, 1, 4, 2):
        assert hit(cache, tokens[: n * P] + tokens_from(9000, 1)) == 0
        cache.check(a)
    assert reuses(cache, tokens, 5 * P, a)
    a.abort()
    cache.check()


@pytest.mark.parametrize("locked", [False, True])
def test_a_window_comes_to_a_node_without_one(cache, locked):
    tokens = tokens_from(1, 3)
    a = TileRequest(cache, tokens, seed=1).admit().extend(2 * P + 1).checkpoint()
    a_rows = a.rows[: 2 * P].clone()
    cache.settle()
    if not locked:
        a.finish()
    b = TileRequest(cache, tokens, seed=2).admit()
    assert (b.req.prefix_len, b.req.swa_branching_seqlen) == (0, 2 * P)
    b.extend(2 * P + 1, 2 * P)
    b_rows = b.rows[: 2 * P].clone()
    b.checkpoint()
    cache.check(b, *([a] if locked else []))
    assert reuses(cache, tokens, 2 * P, b)
    # The page with the window: b's rows take a's place unless a still reads its own.
    expected = a_rows if locked else torch.cat((a_rows[:P], b_rows[P:]))
    found = cache.tree.path_device_indices(cache.match(tokens).last_device_node)
    assert found.tolist() == expected.tolist()
    assert b.rows[: 2 * P].tolist() == found.tolist()
    if locked:
        assert a.rows[: 2 * P].tolist() == found.tolist()
        a.finish()
    b.finish()
    cache.check()
    assert cache.free() == (7, 14)
    assert reuses(cache, tokens, 2 * P, b)


def test_a_decoding_request_keeps_its_last_carrier_locked(cache):
    """SGLang would release it once the window has moved on, and evict the leaf's window at once."""
    a = TileRequest(cache, tokens_from(1, 3), seed=1).admit().extend(2 * P, 2 * P).checkpoint()
    cache.settle()
    a.decode(2 * P + 200)
    cache.tree.release_swa_prefix_lock(a.req)
    cache.check(a)
    assert (cache.tree.swa_evictable_size(), cache.tree.tree_core.swa_protected_size()) == (0, P)
    assert reuses(cache, tokens_from(1, 3), 2 * P, a)
    a.finish()
    cache.check()
    assert cache.tree.swa_evictable_size() == P


def test_a_request_barred_from_the_tree_returns_its_tiles(cache):
    a = TileRequest(cache, tokens_from(1, 3), seed=1).admit().extend(2 * P, 2 * P)
    a.req.skip_radix_cache_insert = True
    a.checkpoint().finish()
    cache.check()
    assert (cache.free(), cache.tree.tile_publisher.published) == ((TILES, PAGES), 0)


def test_a_flush_leaves_everything_free(cache):
    """/flush_cache: the tree, the slots and both pools at once, while nothing runs."""
    tokens = tokens_from(1, 4)
    TileRequest(cache, tokens, seed=1).admit().extend(3 * P, P, 3 * P).finish()
    cache.settle()
    cache.tree.reset()
    cache.req_to_token_pool.clear()
    cache.allocator.clear()
    cache.check()
    assert cache.free() == (TILES, PAGES)
    a = TileRequest(cache, tokens, seed=2).admit()
    assert (a.req.prefix_len, a.req.host_hit_length) == (0, 0)
    a.extend(3 * P, P, 3 * P).finish()
    cache.check()
    assert [hit(cache, tokens, n * P) for n in range(1, 5)] == [P, P, 3 * P, 3 * P]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
