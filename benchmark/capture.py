"""What capture costs: the same steps with and without it, in one process.

    python benchmark/capture.py [--rounds 15] [--json]

The real model on the CPU platform computes a prefill of 2,048 tokens (eight tiles, one per
page) and a decode step of eight requests that all reach a page boundary (eight tiles). Rounds
with and without a capture planner alternate. Printed are the ratios of the medians, the time
inside the capture calls as a share of the step, and the bytes per second that they move,
against a plain copy of as many bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["SGLANG_PLATFORM"] = "cpu_ref"
os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test"))

_PREFILL, _REQUESTS, _BOUNDARY = 2_048, 8, 512
_COPIES = 100
_HOOKS = ("window_rows", "state_rows", "decode_windows", "decode_states")


class Bench:
    """The loaded model, its planner, and a clock inside the capture calls."""

    def __init__(self) -> None:
        from kit.tiny_run import tiny_run

        self.run = tiny_run(hicache_swa_device_tile_fraction=0.75)
        self.allocator: Any = self.run.runner.token_to_kv_pool_allocator
        self.planner = self.allocator.capture_planner
        self.inside = 0.0
        writer = self.run.pool.tile_writer
        for name in _HOOKS:
            setattr(writer, name, self._timed(getattr(writer, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any, **keywords: Any) -> None:
            begin = time.perf_counter()
            call(*arguments, **keywords)
            self.inside += time.perf_counter() - begin

        return timed

    def prefill(self, capture: bool) -> tuple[float, float, int]:
        """Seconds of the step, seconds inside capture, tiles."""
        self.run.clear()
        sequence = self.run.sequence([6 + k % 500 for k in range(_PREFILL)])
        return self._step(lambda: self.run.extend((sequence, _PREFILL)), [sequence], capture)

    def decode(self, capture: bool) -> tuple[float, float, int]:
        """As prefill(), for one decode step in which every request reaches a boundary."""
        self.run.clear()
        self.allocator.capture_planner = None
        tokens = [6 + k % 500 for k in range(_BOUNDARY)]
        sequences = [self.run.sequence(tokens) for _ in range(_REQUESTS)]
        self.run.extend(*((s, _BOUNDARY - 1) for s in sequences))
        return self._step(lambda: self.run.decode(*sequences), sequences, capture)

    def _step(self, step: Callable[[], Any], sequences: list[Any], capture: bool) -> tuple[float, float, int]:
        self.allocator.capture_planner = self.planner if capture else None
        self.inside = 0.0
        begin = time.perf_counter()
        step()
        seconds = time.perf_counter() - begin
        plan = sequences[0].batch.swa_capture_plan if capture else None
        return seconds, self.inside, len(plan.captures) if plan else 0


def measure(rounds: int) -> dict[str, Any]:
    """Alternate with and without capture, and return the figures."""
    bench = Bench()
    tile_bytes = bench.allocator.capture_pool.layout.nbytes
    figures: dict[str, Any] = {"rounds": rounds, "tile_bytes": tile_bytes}
    for name, step in (("prefill", bench.prefill), ("decode", bench.decode)):
        step(True)
        times: dict[bool, list[float]] = {True: [], False: []}
        inside, tiles = [], 0
        for number in range(rounds):
            print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr)
            for capture in (True, False) if number % 2 else (False, True):
                seconds, within, count = step(capture)
                times[capture].append(seconds)
                if capture:
                    inside.append(within)
                    tiles = count
        within = statistics.median(inside)
        figures[name] = {
            "ratio": statistics.median(times[True]) / statistics.median(times[False]),
            "capture_share_of_step": within / statistics.median(times[True]),
            "tiles": tiles,
            "bytes_per_second": tiles * tile_bytes / within,
            "step_seconds": statistics.median(times[False]),
        }
    figures["capture_pool_bytes"] = bench.allocator.capture_pool.nbytes
    # Before the copies below take buffers of their own.
    figures["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for name in ("prefill", "decode"):
        size = figures[name]["tiles"] * tile_bytes
        figures[name]["plain_copy_bytes_per_second"] = size / _plain_copy_seconds(size)
    return figures


def _plain_copy_seconds(size: int) -> float:
    """Median seconds of a copy of ``size`` bytes between buffers that no cache holds."""
    import torch

    source, target = (torch.randint(0, 256, (_COPIES, size), dtype=torch.uint8) for _ in range(2))
    seconds = []
    for row in range(_COPIES):
        begin = time.perf_counter()
        target[row].copy_(source[row])
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds)
    if args.json:
        print(json.dumps(result))
        return
    for name in ("prefill", "decode"):
        r = result[name]
        print(
            f"{name}: with / without capture = {r['ratio']:.3f}; {r['tiles']} tiles take "
            f"{r['capture_share_of_step']:.2%} of the step, {r['bytes_per_second'] / 1e9:.2f} GB/s "
            f"(plain copy {r['plain_copy_bytes_per_second'] / 1e9:.2f} GB/s)"
        )
    print(
        f"capture pool {result['capture_pool_bytes'] / 2**20:.0f} MiB, "
        f"peak memory {result['peak_memory_bytes'] / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()
