"""What the no-op calls of part 1 cost: stock against part 1, in one run.

    python benchmark/noop_hooks.py [--rounds 40] [--json]

Two worker processes hold the real model on the CPU platform, one on the released SGLang,
one on part 1. They take turns, one decode step and one prefill at a time, so that the
machine's mood hits both alike. Printed are the ratios of the medians, their spread over
the rounds, and, since these differ by less than the noise, the calls themselves timed
alone as a share of the step that makes them.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paired import peak_memory, script

_TEST = Path(__file__).resolve().parent.parent / "test"
_PREFILL = 512
_NOOP_CALLS = 200_000


def _worker(tree: str, pipe: Connection, log: str) -> None:
    """Serve timings of one SGLang tree until told "stop"; what it prints goes to ``log``."""
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.path[:0] = [tree, str(_TEST)]
    os.environ["SGLANG_PLATFORM"] = "cpu_ref"
    import sglang

    from kit.tiny_run import tiny_run

    run = tiny_run()
    live: Any = None
    tokens = [6 + k % 500 for k in range(12_000)]

    def prefill() -> float:
        run.clear()
        sequence = run.sequence(tokens)
        begin = time.perf_counter()
        run.extend((sequence, _PREFILL))
        nonlocal live
        live = sequence
        return time.perf_counter() - begin

    def decode() -> float:
        begin = time.perf_counter()
        run.decode(live)
        return time.perf_counter() - begin

    prefill()
    decode()
    pipe.send(sglang.__version__)
    while (what := pipe.recv()) != "stop":
        if what == "calls":
            pipe.send(_time_calls(run))
        else:
            pipe.send(prefill() if what == "prefill" else decode())
    pipe.send(peak_memory())


def _time_calls(run: Any) -> dict[str, float]:
    """Seconds of the no-op calls of one decode step, one prefill layer and one extend batch."""
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    # A no-op reads none of its arguments.
    backend, unread = run.runner.attn_backend, None

    def decode_step() -> None:
        backend.capture_swa_windows_decode(unread)
        backend.capture_compress_state_windows_decode(unread)

    def prefill_layer() -> None:
        backend.capture_swa_windows(0, unread, unread, k_rope=None)

    def extend_batch() -> None:
        BasePrefixCache.restore_swa_windows(unread, unread, unread)

    return {call.__name__: _seconds_per_call(call) for call in (decode_step, prefill_layer, extend_batch)}


def _seconds_per_call(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    for _ in range(_NOOP_CALLS):
        call()
    return (time.perf_counter() - begin) / _NOOP_CALLS


def measure(rounds: int) -> dict[str, Any]:
    """Start both workers, alternate, and return the figures."""
    from sglang_bitexact.series import Series
    from sglang_bitexact.upstream import Wheel, download, unpacked
    from sglang_bitexact.wheel import build

    with tempfile.TemporaryDirectory() as folder:
        part1 = unpacked(Wheel(build(Series.default(), download(), 1, Path(folder))))
        trees = {"stock": unpacked(download()), "part 1": part1}
        context = mp.get_context("spawn")
        workers, pipes = [], {}
        try:
            for name, tree in trees.items():
                pipes[name], far = context.Pipe()
                log = Path(folder) / f"{name}.log"
                worker = context.Process(target=_worker, args=(str(tree), far, str(log)))
                worker.start()
                # Ours would keep the pipe open, and a dead worker would not be noticed.
                far.close()
                workers.append(worker)
                try:
                    print(f"{name}: sglang {pipes[name].recv()} is up", file=sys.stderr)
                except EOFError:
                    sys.exit(f"the worker of {name} ended:\n{log.read_text()[-3000:]}")
            return _alternate(pipes, rounds)
        finally:
            # Without its pipe a worker ends by itself, and cleans up what torch and the server keep.
            for pipe in pipes.values():
                pipe.close()
            for worker in workers:
                worker.join(timeout=20)
                worker.terminate()
                worker.join()


def _alternate(pipes: dict[str, Any], rounds: int) -> dict[str, Any]:
    def ask(name: str, what: str) -> Any:
        pipes[name].send(what)
        return pipes[name].recv()

    times: dict[str, dict[str, list[float]]] = {w: {n: [] for n in pipes} for w in ("prefill", "decode")}
    for number in range(rounds):
        if number % 10 == 0:
            print(f"round {number} of {rounds}", file=sys.stderr)
        # Alternate who goes first, so that neither always finds the caches warm.
        order = list(pipes) if number % 2 == 0 else list(pipes)[::-1]
        for what in ("prefill", "decode", "decode", "decode"):
            for name in order:
                times[what][name].append(ask(name, what))
    calls = ask("part 1", "calls")
    layers = 4
    figures = {what: _ratio(by_name) for what, by_name in times.items()}
    decode_s = statistics.median(times["decode"]["part 1"])
    layer_s = statistics.median(times["prefill"]["part 1"]) / layers
    figures["decode"]["calls_share_of_step"] = calls["decode_step"] / decode_s
    figures["prefill"]["calls_share_of_layer"] = calls["prefill_layer"] / layer_s
    figures["prefill"]["calls_share_of_batch"] = calls["extend_batch"] / (layers * layer_s)
    memory = {name: ask(name, "stop") for name in pipes}
    return {"rounds": rounds, **figures, "calls_seconds": calls, "peak_memory_bytes": memory}


def _ratio(by_name: dict[str, list[float]]) -> dict[str, float]:
    """part 1 over stock: of the medians, and the middle half of the paired ratios."""
    stock, part1 = by_name["stock"], by_name["part 1"]
    paired = sorted(p / s for p, s in zip(part1, stock, strict=True))
    return {
        "ratio": statistics.median(part1) / statistics.median(stock),
        "paired_q1": paired[len(paired) // 4],
        "paired_q3": paired[3 * len(paired) // 4],
        "stock_seconds": statistics.median(stock),
    }


def show(result: dict[str, Any]) -> None:
    for what, share in (("decode", "calls_share_of_step"), ("prefill", "calls_share_of_layer")):
        r = result[what]
        print(
            f"{what}: part 1 / stock = {r['ratio']:.3f} (middle half of the pairs {r['paired_q1']:.3f} to "
            f"{r['paired_q3']:.3f}); the no-op calls alone are {r[share]:.2e} of a "
            f"{'step' if what == 'decode' else 'layer'}"
        )
    print(f"the restore hook alone is {result['prefill']['calls_share_of_batch']:.2e} of an extend batch")
    print("peak memory:", {name: f"{size / 2**20:.0f} MiB" for name, size in result["peak_memory_bytes"].items()})


if __name__ == "__main__":
    script(__doc__, measure, show, rounds=40)
