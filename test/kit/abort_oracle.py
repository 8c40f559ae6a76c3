"""Requests that are aborted at each stage of their life, and what is asked at once afterwards.

    python -m kit.abort_oracle overlap|no-overlap     (in test/; prints one JSON object)

Each stage is looked for in the real scheduler, iteration by iteration, and the abort handed in there,
together with another request that gets the slot. Afterwards the same prompt is asked again, twice,
and its answers are compared with a cold run's.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

# Before anything else of SGLang: it chooses the platform, which SGLang's modules read.
from kit.repeat_oracle import SLOTS, Asker, prompt
from kit.scheduler_run import abort, request

# Three chunks of 512 tokens when cold, and a boundary with a tile between them.
LENGTH = 1_300
VICTIM = "victim"


@dataclass
class Stage:
    """Where a request is aborted. ``empties`` where its prompt's rows must not be; ``reached``: it is there now."""

    name: str
    reached: Callable[[Any], bool]
    empties: str = ""
    cold: bool = False


def _running(scheduler: Any) -> Any:
    """The victim's request in a batch that was launched, or None."""
    batches = [scheduler.running_batch, scheduler.last_batch]
    requests = [r for batch in batches if batch for r in batch.reqs]
    return next((r for r in requests if r.rid == VICTIM), None)


def _is_loading(scheduler: Any) -> bool:
    return _running(scheduler) is not None and bool(scheduler.tree_cache.ongoing_load_back)


def _is_restored(scheduler: Any) -> bool:
    """Its first step is launched; nothing of it has come back, or one token."""
    victim = _running(scheduler)
    return victim is not None and victim.prefix_len > 0 and len(victim.output_ids) <= 1


def _is_decoding(scheduler: Any) -> bool:
    victim = _running(scheduler)
    return victim is not None and len(victim.output_ids) > 2


STAGES = (
    Stage("queued", lambda s: VICTIM in {r.rid for r in s.waiting_queue} and len(s.running_batch.reqs) == SLOTS),
    Stage("prefetching", lambda s: bool(s.tree_cache.ongoing_prefetch), empties="memory"),
    Stage("loading", _is_loading, empties="device"),
    Stage("restored", _is_restored),
    Stage("between chunks", lambda s: s.chunked_req is not None and s.chunked_req.rid == VICTIM, cold=True),
    Stage("decoding", _is_decoding),
)


class Aborts:
    """The stages one after the other, on one scheduler."""

    def __init__(self, asker: Asker) -> None:
        self.asker = asker
        self.scheduler = asker.run.scheduler
        self.found: dict[str, Any] = {}

    def abort_at(self, stage: Stage, tokens: list[int], namespace: str) -> bool:
        """Ask for ``tokens`` and abort there; whether it ended as aborted."""
        victim, follower = request(VICTIM, tokens, 64), request("follower", prompt(77, 400), 4)
        victim.extra_key = namespace
        follower.extra_key = f"follower of {stage.name}"
        first = [victim]
        if stage.name == "queued":
            # All slots are taken before it comes.
            first = [request(f"holder {n}", prompt(80 + n, 130), 24) for n in range(SLOTS)] + first
        handed_in = False

        def script(iteration: int) -> list[Any] | None:
            nonlocal handed_in
            assert iteration < 5_000, f"{stage.name} was not reached, or it does not end"
            if iteration == 0:
                return first
            time.sleep(0.001)
            if not handed_in and stage.reached(self.scheduler):
                handed_in = True
                self.reading.set()
                return [abort(VICTIM), follower]
            return None if handed_in and self.asker.run.idle else []

        self.asker.run.outputs.clear()
        self.asker.run.run(script)
        return self.asker.run.aborted() == [VICTIM]

    @contextlib.contextmanager
    def _held_up(self, stage: Stage) -> Iterator[None]:
        """Storage answers when the abort is handed in."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        self.reading = threading.Event()
        read = HiCacheFile.batch_get_v2

        def held_up(backend: HiCacheFile, transfers: Any, extra_info: Any = None) -> Any:
            assert self.reading.wait(30)
            return read(backend, transfers, extra_info)

        if stage.name != "prefetching":
            self.reading.set()
        with mock.patch.object(HiCacheFile, "batch_get_v2", held_up):
            yield

    def run(self, number: int, stage: Stage) -> None:
        asker, tokens, namespace = self.asker, prompt(number, LENGTH), f"stage {stage.name}"
        asker.cold([tokens], [f"cold {namespace}"])
        if not stage.cold:
            asker.warm(f"first {stage.name}", [tokens], namespace)
        asker.dirty()
        if stage.empties == "device":
            asker.empty_device()
        elif stage.empties == "memory":
            asker.empty_memory()
        with self._held_up(stage):
            aborted = self.abort_at(stage, tokens, namespace)
        for _ in range(2):
            asker.warm(stage.name, [tokens], namespace)
        self.scheduler.tree_cache.sanity_check()
        self.found[stage.name] = {"aborted": aborted, "cached": asker.cached[stage.name]}


def free(scheduler: Any) -> list[int]:
    """FULL rows, tiles and request slots that are free."""
    allocator = scheduler.token_to_kv_pool_allocator
    return [
        allocator.full_available_size(),
        allocator.tiles_available,
        len(scheduler.req_to_token_pool.free_slots),
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        asker = Asker(directory, disable_overlap_schedule=sys.argv[1] == "no-overlap")
        before = free(asker.run.scheduler)
        aborts = Aborts(asker)
        for number, stage in enumerate(STAGES):
            aborts.run(1_000 + number, stage)
        asker.empty_memory()
        found = {
            "stages": aborts.found,
            "different": asker.different,
            "free": [before, free(asker.run.scheduler)],
            "compared": sum(map(len, asker.cached.values())),
        }
    print(json.dumps(found), file=sys.__stdout__)


if __name__ == "__main__":
    main()
