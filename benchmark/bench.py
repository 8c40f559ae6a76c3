"""All figures of the performance chapter, in one run: a report, and a page with plots.

    python benchmark/bench.py [--quick] [--only NAME ...] [--out build/bench] [--json]

Each part runs in a process of its own, one after the other, and is a script of this folder. Written are
OUT/report.json and OUT/index.html. Exit code 0: every part ran or said why it cannot; 1: one failed;
2: no part was started.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve().parent


class Part(NamedTuple):
    """full, quick: arguments of the script."""

    title: str
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


PARTS = {
    "restore": Part("restore of a tile against a plain copy", ("--rounds", "100"), ("--rounds", "15")),
    "capture_rows": Part("capture of tiles against a plain copy", ("--rounds", "24"), ("--rounds", "5")),
    "capture": Part("steps of the model with and without capture", ("--rounds", "6"), ("--rounds", "2")),
    "noop_hooks": Part("the no-op calls of part 1", ("--rounds", "12"), ("--rounds", "2")),
    "digests": Part("digests against a copy", ("--rounds", "40"), ("--rounds", "8")),
    "host_memory": Part("host memory of a reuse point"),
    "server": Part("the real server, switch on against off", (), ("--quick",)),
    "gpu_tiles": Part("the Triton tile kernels on an NVIDIA GPU"),
    "projection": Part("a projection for MI355X, on paper"),
}


def chosen(only: Sequence[str] | None) -> list[str]:
    """The parts to run, in their order.

    Raises:
        ValueError: there is no part of that name.
    """
    if unknown := sorted(set(only or ()) - PARTS.keys()):
        raise ValueError(f"--only {' '.join(unknown)}: expected one of {', '.join(PARTS)}")
    return [name for name in PARTS if not only or name in only]


def run_part(name: str, out: Path, *, quick: bool) -> dict[str, Any]:
    """Run one script; ``figures``, ``skipped`` or ``error``, and the seconds that it took."""
    part = PARTS[name]
    command = [sys.executable, str(_HERE / f"{name}.py"), "--json", *(part.quick if quick else part.full)]
    if name == "server":
        command += ["--out", str(out / "server")]
    log = out / f"{name}.log"
    begin = time.monotonic()
    with log.open("w") as errors:
        # One thread: two that wait for each other on a busy machine measure the machine.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, check=False)
    result: dict[str, Any] = {"title": part.title, "seconds": round(time.monotonic() - begin, 1)}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        end = "\n".join(log.read_text().splitlines()[-8:])
        return {**result, "error": f"{name}.py ended with code {done.returncode}; the end of {log}:\n{end}"}
    figures = json.loads(lines[-1])
    return {**result, "skipped": figures["skipped"]} if "skipped" in figures else {**result, "figures": figures}


def machine() -> dict[str, Any]:
    """What a reader must know of the machine to weigh a figure."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(": ")[1] for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    )
    load = os.getloadavg()[0]
    return {
        "processor": (names or [platform.processor()])[0],
        "cores": os.cpu_count(),
        "load at the start": round(load, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="few rounds, two servers: does everything still run?")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--json", action="store_true", help="print the report")
    args = parser.parse_args(arguments)
    try:
        names = chosen(args.only)
    except ValueError as error:
        parser.error(str(error))
    from page import render

    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"quick": args.quick, "machine": machine(), "parts": {}}
    for number, name in enumerate(names, 1):
        print(f"> {number} of {len(names)}: {name}, {PARTS[name].title}", file=sys.stderr, flush=True)
        report["parts"][name] = part = run_part(name, args.out, quick=args.quick)
        print(
            f"  {part['seconds']:.0f} s {part.get('error') or part.get('skipped') or ''}", file=sys.stderr, flush=True
        )
        # After each part, so that an interrupted run leaves what it has.
        (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        (args.out / "index.html").write_text(render(report))
    if args.json:
        print(json.dumps(report))
    print(f"> {args.out / 'report.json'}, {args.out / 'index.html'}", file=sys.stderr)
    return int(any("error" in part for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
