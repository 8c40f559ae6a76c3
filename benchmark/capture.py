"""What capture costs: the same steps with and without it, in one process.

    python benchmark/capture.py [--rounds 6] [--json]

The real model on the CPU platform computes a prefill of 1,024 tokens (four tiles, one per page),
a decode step of four requests that all reach a page boundary (four tiles), and one in which none
does. Rounds with and without a capture planner alternate. Printed are the ratios, the
time inside the capture calls as a share of the step, the bytes per second that they move against
a plain copy of as many bytes, and how many tile calls there were: each would be a launch on an
accelerator. Times are this thread's processor time, with torch on one thread.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["SGLANG_PLATFORM"] = "cpu_ref"
os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test"))

import torch

from paired import alternate, peak_memory, ratio, script, text

_PREFILL, _REQUESTS, _BOUNDARY = 1_024, 4, 256
# Decode steps without a boundary are short: as many in a round.
_QUIET_STEPS = 8
_COPIES = 100
_HOOKS = ("window_rows", "state_rows", "windows_at_end", "states_at_end")
_KERNELS = {
    "sglang.srt.mem_cache.swa_bitexact.capture": ("capture_layer", "gather_tiles"),
    "sglang.srt.mem_cache.swa_bitexact.restore": ("scatter_tables",),
}


class Step(NamedTuple):
    """seconds: of the step. inside: of them in capture calls. tile_calls: of any kind."""

    seconds: float
    inside: float
    tiles: int
    tile_calls: int


class Bench:
    """The loaded model, its planner, and a clock inside the capture calls."""

    def __init__(self) -> None:
        from kit.tiny_run import tiny_run

        self.run = tiny_run(hicache_swa_device_tile_fraction=0.75)
        torch.set_num_threads(1)
        self.allocator: Any = self.run.runner.token_to_kv_pool_allocator
        self.planner = self.allocator.capture_planner
        self.inside = 0.0
        self.tile_calls = 0
        self.live: list[Any] = []
        writer = self.run.pool.tile_writer
        for name in _HOOKS:
            setattr(writer, name, self._timed(getattr(writer, name)))
        for module, names in _KERNELS.items():
            for name in names:
                owner = importlib.import_module(module)
                setattr(owner, name, self._counted(getattr(owner, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any, **keywords: Any) -> None:
            begin = time.thread_time()
            call(*arguments, **keywords)
            self.inside += time.thread_time() - begin

        return timed

    def _counted(self, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any) -> None:
            self.tile_calls += 1
            call(*arguments)

        return counted

    def prefill(self, capture: bool) -> Step:
        self.run.clear()
        sequence = self.run.sequence([6 + k % 500 for k in range(_PREFILL)])
        return self._step(lambda: self.run.extend((sequence, _PREFILL)), [sequence], capture)

    def decode(self, capture: bool) -> Step:
        """One decode step in which every request reaches a boundary."""
        self.begin(_BOUNDARY - 1)
        return self.decode_without_boundary(capture)

    def begin(self, length: int) -> None:
        """Requests of ``length`` tokens each that go on to decode."""
        self.run.clear()
        self.allocator.capture_planner = None
        tokens = [6 + k % 500 for k in range(2 * _BOUNDARY)]
        self.live = [self.run.sequence(tokens) for _ in range(_REQUESTS)]
        self.run.extend(*((s, length) for s in self.live))

    def decode_without_boundary(self, capture: bool) -> Step:
        """The next decode step of the requests that have begun; 255 of 256 reach no boundary."""
        return self._step(lambda: self.run.decode(*self.live), self.live, capture)

    def _step(self, step: Callable[[], Any], sequences: list[Any], capture: bool) -> Step:
        self.allocator.capture_planner = self.planner if capture else None
        self.inside, self.tile_calls = 0.0, 0
        begin = time.thread_time()
        step()
        seconds = time.thread_time() - begin
        plan = sequences[0].batch.swa_capture_plan if capture else None
        return Step(seconds, self.inside, len(plan.captures) if plan else 0, self.tile_calls)


def measure(rounds: int) -> dict[str, Any]:
    """Alternate with and without capture, and return the figures."""
    bench = Bench()
    tile_bytes = bench.allocator.capture_pool.layout.nbytes
    figures: dict[str, Any] = {"rounds": rounds, "tile_bytes": tile_bytes}
    steps = {
        "prefill": bench.prefill,
        "decode": bench.decode,
        "decode_without_boundary": bench.decode_without_boundary,
    }
    for name, step in steps.items():
        print(f"capture, {name}: {rounds} rounds", file=sys.stderr)
        quiet = name == "decode_without_boundary"
        if quiet:
            bench.begin(_BOUNDARY)
        step(True)
        with_it: list[Step] = []
        without: list[Step] = []
        for number in range(min(rounds * _QUIET_STEPS, _BOUNDARY // 2 - 2) if quiet else rounds):
            for capture in (True, False) if number % 2 else (False, True):
                (with_it if capture else without).append(step(capture))
        figure = ratio([s.seconds for s in with_it], [s.seconds for s in without])
        figures[name] = {**figure, "tiles": with_it[-1].tiles, "tile_calls": with_it[-1].tile_calls}
        if size := with_it[-1].tiles * tile_bytes:
            within = statistics.median(s.inside for s in with_it)
            figures[name] |= {
                "capture_share_of_step": within / figure["seconds"],
                "capture_seconds": within,
                "bytes_per_second": size / within,
            }
    figures["capture_pool_bytes"] = bench.allocator.capture_pool.nbytes
    # Before the copies below take buffers of their own.
    figures["peak_memory_bytes"] = peak_memory()
    for name in ("prefill", "decode"):
        figure = figures[name]
        copy = _plain_copy_seconds(figure["tiles"] * tile_bytes)
        figure["plain_copy_bytes_per_second"] = figure["tiles"] * tile_bytes / copy
        figure["capture_over_copy"] = figure["capture_seconds"] / copy
    return figures


def _plain_copy_seconds(size: int) -> float:
    """Median seconds of a copy of ``size`` bytes between buffers that no cache holds."""
    source, target = (torch.randint(0, 256, (_COPIES, size), dtype=torch.uint8) for _ in range(2))
    times = alternate({"copy": lambda number: target[number % _COPIES].copy_(source[number % _COPIES])}, _COPIES)
    return statistics.median(times["copy"])


def show(result: dict[str, Any]) -> None:
    for name in ("prefill", "decode", "decode_without_boundary"):
        r = result[name]
        print(f"{name}: with / without capture = {text(r)}; {r['tile_calls']} tile calls")
        if r["tiles"]:
            print(
                f"  {r['tiles']} tiles take {r['capture_share_of_step']:.2%} of the step, "
                f"{r['bytes_per_second'] / 1e9:.2f} GB/s, {r['capture_over_copy']:.2f} of a plain copy's time "
                f"({r['plain_copy_bytes_per_second'] / 1e9:.2f} GB/s)"
            )
    print(
        f"capture pool {result['capture_pool_bytes'] / 2**20:.0f} MiB, "
        f"peak memory {result['peak_memory_bytes'] / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    script(__doc__, measure, show, rounds=6)
