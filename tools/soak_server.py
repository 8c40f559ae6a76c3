#!/usr/bin/env python3.11
"""A real server under many clients for minutes, some of which hang up, over storage that fails and changes bytes.

    tools/soak_server.py [--minutes 10] [--clients 64] [--seed N] [--out DIR] [--json FILE]

(by the environment's python; see `make soak-server`.) Every answer is compared with a cold run of its
prompt. Everything free is garbage, storage calls fail and are late at random, and bytes of stored files
are changed. Afterwards the cache is flushed, and nothing may be left in any pool. Exit code 0: no
answer differs, memory is flat, nothing is left; 1 otherwise; 2: it could not run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import re
import secrets
import statistics
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sglang_bitexact.demo.run import make_checkpoint, stop_on_signals
from sglang_bitexact.demo.server import Server
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.verify.answer import Answer, compare
from sglang_bitexact.verify.cases import stream
from sglang_bitexact.verify.client import Client, Sampling
from sglang_bitexact.verify.long import built_trees
from sglang_bitexact.verify.matrix import Configuration

# More than device and host hold together, so that storage is read.
_PROMPTS, _ROOTS = 48, 24
_HOST_RATIO = "1.5"
_SAMPLING = Sampling(new_tokens=8)
_CONFIGURATION = Configuration("soak", "on", chunk=512, concurrency=12, poison=True)
_ENVIRONMENT = {
    # SGLang's own injector: a storage call fails, or is late, at random.
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.02",
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
}
_LEFT = ("sglang:num_used_tokens", "sglang:token_usage", "sglang:swa_token_usage", "sglang:num_running_reqs")
# Of the server's memory, between the second quarter of the run and the last.
_MOST_GROWTH = 0.03
_PR_SET_THP_DISABLE = 41


@dataclass
class Soak:
    """One run. ``prompts`` share prefixes of ``_ROOTS`` texts; ``cold`` are their answers on an empty cache."""

    client: Client
    storage: Path
    seed: int
    vocab: int
    seconds: float
    prompts: list[list[int]] = field(default_factory=list)
    cold: list[Answer] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        for number in range(_PROMPTS):
            root = stream(f"soak {self.seed} root {number % _ROOTS}", draw.randint(600, 1600), self.vocab)
            self.prompts.append([*root, *stream(f"soak {self.seed} tail {number}", draw.randint(1, 300), self.vocab)])
        self._lock = threading.Lock()

    def answer_cold(self) -> None:
        for number, prompt in enumerate(self.prompts):
            self.cold.append(self.client.generate(prompt, f"cold {number}", _SAMPLING))

    def run(self, clients: int, server: psutil.Process) -> None:
        """Until the time is up; then every client has had its last answer."""
        end = time.monotonic() + self.seconds
        threads = [threading.Thread(target=self._ask, args=(n, end)) for n in range(clients)]
        threads.append(threading.Thread(target=self._change_bytes, args=(end,)))
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            self.memory.append(_memory(server))
            print(f"{self.progress()}, {end - time.monotonic():.0f} s left", file=sys.stderr)
            time.sleep(min(10.0, self.seconds / 12))
        for thread in threads:
            thread.join()

    def progress(self) -> str:
        return (
            f"{self.counts['compared']} compared, {len(self.differing)} differ, {self.counts['abandoned']} abandoned, "
            f"{self.counts['bytes_changed']} bytes changed, {self.memory[-1] / 2**20:.0f} MiB"
        )

    def _ask(self, number: int, end: float) -> None:
        draw = random.Random(self.seed * 1000 + number)
        while time.monotonic() < end and not self.failures:
            which, act = draw.randrange(len(self.prompts)), draw.random()
            try:
                if act < 0.3:
                    self.client.abandon(self.prompts[which], "warm", _SAMPLING, after_first=act < 0.15)
                    self._count("abandoned")
                else:
                    self._compare(which, self.client.generate(self.prompts[which], "warm", _SAMPLING))
            except Exception as error:  # Whatever it is, the run has failed and says so.
                self.failures.append(f"{type(error).__name__}: {error}")

    def _compare(self, which: int, answer: Answer) -> None:
        self._count("compared", f"hits_in_{answer.tier}")
        difference = compare(self.cold[which], answer)
        if difference is not None:
            self.differing.append(
                f"prompt {which}: {answer.cached_tokens} tokens reused from {answer.tier}: differs from token "
                f"{difference.position} on, logprob by {difference.logprob:.3g}"
            )

    def _change_bytes(self, end: float) -> None:
        """One byte of one stored file every second."""
        draw = random.Random(self.seed)
        while time.monotonic() < end:
            time.sleep(1.0)
            # A file may be replaced or quarantined meanwhile.
            with suppress(OSError):
                files = sorted(path for path in self.storage.glob("*.bin") if path.stat().st_size)
                if not files:
                    continue
                with draw.choice(files).open("r+b") as file:
                    at = draw.randrange(file.seek(0, 2))
                    file.seek(at)
                    old = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([old ^ draw.randint(1, 255)]))
                self._count("bytes_changed")

    def _count(self, *names: str) -> None:
        with self._lock:
            self.counts.update(names)

    def growth(self) -> float:
        """Of memory, from the second quarter of the run to the last, as a fraction."""
        quarter = max(1, len(self.memory) // 4)
        before = statistics.median(self.memory[quarter : 2 * quarter] or self.memory)
        return statistics.median(self.memory[-quarter:]) / before - 1


def _memory(server: psutil.Process) -> float:
    """Bytes of the server's processes that are not shared."""
    total = 0.0
    for process in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().uss
    return total


def left_in_pools(server: Server) -> dict[str, float]:
    """What SGLang's metrics say is in use, once the server is idle and flushed."""
    server.flush()
    # Figures of an idle server are published a moment later.
    time.sleep(5)
    found: dict[str, float] = {}
    for line in server.get("/metrics").text.splitlines():
        name, _, value = line.partition("{")[0], *line.rpartition(" ")[1:]
        if name in _LEFT:
            found[name] = max(found.get(name, 0.0), float(value))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path("build/soak-server"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    print(f"> seed {seed}", file=sys.stderr)
    # Huge pages count memory that was never touched, more of it the longer a process lives. The server inherits this.
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    stop_on_signals()
    try:
        report = soak(args.out, args.minutes, args.clients, seed)
    except (BitexactError, OSError) as error:
        print(f"soak-server: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    for name, value in report.items():
        print(f"{name}: {value}")
    return 0 if report["passed"] else 1


def soak(out: Path, minutes: float, clients: int, seed: int) -> dict[str, Any]:
    """Run it; the report, with ``passed``."""
    out = out.resolve() / str(seed)
    storage = out / "l3"
    storage.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(out.parent / "checkpoint")
    arguments = [*_CONFIGURATION.arguments(str(storage)), "--hicache-ratio", _HOST_RATIO, "--enable-metrics"]
    environment = {**_CONFIGURATION.environment(), **_ENVIRONMENT}
    tree = built_trees(out.parent / "dist")["on"]
    with Server(checkpoint, arguments, out / "server.log", tree=tree, environment=environment) as server:
        client = Client(server.url)
        vocab = client.facts().vocab
        assert vocab is not None, "the checkpoint is on this machine"
        run = Soak(client, storage, seed, vocab, minutes * 60)
        run.answer_cold()
        run.run(clients, psutil.Process(server.pid))
        left = {} if run.failures else left_in_pools(server)
    log = (out / "server.log").read_text(errors="replace")
    return _report(run, left, log)


def _report(run: Soak, left: dict[str, float], log: str) -> dict[str, Any]:
    wrong = [*run.differing[:5], *run.failures[:5]]
    wrong += [f"{name} is {value} after a flush" for name, value in left.items() if value]
    wrong += [f"{name} is no metric of the server" for name in _LEFT if name not in left and not run.failures]
    quarantined = len(re.findall(r"It is quarantined", log))
    if not (
        quarantined and run.counts["hits_in_device"] and run.counts["hits_in_host"] and run.counts["hits_in_storage"]
    ):
        wrong.append("not every tier was hit, or no changed byte was met: run it longer")
    if run.growth() > _MOST_GROWTH:
        wrong.append(f"memory grew by {run.growth():.1%}, expected at most {_MOST_GROWTH:.0%}")
    if "Traceback" in log:
        wrong.append("traceback in the server's log: " + log[log.index("Traceback") :][:1500])
    return {
        "seed": run.seed,
        "seconds": run.seconds,
        **dict(sorted(run.counts.items())),
        "differing": len(run.differing),
        "quarantined": quarantined,
        "memory_mib": [round(value / 2**20) for value in run.memory],
        "memory_growth": round(run.growth(), 4),
        "left_in_pools": left,
        "wrong": wrong,
        "passed": not wrong,
    }


if __name__ == "__main__":
    sys.exit(main())
