#!/usr/bin/env python3.11
"""Random operations on the real caches beside a model of them, for as long as wanted.

    tools/soak_ops.py [--steps N] [--seed N] [--core python|rust|both] [--device-only] [--jobs N] [--json FILE]

(by the environment's python; see `make soak-ops`). A failure is shrunk and printed as the shortest
program of operations that fails, with the seed that finds it again. Exit code 0: no failure; 1: a failure.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

# One seed's work: what has to be run again to see a failure again.
EXAMPLES, STEPS = 8, 500


class Outcome(NamedTuple):
    """What one seed came to: operations, reuses, servers, damaged files, digests compared, quarantined pages.

    failure: how to see it again, and the program that fails.
    """

    core: str
    counts: Counter[str]
    failure: dict[str, str] | None


def prepare() -> None:
    """In every process, before SGLang is imported: it reads the platform then."""
    os.environ["SGLANG_PLATFORM"] = "cpu_ref"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test"))
    import torch

    torch.set_num_threads(1)
    # What a lost file or a full host logs is expected here.
    logging.disable(logging.ERROR)


def run(core: str, seed: int, device_only: bool) -> Outcome:
    from kit.oracle_machine import run_machine

    try:
        machine = run_machine(core, examples=EXAMPLES, steps=STEPS, hicache=not device_only, seed=seed)
    except Exception:
        again = f"tools/soak_ops.py --seed {seed} --core {core} --steps 1{' --device-only' * device_only}"
        return Outcome(core, Counter(), {"again": again, "program": traceback.format_exc()})
    return Outcome(core, Counter(machine.tally, steps=machine.steps, reused=machine.reused), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="operations in all (default: 1,000,000)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="default: a random one")
    parser.add_argument("--core", choices=("python", "rust", "both"), default="both", help="the tree core")
    parser.add_argument("--device-only", action="store_true", help="without host and storage")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one per core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    cores = ("python", "rust") if args.core == "both" else (args.core,)
    counts: Counter[str] = Counter(steps=0)
    failure = None
    print(f"> seed {args.seed}, {args.steps:,} steps", flush=True)
    start = time.monotonic()
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), initializer=prepare) as pool:
        seeds = count(args.seed)

        def submit() -> Future[Outcome]:
            seed = next(seeds)
            return pool.submit(run, cores[(seed - args.seed) % len(cores)], seed, args.device_only)

        running = {submit() for _ in range(args.jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for outcome in (future.result() for future in done):
                counts.update(outcome.counts)
                failure = failure or outcome.failure
                rate = counts["steps"] / (time.monotonic() - start)
                said = ", ".join(f"{value:,} {name}" for name, value in counts.items())
                print(f"> {said}; {rate:.0f} steps/s, {outcome.core}", flush=True)
                if failure is None and counts["steps"] < args.steps:
                    running.add(submit())
    if failure is not None:
        print(f"{failure['program']}\n> FAILED; again: {failure['again']}")
    if args.json is not None:
        seconds = round(time.monotonic() - start, 1)
        result = {"seed": args.seed, **counts, "seconds": seconds, "failure": failure}
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
