#!/usr/bin/env python3.11
"""Random operations on the real caches beside a model of them, for as long as wanted.

    tools/soak_ops.py [--steps N] [--seed N] [--core python|rust|both] [--device-only] [--json FILE]

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
from pathlib import Path

# One seed's work: what has to be run again to see a failure again.
EXAMPLES, STEPS = 8, 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="operations in all (default: 1,000,000)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="default: a random one")
    parser.add_argument("--core", choices=("python", "rust", "both"), default="both", help="the tree core")
    parser.add_argument("--device-only", action="store_true", help="without host and storage")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    # Chooses the platform, which SGLang's modules read when they are imported.
    os.environ["SGLANG_PLATFORM"] = "cpu_ref"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test"))
    import torch

    from kit.oracle_machine import run_machine

    torch.set_num_threads(1)

    # What a lost file or a full host logs is expected here.
    logging.disable(logging.ERROR)
    cores = ("python", "rust") if args.core == "both" else (args.core,)
    result = {"seed": args.seed, "steps": 0, "reused": 0, "seconds": 0.0, "failure": None}
    print(f"> seed {args.seed}, {args.steps:,} steps", flush=True)
    start, seed = time.monotonic(), args.seed
    while result["steps"] < args.steps and result["failure"] is None:
        core = cores[(seed - args.seed) % len(cores)]
        try:
            machine = run_machine(core, examples=EXAMPLES, steps=STEPS, hicache=not args.device_only, seed=seed)
        except Exception:
            again = f"tools/soak_ops.py --seed {seed} --core {core} --steps 1{' --device-only' * args.device_only}"
            result["failure"] = {"again": again, "program": traceback.format_exc()}
            print(f"{traceback.format_exc()}\n> FAILED; again: {again}", flush=True)
            break
        finally:
            result["seconds"] = round(time.monotonic() - start, 1)
        result["steps"] += machine.steps
        result["reused"] += machine.reused
        rate = result["steps"] / result["seconds"]
        print(f"> {result['steps']:,} steps, {result['reused']:,} reuses, {rate:.0f} steps/s, {core}", flush=True)
        seed += 1
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(result["failure"] is not None)


if __name__ == "__main__":
    sys.exit(main())
