"""How much reuse is left under each placement of tiles, and what the tiles cost: a trace, replayed.

    python benchmark/trace_replay.py --trace FILE [--json] [--policies A,B] [--limit N] [--out DIR]
    python benchmark/trace_replay.py --tree-speed [--json]

The trace's requests go through the real radix tree, allocator, capture planner, publisher and
HiCache, without a model (see trace_world.py). FILE is in the Mooncake format, .gz or not; see
make_trace.py. A block of 512 tokens of the trace stands for one page. --out also writes
report.json and, where matplotlib is installed, replay.png.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test"))

from rich.console import Console
from rich.table import Table

from make_trace import BLOCK

POLICIES = ("dense", "grid-8192", "grid-16384", "last", "last+branch", "last+branch+grid-16384")
# V4-Flash, bf16 rows and float32 state: a tile, and the compressed rows of 512 tokens.
TILE_BYTES, BLOCK_BYTES = 6_496_256, 2 * 1_594_624


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="a trace in the Mooncake format")
    parser.add_argument("--limit", type=int, help="the first N requests only")
    parser.add_argument("--policies", default=",".join(POLICIES), help="names of trace_policies.Policy, by comma")
    parser.add_argument("--core", choices=("rust", "python"), default="rust", help="SGLang's tree core")
    parser.add_argument("--chunk", type=int, default=8192, help="trace tokens of a prefill step")
    for place in ("device", "host"):
        for kind in ("pages", "tiles"):
            parser.add_argument(
                f"--{place}-{kind}",
                type=float,
                metavar="SHARE",
                help=f"{kind} on the {place}, as a share of those that dense tiles without a limit need; "
                "without it there is no limit",
            )
    parser.add_argument("--tree-speed", action="store_true", help="match and insert, switch on against off")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="a directory for report.json and replay.png")
    args = parser.parse_args()
    if not args.tree_speed and args.trace is None:
        parser.error("--trace FILE is needed; make one with benchmark/make_trace.py")
    if args.chunk <= 0 or args.chunk % BLOCK:
        parser.error(f"--chunk {args.chunk} is no multiple of {BLOCK}")
    return args


def replay_all(args: argparse.Namespace) -> dict[str, Any]:
    """Every policy's figures, each in a cache of its own."""
    from kit.tile_pools import PAGE
    from trace_policies import Policy, distinct_blocks, load_trace
    from trace_world import Sizes, replay

    policies = [Policy(name) for name in args.policies.split(",")]
    trace = load_trace(args.trace, args.limit)
    blocks, tokens = distinct_blocks(trace), sum(request.tokens for request in trace)
    # What a running request holds beside what the tree may keep.
    spare = 2 * max(len(request.ids) for request in trace)
    shares = {name: getattr(args, name) for name in ("device_pages", "device_tiles", "host_pages", "host_tiles")}
    sizes = {n: blocks + spare if share is None else max(1, int(share * blocks)) for n, share in shares.items()}
    found = {}
    for policy in policies:

        def progress(done: int, name: str = policy.name) -> None:
            if done % 500 == 0 or done == len(trace):
                print(f"{name}: {done} of {len(trace)} requests", file=sys.stderr)

        figures = replay(
            trace, policy, Sizes(**sizes), core=args.core, chunk=args.chunk // BLOCK * PAGE, progress=progress
        )
        peak = figures["peak"]
        found[policy.name] = {
            "nominal": figures["nominal_blocks"] * BLOCK / tokens,
            "effective": figures["effective_blocks"] * BLOCK / tokens,
            "effective_over_nominal": figures["effective_blocks"] / max(1, figures["nominal_blocks"]),
            "tiles_over_dense": figures["tiles"] / blocks,
            **figures,
            "bytes": {
                place: peak[f"{place}_pages"] * BLOCK_BYTES + peak[f"{place}_tiles"] * TILE_BYTES
                for place in ("device", "host")
            },
            "tile_bytes": {place: peak[f"{place}_tiles"] * TILE_BYTES for place in ("device", "host")},
        }
    return {
        "requests": len(trace),
        "tokens": tokens,
        "blocks": blocks,
        "core": args.core,
        "chunk": args.chunk,
        "shares": shares,
        "sizes": sizes,
        "policies": found,
    }


def replay_table(report: dict[str, Any]) -> Table:
    limits = [f"{n.replace('_', ' ')} {share:g}" for n, share in report["shares"].items() if share is not None]
    table = Table(
        title=f"{report['requests']} requests, {report['tokens']:,} tokens, {report['blocks']:,} distinct blocks; "
        f"{', '.join(limits) or 'no limits'}",
        caption="nominal, effective: shares of all prompt tokens. Memory: what V4-Flash would take at the peak.",
    )
    for heading in (
        *("policy", "nominal", "effective", "eff / nom", "tiles", "of dense", "superseded", "dropped"),
        *("evicted device", "host", "tiles device", "host", "match ms (p99)", "insert ms (p99)"),
    ):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name, row in report["policies"].items():
        times = [row["seconds"][call] for call in ("match", "insert")]
        table.add_row(
            name,
            *(f"{row[key]:.3f}" for key in ("nominal", "effective", "effective_over_nominal")),
            f"{row['tiles']:,}",
            f"{row['tiles_over_dense']:.1%}",
            *(f"{row[key]:,}" for key in ("superseded", "dropped", "evicted_device", "evicted_host")),
            *(f"{row['tile_bytes'][place] / 1e9:.1f} GB" for place in ("device", "host")),
            *(f"{t['median'] * 1e3:.2f} ({t['p99'] * 1e3:.2f})" for t in times),
        )
    return table


def speed_table(report: dict[str, Any]) -> Table:
    table = Table(title=f"{report['core']} core, medians of {report['samples']} calls, in microseconds")
    calls = ("match", "insert", "publish")
    for heading in ("nodes off / on", *(h for call in calls for h in (f"{call} off", "on", "ratio"))):
        table.add_column(heading, justify="right")
    for row in (*report["sizes"], report["branch"]):
        cells = [f"{row['nodes']['off']:,} / {row['nodes']['on']:,}"]
        for call in calls:
            times = row[call]
            cells += [f"{times[side] * 1e6:.1f}" for side in ("off", "on")] + [f"{times['ratio']:.3f}"]
        table.add_row(*cells)
    grown = [f"{report['growth'][call][side]:.2f}" for call in calls for side in ("off", "on")]
    table.caption = (
        f"growth from the first size to the last, off and on: {', '.join(grown)}. "
        "Last row: with a node more per path on the on tree, made by the tile of a branch point."
    )
    return table


def main() -> None:
    args = arguments()
    # Before anything imports SGLang.
    os.environ["SGLANG_PLATFORM"] = "cpu_ref"
    # SGLang's remarks on a server with these sizes, once per policy.
    logging.disable(logging.WARNING)
    if args.tree_speed:
        from tree_speed import measure

        report = measure(args.core)
        report["branch"] = measure(args.core, nodes=(1000,), branches=True)["sizes"][0]
        table = speed_table(report)
    else:
        report = replay_all(args)
        table = replay_table(report)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        if not args.tree_speed:
            from trace_plot import plot

            plot(report, args.out / "replay.png")
    if args.json:
        print(json.dumps(report))
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    main()
