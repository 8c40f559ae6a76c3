"""Every tile that the real scheduler captures, against an uninterrupted run of the same tokens.

    python -m kit.capture_oracle SCENARIO     (in test/; prints one JSON object)

A scenario is a way of serving. While it runs, each tile is copied when its step's result is
processed. Afterwards every sequence is prefilled again, alone, from position 0, in chunks that
end at the captured boundaries: there the rings hold exactly the rows that a tile must hold.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "1"
# Nothing is reused here, so that every boundary is computed and captured.
os.environ["SGLANG_RADIX_FORCE_MISS"] = "1"

# Read when SGLang is imported.
if sys.argv[1:] == ["retract"]:
    os.environ.update(SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="17")

import torch

# First: it chooses the platform, which SGLang's modules read as they are imported.
from kit.scheduler_run import SchedulerRun, abort, request

WINDOW, STATE_ROWS = 128, 4


@dataclass
class Record:
    """One captured tile: the tokens before its boundary, how it was captured, its bytes."""

    tokens: list[int]
    boundary: int
    kind: str
    straddles: tuple[str, ...]
    rows: dict[str, torch.Tensor]


class Observer:
    """Copies tiles as steps finish."""

    def __init__(self, run: SchedulerRun) -> None:
        self.records: list[Record] = []
        self.outputs: dict[str, list[int]] = {}
        self.zombies = self.retractions = self.extend_plans = 0
        self.state_calls: list[tuple[int, bool]] = []
        scheduler = run.scheduler
        self.allocator = scheduler.token_to_kv_pool_allocator
        process = scheduler.process_batch_result

        def processed(batch: Any, result: Any) -> None:
            if batch.swa_capture_plan is not None:
                self._record(batch)
            process(batch, result)
            self.outputs |= {r.rid: list(r.output_ids) for r in batch.reqs}

        scheduler.process_batch_result = processed
        writer = self.allocator.get_kvcache().tile_writer
        state_rows = writer.state_rows

        def observed_rows(layer_id: int, *arguments: Any, is_indexer: bool) -> None:
            self.state_calls.append((layer_id, is_indexer))
            state_rows(layer_id, *arguments, is_indexer=is_indexer)

        writer.state_rows = observed_rows
        from sglang.srt.managers.schedule_batch import Req

        retract = Req.reset_for_retract

        def retracted(req: Any) -> None:
            self.retractions += 1
            retract(req)

        Req.reset_for_retract = retracted

    def _record(self, batch: Any) -> None:
        plan = batch.swa_capture_plan
        self.extend_plans += not batch.forward_mode.is_decode()
        for capture, tile in zip(plan.captures, plan.tile_ids.tolist(), strict=True):
            if capture.owner.released:
                self.zombies += 1
                continue
            owner = next(r for r in batch.reqs if r.swa_tiles is capture.owner)
            tokens = list(owner.origin_input_ids) + list(owner.output_ids)
            assert len(tokens) >= capture.boundary
            kind = "decode" if capture.decode else "prefill"
            if batch.forward_mode.is_mixed():
                kind = f"mixed {kind}"
            if plan.at_end and kind != "decode":
                kind = f"{kind} at the end"
            before = capture.boundary - capture.chunk_start
            straddles = (
                ()
                if plan.at_end
                else tuple(name for name, rows in (("window", WINDOW), ("state", STATE_ROWS)) if before < rows)
            )
            rows = self.allocator.capture_pool.tile(tile)
            record = Record(tokens[: capture.boundary], capture.boundary, kind, straddles, rows)
            self.records.append(record)


def expected_rows(run: Any, sequence: Any, boundary: int) -> dict[str, torch.Tensor]:
    """What a tile of ``boundary`` must hold, read from the rings of a run that stands there."""
    window = run.ring_rows(sequence, range(boundary - WINDOW, boundary))
    states = run.state_rows(sequence, range(boundary - STATE_ROWS, boundary))
    by_kind = {
        name: torch.stack([rows for key, rows in states.items() if key.startswith(prefix)])
        for name, prefix in (("c4_state", "c4."), ("indexer_state", "index."))
    }
    return {"window": torch.stack(window), **by_kind}


def compare(run: SchedulerRun, records: list[Record]) -> list[str]:
    """Descriptions of the tiles that are not what an uninterrupted run has at their boundary."""
    from kit.tiny_run import TinyRun

    run.scheduler.flush_cache()
    allocator = run.scheduler.token_to_kv_pool_allocator
    allocator.capture_planner = None
    tiny = TinyRun(runner=run.scheduler.tp_worker.model_runner)
    wrong: list[str] = []
    pending = sorted(records, key=lambda r: (r.tokens, r.boundary))
    while pending:
        # The longest sequence that continues the first one covers all its prefixes.
        longest = max((r.tokens for r in pending if r.tokens[:256] == pending[0].tokens[:256]), key=len)
        covered = [r for r in pending if longest[: r.boundary] == r.tokens]
        pending = [r for r in pending if longest[: r.boundary] != r.tokens]
        tiny.clear()
        sequence = tiny.sequence(longest)
        for boundary in sorted({r.boundary for r in covered}):
            tiny.extend((sequence, boundary))
            expected = expected_rows(tiny, sequence, boundary)
            for record in (r for r in covered if r.boundary == boundary):
                for stream, rows in record.rows.items():
                    for layer, (found, want) in enumerate(zip(rows, expected[stream], strict=True)):
                        if not torch.equal(found, want):
                            wrong.append(f"{record.kind} {boundary}: {stream}, layer {layer} of the stream")
    return wrong


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [6 + rng.randrange(500) for _ in range(length)]


# What is served: requests by the iteration at which they arrive, and aborts.
def arrivals(scenario: str) -> dict[int, list[Any]]:
    r = request
    if scenario == "odd_chunks":
        # Exact chunk fill with 512-token steps: chunks end anywhere. 259 tokens leave 253 for the
        # next request, whose boundary 256 then has its state rows on both sides of the cut. Its last
        # chunk ends at 703, and so writes the ring row of position 252: 700 has the same.
        return {
            0: [r("a", prompt(1, 259), 2), r("b", prompt(2, 703), 2), r("c", prompt(3, 1300), 3)],
            9: [r("d", prompt(4, 322), 2), r("e", prompt(5, 512), 2), r("f", prompt(6, 1100), 2)],
            18: [r("g", prompt(7, 385), 2), r("h", prompt(8, 260), 2), r("i", prompt(9, 769), 2)],
        }
    if scenario.startswith("mixed"):
        # Decode rows cross boundaries while prompts keep arriving.
        steady = [r("a", prompt(1, 245), 40), r("b", prompt(2, 505), 20), r("c", prompt(3, 250), 20)]
        return {0: steady, **{i: [r(f"p{i}", prompt(10 + i, 300 + 37 * i), 3)] for i in range(3, 14)}}
    if scenario == "chunk_ends":
        # On a grid of two pages chunks of 512 stop on it; a last boundary may lie inside.
        return {0: [r("a", prompt(1, 2048), 3), r("b", prompt(2, 1400), 3), r("c", prompt(3, 3000), 3)]}
    if scenario == "whole":
        return {
            0: [r("a", prompt(1, 1023), 4), r("b", prompt(2, 2049), 4), r("c", prompt(3, 1024), 4)],
            9: [r("d", prompt(4, 250), 530), r("e", prompt(5, 128), 140), r("f", prompt(6, 255), 3)],
        }
    assert scenario == "retract", scenario
    return {
        0: [r("a", prompt(1, 700), 90), r("b", prompt(2, 420), 120), r("c", prompt(3, 500), 60)],
        4: [r("d", prompt(4, 900), 40), r("gone", prompt(5, 1500), 200)],
        # In the middle of its chunks, and while one is under way.
        6: [r("cut", prompt(7, 2500), 5)],
        10: [abort("cut")],
        40: [abort("gone")],
        41: [r("e", prompt(6, 240), 60)],
    }


ARGUMENTS: dict[str, dict[str, Any]] = {
    "whole": {"chunked_prefill_size": 2048},
    "odd_chunks": {"chunked_prefill_size": 512},
    "chunk_ends": {"chunked_prefill_size": 512, "hicache_swa_offload_page_stride": 2},
    "mixed": {"chunked_prefill_size": 512, "enable_mixed_chunk": True, "disable_overlap_schedule": True},
    "mixed_overlap": {"chunked_prefill_size": 512, "enable_mixed_chunk": True},
    "retract": {"chunked_prefill_size": 512},
}


def serve(scenario: str) -> tuple[SchedulerRun, Observer]:
    """Serve the scenario's requests to the end."""
    from sglang.srt.managers import schedule_policy
    from sglang.srt.mem_cache.swa_bitexact import guards

    # With the first parts alone a server refuses to start.
    guards._is_complete = lambda: True
    if scenario.startswith(("odd", "mixed")):
        # Upstream's default on the AMD GPUs that run unified_kv.
        schedule_policy._use_exact_chunk_fill = lambda: True
    run = SchedulerRun(
        max_total_tokens=32_768,
        max_running_requests=8,
        hicache_swa_device_tile_fraction=0.6,
        **ARGUMENTS[scenario],
    )
    observer = Observer(run)
    coming = arrivals(scenario)
    last = max(coming)

    def script(iteration: int) -> list[Any] | None:
        assert iteration < 3000, "not idle after 3000 iterations"
        return coming.get(iteration, []) if iteration <= last or not run.idle else None

    run.run(script)
    if scenario == "whole":
        stop_one_step_before_a_boundary(run, observer)
    return run, observer


def stop_one_step_before_a_boundary(run: SchedulerRun, observer: Observer) -> None:
    """A request that ends by a stop token while the step to 256 already runs: a zombie step.

    With n output tokens, a prompt of 256 - n has length 255 when the last one is chosen; under
    overlap the next step is launched before that token is looked at.
    """
    for n in range(6, 40):
        tokens = prompt(70, 256 - n)
        run.run_all([request(f"probe{n}", tokens, n)])
        outputs = observer.outputs[f"probe{n}"]
        if outputs.index(outputs[-1]) == n - 1:
            run.run_all([request("zombie", tokens, 64, stop=outputs[-1])])
            assert observer.outputs["zombie"] == outputs
            return
    raise AssertionError("every answer repeats its last token")


def main(scenario: str) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    run, observer = serve(scenario)
    planner = observer.allocator.capture_planner
    tree = run.scheduler.tree_cache
    tree.sanity_check()
    tree.evict(EvictParams(num_tokens=1 << 20))
    observer.allocator.check_tiles([])
    kinds = Counter(
        f"{r.kind}{'' if not r.straddles else ', ' + ' and '.join(r.straddles) + ' on both sides of the cut'}"
        for r in observer.records
    )
    result = {
        "kinds": dict(kinds),
        "zombies": observer.zombies,
        "retractions": observer.retractions,
        # Per planned prefill step: how often each compressor's hook ran.
        "state_calls": {f"{k}": v / observer.extend_plans for k, v in Counter(observer.state_calls).items()},
        "aborted": run.aborted(),
        "counters": vars(planner.counters),
        "published": getattr(getattr(run.scheduler.tree_cache, "tile_publisher", None), "published", 0),
        "tiles_left": observer.allocator.tiles_available,
        "tiles": observer.allocator.capture_pool.num_tiles,
        "compared": len(observer.records),
        "wrong": compare(run, observer.records),
    }
    print(json.dumps(result), file=sys.__stdout__)


if __name__ == "__main__":
    main(sys.argv[1])
