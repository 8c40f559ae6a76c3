"""What is remembered of reuse points that have no tile: of which prefixes, until when, and in which namespace."""

from __future__ import annotations

import sys
from array import array

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_bitexact import reuse_points
from sglang.srt.mem_cache.swa_bitexact.planner import CapturePlanner
from sglang.srt.mem_cache.swa_bitexact.reuse_points import KnownPoint, ReusePoints
from sglang.test.ci.ci_register import register_cpu_ci

from kit.scheduler_steps import decode, extend, req
from kit.tile_cache import server_context, tokens_from
from kit.tile_pools import PAGE, tile_pools
from kit.tile_requests import TileRequest, prefill

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

P = PAGE
TOKENS = tokens_from(1, 8)
NONE = KnownPoint(0, dropped=False)


def key(pages=8, tokens=TOKENS, **names):
    return RadixKey(tokens[: pages * P], **names)


@pytest.fixture
def points():
    """Of a grid of 4 pages."""
    with server_context():
        yield ReusePoints(CapturePlanner(tile_pools(), stride=4))


def test_the_deepest_known_prefix_of_a_cut(points):
    points.settle(key(), published=[3 * P], dropped=[2 * P, 4 * P])
    found = [points.deepest(key(), 0, n * P) for n in range(6)]
    dropped, published = KnownPoint(2 * P, dropped=True), KnownPoint(3 * P, dropped=False)
    assert found == [NONE, NONE, dropped, published, KnownPoint(4 * P, dropped=True), KnownPoint(4 * P, dropped=True)]
    assert points.deepest(key(), 2 * P, 3 * P) == published
    assert points.deepest(key(), 3 * P, 3 * P) == NONE
    assert points.deepest(key(), 4 * P, 8 * P) == NONE


def test_what_goes_on_the_grid_is_known_by_not_being_there(points):
    points.settle(key(), published=[4 * P, 8 * P], dropped=[])
    assert points._dropped == {}
    points.settle(key(), published=[], dropped=[4 * P])
    points.settle(key(), published=[4 * P], dropped=[])
    assert points._dropped == {}


@pytest.mark.parametrize("dropped_last", [False, True])
def test_the_last_word_counts(points, dropped_last):
    for dropped in (not dropped_last, dropped_last):
        points.settle(key(3), published=[] if dropped else [3 * P], dropped=[3 * P] if dropped else [])
    assert points.deepest(key(), 0, 8 * P) == KnownPoint(3 * P, dropped_last)


def test_other_tokens_and_other_namespaces_are_other_prefixes(points):
    points.settle(key(3), published=[], dropped=[3 * P])
    other = array("q", TOKENS)
    other[3 * P - 1] += 1
    assert points.deepest(key(tokens=other), 0, 8 * P) == NONE
    assert points.deepest(key(extra_key="lora"), 0, 8 * P) == NONE
    assert points.deepest(key(cache_salt="salt"), 0, 8 * P) == NONE
    points.settle(key(2, extra_key="a"), published=[], dropped=[2 * P])
    assert points.deepest(key(extra_key="a"), 0, 8 * P) == KnownPoint(2 * P, dropped=True)
    assert points.deepest(key(cache_salt="a"), 0, 8 * P) == NONE


def test_the_oldest_is_forgotten_first(points, monkeypatch):
    monkeypatch.setattr(reuse_points, "_MOST_POINTS", 2)
    prompts = [key(1, tokens_from(1000 * n, 1)) for n in range(4)]
    for prompt in prompts[:2]:
        points.settle(prompt, published=[], dropped=[P])
    # Again, and so the newer of the two.
    points.settle(prompts[0], published=[], dropped=[P])
    points.settle(prompts[2], published=[], dropped=[P])
    assert [points.deepest(prompt, 0, P).dropped for prompt in prompts] == [True, False, True, False]
    assert len(points._dropped) == 2


# What the planner drops --------------------------------------------------------


@pytest.fixture(autouse=True)
def _context():
    with server_context():
        yield


def test_a_shortage_is_entered_with_the_request():
    p = CapturePlanner(tile_pools(tiles=3), stride=1)
    a, b = req(1, 1030), req(2, 300)
    p.plan_extend(extend((a, 0, 1030), (b, 0, 300)))
    assert (a.swa_tiles.dropped, b.swa_tiles.dropped) == ({512: False, 256: False}, {})
    c = req(3, 300)
    assert p.plan_extend(extend((c, 0, 300))) is None
    assert c.swa_tiles.dropped == {256: False}


def test_an_answers_dropped_tiles_last_as_long_as_tiles_would():
    """Off the grid, until the answer's next boundary; what the prompt was to have stays."""
    p = CapturePlanner(tile_pools(tiles=1), stride=4)
    assert p.plan_extend(extend((req(1, 300), 0, 300))) is not None
    a = req(2, 600)
    assert p.plan_extend(extend((a, 0, 600))) is None
    for length, dropped in [
        (768, {512: False, 768: True}),
        (1024, {512: False, 1024: True}),
        (1280, {512: False, 1024: True, 1280: True}),
        (1536, {512: False, 1024: True, 1536: True}),
    ]:
        assert p.plan_decode(decode((a, length))) is None
        assert a.swa_tiles.dropped == dropped


@pytest.mark.parametrize(("stride", "dropped"), [(1, {256: True}), (4, {})])
def test_a_tile_that_makes_room_for_a_newer_one(stride, dropped):
    """On the grid it would have stayed; off it, it would not."""
    p = CapturePlanner(tile_pools(tiles=1), stride)
    a = req(1, 9)
    for length in (256, 512):
        p.finish(p.plan_decode(decode((a, length))))
    assert (sorted(a.swa_tiles.tiles), a.swa_tiles.dropped) == ([512], dropped)


# What a checkpoint publishes ---------------------------------------------------


def test_a_prefix_is_known_once_the_tree_has_its_rows(cache):
    """Of an aborted request nothing is; what another one captures later is no longer dropped."""
    points = cache.tree.tile_publisher.points
    held = cache.allocator.alloc_tiles(cache.allocator.tiles_available)
    for end, known in (("abort", NONE), ("finish", KnownPoint(2 * P, dropped=True))):
        a = TileRequest(cache, TOKENS, seed=1).admit()
        prefill(cache, (a, 2 * P + 1))
        assert (a.req.swa_tiles.tiles, points.deepest(key(), 0, 8 * P)) == ({}, NONE)
        getattr(a, end)()
        assert points.deepest(key(), 0, 8 * P) == known
    cache.allocator.free_tiles(held)
    b = TileRequest(cache, TOKENS, seed=2).admit()
    prefill(cache, (b, 2 * P + 1))
    b.finish()
    assert points.deepest(key(), 0, 8 * P) == NONE


def test_each_chunk_enters_its_own(cache):
    """Stride 1: page 1 is dropped, and known behind the second chunk as well."""
    points = cache.tree.tile_publisher.points
    a = TileRequest(cache, TOKENS, seed=1).admit()
    held = cache.allocator.alloc_tiles(cache.allocator.tiles_available)
    prefill(cache, (a, P + 1))
    a.checkpoint()
    cache.allocator.free_tiles(held)
    assert points.deepest(key(), 0, 8 * P) == KnownPoint(P, dropped=True)
    prefill(cache, (a, 2 * P + 1))
    a.finish()
    assert points.deepest(key(), 0, 8 * P) == KnownPoint(P, dropped=True)
    assert sorted(a.captured) == [2 * P]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
