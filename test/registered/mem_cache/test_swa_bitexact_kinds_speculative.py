"""Kinds of faults that others met in speculative decoding, and in memory that nobody wrote.

Speculative decoding is refused, so no draft is ever rejected. What would follow from one is tested all the
same where plain decoding has the like: a step that runs beyond its request's end, and a tile without an owner.
"""

from __future__ import annotations

import random
import sys

import pytest
from sglang.srt.mem_cache.swa_bitexact.guards import GUARDS
from sglang.srt.mem_cache.swa_bitexact.planner import CapturePlanner
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

from kit.existing_tests import missing_tests
from kit.scheduler_steps import decode, req
from kit.tile_cache import server_context, tokens_from
from kit.tile_pools import PAGE, tile_pools
from kit.tile_requests import TileRequest, prefill

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

P = PAGE

# By kind, the tests.
KINDS = {
    "a rejected draft adopts a snapshot that nobody wrote": (
        "test_speculative_decoding_is_refused",
        "test_tiles_that_nobody_wrote_are_never_read",
        "test_swa_bitexact_guard_messages.py::TestGuards.test_each_alone",
    ),
    "state of rejected tokens becomes reusable": (
        "test_speculative_decoding_is_refused",
        "test_no_step_captures_beyond_its_tokens",
        "test_what_a_step_loses_is_not_reused",
        "test_swa_bitexact_publish_traps.py::test_tiles_that_are_not_published_come_back",
        "test_swa_bitexact_planner.py::test_a_zombie_step_keeps_its_tile_until_its_result_is_there",
        "test_swa_bitexact_capture.py::test_tiles_equal_an_uninterrupted_run",
    ),
}


def test_the_tests_of_the_table_are_there():
    assert missing_tests(KINDS, __file__) == []


def test_speculative_decoding_is_refused():
    """Each algorithm that SGLang has, by name: a draft that is rejected may be in a window."""
    (guard,) = (guard for guard in GUARDS if guard.setting == "--speculative-algorithm")
    names = [algorithm.name for algorithm in SpeculativeAlgorithm if algorithm.name != "NONE"]
    assert len(names) >= 3
    for name in names:
        config = Config(name)
        assert guard.problem(config) == (
            f"--speculative-algorithm is {name}, but must be unset for bit-exact reuse: "
            "a rejected draft token may be in a window. Remove --speculative-algorithm."
        )
    assert guard.problem(Config(None)) is None


class Config:
    def __init__(self, speculative_algorithm):
        self.speculative_algorithm = speculative_algorithm


def test_no_step_captures_beyond_its_tokens():
    """A decode step adds one token; its tile ends with it, at its request's length and nowhere else."""
    with server_context():
        planner = CapturePlanner(tile_pools(tiles=64), 1)
    rng, planned = random.Random(1), 0
    for _ in range(2_000):
        lengths = [rng.choice([rng.randrange(1, 5 * P), rng.randrange(1, 6) * P]) for _ in range(4)]
        requests = [req(slot, 9) for slot in range(1, 5)]
        plan = planner.plan_decode(decode(*zip(requests, lengths, strict=True)))
        expected = sorted((slot, n) for slot, n in enumerate(lengths, 1) if n % P == 0)
        found = [] if plan is None else sorted((c.slot, c.boundary) for c in plan.captures)
        assert found == expected
        for request in requests:
            planner.release(request)
        if plan is not None:
            assert all(c.chunk_start == c.boundary - 1 and c.decode for c in plan.captures)
            planned += len(plan.captures)
            planner.finish(plan)
    assert planned > 1_000
    planner.allocator.check_tiles([])


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_what_a_step_loses_is_not_reused(cache, end):
    """The tokens run to 3 pages and further; the request turns out to end two tokens before that boundary."""
    tokens = tokens_from(1, 4)
    a = TileRequest(cache, tokens[: 2 * P], seed=1).admit().extend(2 * P, P, 2 * P).checkpoint()
    a.decode(3 * P)
    a.capture(3 * P, in_flight=True)
    a.req.finished_len = P - 2
    owner = a.req.swa_tiles
    getattr(a, end)()
    assert sorted(owner.tiles) == [3 * P] and owner.in_flight == {3 * P}
    whole = a.req.origin_input_ids + a.req.output_ids
    match = cache.match(whole)
    assert match.device_prefix_len == 2 * P and cache.holds(match, a.captured[2 * P])
    # The step lands: its tile goes back, whatever it holds.
    cache.allocator.free_tiles(owner.tiles.pop(3 * P))
    cache.check()
    assert cache.match(whole).full_kv_hit_length == 2 * P


def test_tiles_that_nobody_wrote_are_never_read(cache):
    """All free tiles hold a pattern; prompts come, are aborted before they computed, and come again."""
    pattern = {name: rows.fill_(0xA5) for name, rows in cache.tile(1).items()}
    cache.poison_free_tiles()
    planner, rng = cache.allocator.capture_planner, random.Random(2)
    for seed in range(30):
        tokens = tokens_from(1 + 10_000 * rng.randrange(3), 3)[: rng.choice([P, 2 * P, 3 * P])]
        request = TileRequest(cache, tokens, seed=seed).admit(loads=False)
        if request.req.prefix_len:
            assert not cache.holds(cache.match(tokens[: request.req.prefix_len]), pattern)
        cache.allocator.evict_to_free_tokens(cache.tree, 4 * P)
        if rng.random() < 0.5:
            # The planner took tiles for it, and nothing was computed.
            written, request.fill = request.fill, lambda *_: None
            plan = prefill(cache, (request, len(tokens)))
            request.fill = written
            request.abort()
        else:
            plan = prefill(cache, (request, len(tokens)))
            request.finish()
        if plan is not None:
            planner.finish(plan)
        cache.check()
        cache.poison_free_tiles()
    assert planner.counters.returned > 5 and cache.tree.tile_publisher.published > 5


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
