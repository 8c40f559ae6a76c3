"""What the scheduler plans, and that every tile comes back: decisions without a model."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from sglang.srt.mem_cache.swa_bitexact.capture import row_addresses
from sglang.srt.mem_cache.swa_bitexact.planner import CapturePlanner, TileCounters
from sglang.srt.mem_cache.swa_bitexact.tile_table import CapturePlan, RequestTiles, TileCapture
from sglang.test.ci.ci_register import register_cpu_ci

from kit.scheduler_steps import decode, extend, random_step, req
from kit.tile_cache import server_context
from kit.tile_pools import PAGE, tile_pools

register_cpu_ci(est_time=25, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def _context():
    with server_context():
        yield


def planner(tiles=8, stride=1):
    return CapturePlanner(tile_pools(tiles=tiles), stride)


def boundaries(plan):
    return [(c.slot, c.boundary, c.chunk_start, c.first_row) for c in plan.captures]


def test_a_prefill_batch_is_planned_with_the_rows_of_each_request():
    p = planner()
    a, b = req(1, 700), req(2, 300)
    plan = p.plan_extend(extend((a, 200, 700), (b, 0, 300)))
    assert boundaries(plan) == [(1, 512, 200, 0), (2, 256, 0, 500), (1, 256, 200, 0)]
    assert sorted(a.swa_tiles.tiles) == [256, 512]
    assert p.counters == TileCounters(captured=3)
    p.allocator.check_tiles([plan.tile_ids])


def test_a_step_without_a_boundary_plans_and_allocates_nothing():
    p = planner()
    assert p.plan_extend(extend((req(1, 700), 513, 700))) is None
    assert p.plan_decode(decode((req(1, 700), 701), (req(2, 255), 257))) is None
    assert p.allocator.tiles_available == 8


def test_a_decode_step_plans_the_requests_at_a_boundary():
    p = planner()
    plan = p.plan_decode(decode((req(1, 9), 300), (req(2, 9), 512), (req(3, 9), 1024)))
    assert boundaries(plan) == [(3, 1024, 1023, 2), (2, 512, 511, 1)]


def test_what_ends_with_the_step_is_taken_at_its_end_if_everything_does():
    p = planner(stride=2)
    # A chunk up to the grid; with it, one that goes on beyond its last boundary; decode rows.
    assert p.plan_extend(extend((req(1, 2000), 0, 512))).at_end
    both = p.plan_extend(extend((req(1, 2000), 512, 1024), (req(2, 300), 0, 300)))
    assert [(c.slot, c.boundary, c.at_end) for c in both.captures] == [(1, 1024, True), (2, 256, False)]
    assert not both.at_end
    assert p.plan_decode(decode((req(3, 9), 512))).at_end
    # At stride 1 a chunk has boundaries inside.
    assert not planner().plan_extend(extend((req(4, 2000), 0, 512))).at_end


def test_a_request_that_will_not_be_published_gets_no_tile():
    p = planner()
    assert p.plan_extend(extend((req(1, 700, skip=True), 0, 700))) is None


def test_the_branch_point_is_captured():
    p = planner(stride=0)
    plan = p.plan_extend(extend((req(1, 2000, branch=768), 512, 1500)))
    assert boundaries(plan) == [(1, 768, 512, 0)]


def test_a_shortage_keeps_last_and_deepest_boundaries_and_counts_the_rest():
    p = planner(tiles=3)
    plan = p.plan_extend(extend((req(1, 1030), 0, 1030), (req(2, 300), 0, 300)))
    assert boundaries(plan) == [(1, 1024, 0, 0), (2, 256, 0, 1030), (1, 768, 0, 0)]
    assert p.counters == TileCounters(captured=3, dropped=2)
    assert p.plan_decode(decode((req(3, 9), 256))) is None
    assert p.counters.dropped == 3


def test_a_shortage_leaves_every_request_its_last_boundary():
    p = planner(tiles=3)
    plan = p.plan_extend(extend((req(1, 2000), 0, 2000), (req(2, 300), 0, 300)))
    assert boundaries(plan) == [(1, 1792, 0, 0), (2, 256, 0, 2000), (1, 1536, 0, 0)]


def test_in_a_shortage_a_newer_decode_tile_takes_the_place_of_an_older_one():
    p = planner(tiles=8)
    requests = [req(slot, 9) for slot in range(1, 5)]
    for length in range(PAGE, 21 * PAGE, PAGE):
        p.finish(p.plan_decode(decode(*((r, length) for r in requests))))
        assert all(max(r.swa_tiles.tiles) == length for r in requests)
    # 80 captures in 8 tiles: each request keeps its last two boundaries, none is dropped.
    assert [sorted(r.swa_tiles.tiles) for r in requests] == [[19 * PAGE, 20 * PAGE]] * 4
    assert p.counters == TileCounters(captured=80, returned=72, superseded=72)


def test_what_is_dropped_is_logged_at_powers_of_two(caplog):
    p = planner(tiles=1)
    assert p.plan_extend(extend((req(1, 300), 0, 300))) is not None
    with caplog.at_level("WARNING"):
        for slot in range(1, 9):
            p.plan_extend(extend((req(slot, 300), 0, 300)))
    said = [
        r.getMessage().split("short, ")[1].split(" ")[0] for r in caplog.records if "tiles are short" in r.getMessage()
    ]
    assert said == ["1", "2", "4", "8"]


def test_a_plan_is_settled_once():
    p = planner(stride=4)
    a = req(1, 9)
    plan = p.plan_decode(decode((a, 256)))
    p.finish(plan)
    p.finish(plan)
    assert sorted(a.swa_tiles.tiles) == [256]
    p.allocator.check_tiles(a.swa_tiles.tiles.values())


def test_an_off_grid_decode_tile_goes_back_when_the_next_boundary_is_captured():
    p = planner(stride=4)
    a = req(1, 9)
    for length, kept in [(256, [256]), (512, [512]), (768, [768]), (1024, [1024]), (1280, [1024, 1280])]:
        p.finish(p.plan_decode(decode((a, length))))
        assert sorted(a.swa_tiles.tiles) == kept
    assert p.counters == TileCounters(captured=5, returned=3, superseded=3)
    p.allocator.check_tiles(a.swa_tiles.tiles.values())


def test_tiles_of_the_prompt_stay_while_decode_moves_on():
    p = planner(stride=0)
    a = req(1, 600)
    p.finish(p.plan_extend(extend((a, 0, 600))))
    for length in (768, 1024):
        p.finish(p.plan_decode(decode((a, length))))
    assert sorted(a.swa_tiles.tiles) == [512, 1024]


def test_a_released_request_returns_its_tiles_at_once():
    p = planner()
    a = req(1, 800)
    p.finish(p.plan_extend(extend((a, 0, 800))))
    p.release(a)
    assert a.swa_tiles is None
    assert p.counters == TileCounters(captured=3, returned=3)
    p.allocator.check_tiles([])
    p.release(a)


def test_a_zombie_step_keeps_its_tile_until_its_result_is_there():
    p = planner()
    a = req(1, 500)
    p.finish(p.plan_extend(extend((a, 0, 500))))
    zombie = p.plan_decode(decode((a, 512)))
    p.release(a)
    # The step may still write this tile: it must not be handed to anybody.
    assert p.allocator.tiles_available == 7
    p.allocator.check_tiles([zombie.tile_ids])
    p.finish(zombie)
    p.allocator.check_tiles([])


def test_a_request_that_comes_back_starts_with_an_empty_table():
    p = planner()
    a = req(1, 500)
    plan = p.plan_extend(extend((a, 0, 500)))
    p.release(a)
    again = p.plan_extend(extend((a, 0, 500)))
    assert boundaries(again) == [(1, 256, 0, 0)]
    assert again.tile_ids.item() != plan.tile_ids.item()
    p.finish(plan)
    assert sorted(a.swa_tiles.tiles) == [256]
    p.finish(again)
    p.allocator.check_tiles(a.swa_tiles.tiles.values())


def test_mixed_rows_lie_behind_the_chunk():
    p = planner()
    prefill = extend((req(1, 600), 0, 300))
    running = decode((req(2, 9), 300), (req(3, 9), 512))
    prefill.swa_capture_plan, prefill.extend_num_tokens = p.plan_extend(prefill), 300
    running.swa_capture_plan = p.plan_decode(running)
    plan = p.plan_mixed(prefill, running)
    assert boundaries(plan) == [(1, 256, 0, 0), (3, 512, 511, 301)]
    assert plan.tile_ids.tolist() == [1, 2]
    running.swa_capture_plan = None
    assert p.plan_mixed(prefill, running) is prefill.swa_capture_plan


def test_addresses_of_a_straddling_window():
    # Boundary 512, chunk from 510 at flat row 100, slot 3.
    def plan(*, at_end):
        return CapturePlan((TileCapture(RequestTiles(), 512, 3, 510, 100, at_end, False),), torch.tensor([1]))

    assert row_addresses(plan(at_end=False), 4, 8).tolist() == [[-29, -30, 100, 101]]
    assert row_addresses(plan(at_end=True), 4, 8).tolist() == [[28, 29, 30, 31]]
    window = row_addresses(plan(at_end=False), 128, 131)[0]
    assert window[-2:].tolist() == [100, 101]
    # A ring of 131 rows: position 384 lies in row 3 * 131 + 384 % 131.
    assert window[0].item() == -1 - (3 * 131 + 122)


@pytest.mark.parametrize(("tiles", "stride"), [(8, 1), (64, 2), (5, 0)])
def test_ten_thousand_random_steps_leak_nothing(tiles, stride):
    p, rng = planner(tiles, stride), random.Random(tiles)
    live, flying = {}, []
    for step in range(10_000):
        random_step(p, rng, live, flying)
        if step % 10 == 0:
            held = {id(t): t for r, *_ in live.values() if r.swa_tiles for t in r.swa_tiles.tiles.values()}
            for plan in flying:
                if plan is not None:
                    held |= {id(c): c.owner.tiles[c.boundary] for c in plan.captures if c.owner.released}
            p.allocator.check_tiles(held.values())
    for plan in flying:
        if plan is not None:
            p.finish(plan)
    for r, *_ in live.values():
        p.release(r)
    p.allocator.check_tiles([])
    assert p.allocator.tiles_available == tiles
    assert p.counters.captured == p.counters.returned > 1_000
    assert (p.counters.dropped > 0) == (tiles < 64)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
