"""What is remembered of reuse points that have no tile: of which prefixes, until when, and in which namespace."""

from __future__ import annotations

import sys
from array import array

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_bitexact import reuse_points
from sglang.srt.mem_cache.swa_bitexact.planner import CapturePlanner
from sglang.srt.mem_cache.swa_bitexact.reuse_points import ReusePoints
from sglang.test.ci.ci_register import register_cpu_ci

from kit.scheduler_steps import decode, extend, req
from kit.tile_cache import server_context, tokens_from
from kit.tile_pools import PAGE, tile_pools
from kit.tile_requests import TileRequest, prefill

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

P = PAGE
TOKENS = tokens_from(1, 8)


def key(pages=8, tokens=TOKENS, **names):
    return RadixKey(tokens[: pages * P], **names)


@pytest.fixture(autouse=True)
def _context():
    with server_context():
        yield


@pytest.fixture
def points():
    """Of a grid of 4 pages."""
    return ReusePoints(CapturePlanner(tile_pools(), stride=4))


def test_the_longest_prefix_that_was_due_a_tile(points):
    assert [points.was_dropped(key(), 0, n * P) for n in range(6)] == [None, None, None, None, False, False]
    points.settle(key(), tiles=[3 * P], dropped=[2 * P, 8 * P])
    assert [points.was_dropped(key(), 0, n * P) for n in range(9)] == [None, None, True, *[False] * 5, True]
    assert points.was_dropped(key(), 2 * P, 3 * P) is False
    assert points.was_dropped(key(), 3 * P, 3 * P) is None
    assert points.was_dropped(key(), 4 * P, 7 * P) is None
    points.clear()
    assert points.was_dropped(key(), 0, 3 * P) is None


@pytest.mark.parametrize(
    ("effective", "stride", "due"),
    [
        (1024, 4, None),
        (512, 4, False),
        (768, 4, False),
        (1024, 1, False),
        (1536, 1, False),
        (0, 8, None),
        (0, 7, False),
        (0, 0, None),
    ],
)
def test_what_the_stride_says_about_a_cut(effective, stride, due):
    """Rows up to page 7, nothing known."""
    points = ReusePoints(CapturePlanner(tile_pools(), stride))
    assert points.was_dropped(key(), effective, 7 * 256) is due


def test_what_goes_on_the_grid_is_known_by_not_being_there(points):
    points.settle(key(), tiles=[4 * P, 8 * P])
    assert len(points._dropped) == 0
    points.settle(key(), dropped=[4 * P])
    assert points.was_dropped(key(), 0, 4 * P) is True
    points.settle(key(), tiles=[4 * P])
    assert len(points._dropped) == 0


@pytest.mark.parametrize("dropped", [False, True])
def test_the_last_word_counts(points, dropped):
    for last in (not dropped, dropped):
        points.settle(key(3), tiles=[] if last else [3 * P], dropped=[3 * P] if last else [])
    assert points.was_dropped(key(), 0, 3 * P) is dropped


def test_other_tokens_and_other_namespaces_are_other_prefixes(points):
    points.settle(key(3), dropped=[3 * P])
    other = array("q", TOKENS)
    other[3 * P - 1] += 1
    for another in (key(tokens=other), key(extra_key="lora"), key(cache_salt="salt")):
        assert points.was_dropped(another, 0, 3 * P) is None
    points.settle(key(2, extra_key="a"), dropped=[2 * P])
    assert points.was_dropped(key(extra_key="a"), 0, 3 * P) is True
    assert points.was_dropped(key(cache_salt="a"), 0, 3 * P) is None


def test_the_oldest_is_forgotten_first(points, monkeypatch):
    monkeypatch.setattr(reuse_points, "_MOST_POINTS", 2)
    prompts = [key(1, tokens_from(1000 * n, 1)) for n in range(4)]
    # The first one again, and so the newer of two.
    for number in (0, 1, 0, 2):
        points.settle(prompts[number], dropped=[P])
    assert [points.was_dropped(prompt, 0, P) for prompt in prompts] == [True, None, True, None]


# What the planner drops --------------------------------------------------------


def test_a_shortage_is_entered_with_the_request():
    p = CapturePlanner(tile_pools(tiles=3), stride=1)
    a, b = req(1, 1030), req(2, 300)
    p.plan_extend(extend((a, 0, 1030), (b, 0, 300)))
    assert (a.swa_tiles.dropped, b.swa_tiles.dropped) == ({512: False, 256: False}, {})
    c = req(3, 300)
    assert p.plan_extend(extend((c, 0, 300))) is None
    assert c.swa_tiles.dropped == {256: False}


@pytest.mark.parametrize("stride", [1, 4])
def test_a_tile_that_makes_room_for_a_newer_one(stride):
    p = CapturePlanner(tile_pools(tiles=1), stride)
    a = req(1, 9)
    for length in (256, 512):
        p.finish(p.plan_decode(decode((a, length))))
    assert (sorted(a.swa_tiles.tiles), a.swa_tiles.dropped) == ([512], {256: True})


# What a checkpoint publishes ---------------------------------------------------


def dropped_by(cache, prompt):
    """A request of TOKENS that computes ``prompt`` tokens while no tile is free."""
    held = cache.allocator.alloc_tiles(cache.allocator.tiles_available)
    a = TileRequest(cache, TOKENS[:prompt], seed=1).admit()
    prefill(cache, (a, prompt))
    assert a.req.swa_tiles.tiles == {}
    if held is not None:
        cache.allocator.free_tiles(held)
    return a


def test_a_prefix_is_known_once_the_tree_has_its_rows(cache):
    """Of an aborted request nothing is; what another one captures later is no longer dropped; a flush forgets all."""
    points = cache.tree.tile_publisher.points
    for end, known in (("abort", 0), ("finish", 2)):
        a = dropped_by(cache, 2 * P + 1)
        getattr(a, end)()
        assert len(points._dropped) == known
    assert points.was_dropped(key(), 0, 2 * P) is True
    b = TileRequest(cache, TOKENS, seed=2).admit()
    prefill(cache, (b, 2 * P + 1))
    b.finish()
    assert points.was_dropped(key(), 0, 2 * P) is False
    dropped_by(cache, 3 * P + 1).finish()
    assert points.was_dropped(key(), 0, 3 * P) is True
    cache.settle()
    cache.tree.reset()
    assert len(points._dropped) == 0


def test_each_chunk_enters_its_own(cache):
    """Page 1 is dropped, and known behind the second chunk as well."""
    points = cache.tree.tile_publisher.points
    a = dropped_by(cache, P + 1)
    a.req.origin_input_ids = TOKENS
    a.checkpoint()
    assert points.was_dropped(key(), 0, P) is True
    a.req.refresh_fill_ids()
    prefill(cache, (a, 2 * P + 1))
    a.finish()
    assert points.was_dropped(key(), 0, P) is True
    assert points.was_dropped(key(), 0, 2 * P) is False


@pytest.mark.parametrize("stride", [0, 4])
@pytest.mark.parametrize(("end", "known"), [(3 * P + 1, [2, 3]), (4 * P + 1, [2, 4])])
def test_an_answers_tile_off_the_grid_was_due_at_its_end_alone(cache, stride, end, known):
    """A tile there would have been given up for the next one; what the prompt was due stays."""
    cache.allocator.capture_planner.stride = stride
    a = dropped_by(cache, 2 * P + 9)
    a.checkpoint()
    a.decode(end)
    a.req.swa_tiles.dropped |= dict.fromkeys(range(3 * P, end, P), True)
    a.finish()
    points, whole = cache.tree.tile_publisher.points, RadixKey(a.req.origin_input_ids + a.req.output_ids)
    assert [n for n in range(1, 5) if points.was_dropped(whole, n * P - P, n * P)] == known


@pytest.mark.parametrize("first", ["who has the tile", "who has none"])
def test_what_somebody_else_captured_was_not_dropped(cache, first):
    """Two requests of one prompt in one step; one is left without a tile."""
    planner, points = cache.allocator.capture_planner, cache.tree.tile_publisher.points
    held = cache.allocator.alloc_tiles(cache.allocator.tiles_available - 1)
    a, b = (TileRequest(cache, TOKENS, seed=seed).admit() for seed in (1, 2))
    prefill(cache, (a, P + 1), (b, P + 1))
    assert (sorted(a.captured), b.req.swa_tiles.dropped, planner.counters.dropped) == ([P], {P: False}, 1)
    for request in (a, b) if first == "who has the tile" else (b, a):
        request.finish()
    assert points.was_dropped(key(), 0, P) is False
    cache.allocator.free_tiles(held)


def test_a_tile_on_the_host_was_not_dropped(cache):
    """It was not loaded, and the request that computed its page again got no tile."""
    a = TileRequest(cache, TOKENS, seed=1).admit()
    prefill(cache, (a, P + 1))
    a.finish()
    cache.settle()
    cache.evict_device()
    held = cache.allocator.alloc_tiles(cache.allocator.tiles_available)
    b = TileRequest(cache, TOKENS, seed=2).admit(loads=False)
    prefill(cache, (b, P + 1))
    assert b.req.swa_tiles.dropped == {P: False}
    b.finish()
    assert cache.tree.tile_publisher.points.was_dropped(key(), 0, P) is False
    cache.allocator.free_tiles(held)


def test_who_reuses_a_prefix_has_seen_its_tile(cache):
    """As of one that came from storage to where it was dropped before."""
    points = cache.tree.tile_publisher.points
    a = TileRequest(cache, TOKENS, seed=1).admit()
    prefill(cache, (a, 2 * P + 1))
    a.finish()
    points.settle(key(2), dropped=[2 * P])
    assert points.was_dropped(key(), 0, 2 * P) is True
    TileRequest(cache, TOKENS, seed=2).admit().extend(2 * P + 1)
    assert points.was_dropped(key(), 0, 2 * P) is False


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
