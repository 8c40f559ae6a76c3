"""What the switch costs and brings on the real server: time to the first token, a chat workload, the start.

    python benchmark/server.py [--quick] [--json] [--out build/bench/server]

The CPU platform's server with HiCache and file storage, switch off and on, one server at a time, in the
order off, on, on, off. Each server answers the same prompts, by length in turn:

    cold     an empty cache            device   again at once
    host     again when longer prompts have pushed it out of the device
    storage  again when device and host were flushed

Each answer is one token, so that its time is the time to the first token. A figure counts only where the
server says that the hit came from that tier. Reported are wall time and the processor time of all of the
server's processes: on a machine that others use as well, only the latter is the server's own. Switch on
against off is a ratio of two servers that ran one after the other; a hit against its cold run is one of
the same server, within seconds. Off, that is stock, reuses a prefix on rows that are not its own: what its
hits cost is comparable, what they answer is not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from sglang_bitexact.demo.run import make_checkpoint, stop_on_signals
from sglang_bitexact.demo.server import Server
from sglang_bitexact.verify.answer import TIERS
from sglang_bitexact.verify.cases import stream
from sglang_bitexact.verify.client import Client, Sampling
from sglang_bitexact.verify.local import wait_until_written
from sglang_bitexact.verify.matrix import Configuration, Mode

# Together more than the device holds: going through them in turn always finds them pushed out.
LENGTHS = (512, 1_024, 2_048, 4_096, 6_000)
QUICK_LENGTHS = (512, 1_024, 2_048)
ORDER: tuple[Mode, ...] = ("off", "on", "on", "off")
QUICK_ORDER: tuple[Mode, ...] = ("off", "on")
_VOCAB = 512
_CHATS, _TURNS, _MESSAGE, _ANSWER = 4, 4, 200, 8


@dataclass(frozen=True)
class Record:
    """One answer. server: its place in the order. tier: where the hit was meant to be, "cold" for none;
    hit: where it was. wall, cpu: seconds."""

    mode: str
    server: int
    length: int
    tier: str
    hit: str | None
    cached: int
    wall: float
    cpu: float


class Start(NamedTuple):
    """wall, cpu: seconds until it answered. rss: bytes of all processes, after the workload."""

    mode: str
    wall: float
    cpu: float
    rss: int


class Chats(NamedTuple):
    """wall, cpu: seconds for ``requests`` turns; cached of ``prompt`` tokens were reused."""

    mode: str
    wall: float
    cpu: float
    requests: int
    prompt: int
    cached: int


class _Measured:
    """A server and its clocks."""

    def __init__(self, server: Server) -> None:
        self.client = Client(server.url)
        self._process = psutil.Process(server.pid)

    def _processes(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    def cpu(self) -> float:
        """Processor seconds of all processes so far."""
        return sum(sum(p.cpu_times()[:2]) for p in self._processes())

    def rss(self) -> int:
        return sum(p.memory_info().rss for p in self._processes())

    def timed(self, call: Callable[[], Any]) -> tuple[float, float, Any]:
        """Wall and processor seconds of a call, and what it returned."""
        cpu, begin = self.cpu(), time.monotonic()
        result = call()
        return time.monotonic() - begin, self.cpu() - cpu, result


def _first_tokens(measured: _Measured, mode: str, number: int, lengths: Sequence[int], storage: Path) -> list[Record]:
    """One answer per length and tier."""

    def ask(length: int, tier: str) -> Record:
        prompt = stream(f"bench {length}", length, _VOCAB)
        wall, cpu, answer = measured.timed(lambda: measured.client.generate(prompt, f"bench {length}", Sampling(1)))
        return Record(mode, number, length, tier, answer.tier, answer.cached_tokens, wall, cpu)

    records = []
    # What is computed and sent for the first time takes longer, whatever it is.
    measured.client.generate(stream("warm up", 300, _VOCAB), "warm up", Sampling(2))
    for length in lengths:
        records += [ask(length, "cold"), ask(length, "device")]
    # The longest ones are still on the device; others of their size take their place.
    for length in (lengths[-1], lengths[-2]):
        measured.client.generate(stream(f"filler {length}", length, _VOCAB), "filler", Sampling(1))
    records += [ask(length, "host") for length in lengths]
    wait_until_written(storage)
    measured.client.flush()
    records += [ask(length, "storage") for length in lengths]
    return records


def _chats(measured: _Measured, mode: str) -> Chats:
    """Chats that go on at the same time, each turn a message and an answer longer."""
    counts = [0, 0]

    def chat(number: int) -> None:
        prompt: list[int] = []
        for turn in range(_TURNS):
            prompt += stream(f"chat {number} {turn}", _MESSAGE + 50 * number, _VOCAB)
            answer = measured.client.generate(prompt, f"chat {number}", Sampling(_ANSWER))
            counts[0] += len(prompt)
            counts[1] += answer.cached_tokens
            prompt += answer.tokens

    def all_chats() -> None:
        with ThreadPoolExecutor(_CHATS) as pool:
            list(pool.map(chat, range(_CHATS)))

    wall, cpu, _ = measured.timed(all_chats)
    return Chats(mode, wall, cpu, _CHATS * _TURNS, *counts)


def measure(out: Path, *, quick: bool = False) -> dict[str, Any]:
    """Start the servers below ``out``, one at a time, and return the figures.

    Raises:
        BitexactError: a server did not start or did not answer.
    """
    shutil.rmtree(out, ignore_errors=True)
    checkpoint = make_checkpoint(out / "checkpoint")
    records: list[Record] = []
    starts: list[Start] = []
    chats: list[Chats] = []
    order, lengths = (QUICK_ORDER, QUICK_LENGTHS) if quick else (ORDER, LENGTHS)
    for number, mode in enumerate(order):
        storage = out / f"{number}-{mode}" / "l3"
        storage.mkdir(parents=True)
        configuration = Configuration("bench", mode, device_tokens=8192 if not quick else 4096)
        arguments = configuration.arguments(str(storage.resolve()))
        log = storage.parent / "server.log"
        server = Server(checkpoint, arguments, log, environment=configuration.environment())
        print(f"server {number + 1} of {len(order)}, switch {mode}: starting", file=sys.stderr)
        try:
            wall = server.start()
            measured = _Measured(server)
            cpu = measured.cpu()
            print(f"server {number + 1}: up after {wall:.0f} s, first tokens", file=sys.stderr)
            records += _first_tokens(measured, mode, number, lengths, storage)
            print(f"server {number + 1}: chats", file=sys.stderr)
            chats.append(_chats(measured, mode))
            starts.append(Start(mode, wall, cpu, measured.rss()))
        finally:
            server.stop()
        shutil.rmtree(storage)
    return summarize(records, starts, chats)


def summarize(records: Sequence[Record], starts: Sequence[Start], chats: Sequence[Chats]) -> dict[str, Any]:
    """Medians and ratios; a record whose hit was elsewhere is left out and counted.

    first_token: per length and tier, seconds of on and off, each hit over the cold run of its own server,
    and on over off; None where there is no hit.
    """
    missed = [r for r in records if r.tier != "cold" and r.hit != r.tier]
    kept = [r for r in records if r.tier == "cold" or r.hit == r.tier]
    cold = {(r.server, r.length): r for r in kept if r.tier == "cold"}
    rows = []
    for length in sorted({r.length for r in records}):
        for tier in ("cold", *TIERS):
            row: dict[str, Any] = {"length": length, "tier": tier}
            for mode in ("off", "on"):
                found = [r for r in kept if (r.mode, r.length, r.tier) == (mode, length, tier)]
                row[mode] = {
                    "answers": len(found),
                    "cached": _median(r.cached for r in found),
                    "wall": _median(r.wall for r in found),
                    "cpu": _median(r.cpu for r in found),
                    "wall_over_cold": _median(r.wall / cold[r.server, length].wall for r in found),
                    "cpu_over_cold": _median(r.cpu / cold[r.server, length].cpu for r in found),
                }
            row |= _on_over_off(row)
            rows.append(row)
    return {
        "first_token": rows,
        "elsewhere": [asdict(r) for r in missed],
        "start": _both(starts, ("wall", "cpu", "rss")),
        "chats": _both(chats, ("wall", "cpu", "requests", "prompt", "cached")),
    }


def _both(items: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Medians by mode, and on over off."""
    out: dict[str, Any] = {
        mode: {name: _median(getattr(item, name) for item in items if item.mode == mode) for name in names}
        for mode in ("off", "on")
    }
    return out | _on_over_off(out)


def _on_over_off(row: dict[str, Any]) -> dict[str, float | None]:
    def over(name: str) -> float | None:
        on, off = row["on"].get(name), row["off"].get(name)
        return on / off if on is not None and off else None

    return {"wall_on_over_off": over("wall"), "cpu_on_over_off": over("cpu"), "rss_on_over_off": over("rss")}


def _median(values: Any) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench/server"))
    parser.add_argument("--quick", action="store_true", help="two servers, and prompts up to 2,048 tokens")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    stop_on_signals()
    result = measure(args.out, quick=args.quick)
    if args.json:
        print(json.dumps(result))
        return
    for row in result["first_token"]:
        print(f"{row['length']} tokens, {row['tier']}: on {row['on']}, off {row['off']}")
    print("start:", result["start"])
    print("chats:", result["chats"])
    if result["elsewhere"]:
        print(f"{len(result['elsewhere'])} hits were in another tier than meant, and are left out")


if __name__ == "__main__":
    main()
