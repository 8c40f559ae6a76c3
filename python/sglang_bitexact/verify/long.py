"""The whole matrix on this machine:  python -m sglang_bitexact.verify.long --out build/verify-long

Hours. Can be interrupted: finished comparisons are in the folder and are not done again.
Exit code 0: no difference with the switch on, and some on stock; 1 otherwise; 2 not carried out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_bitexact.demo.run import make_checkpoint, stop_on_signals
from sglang_bitexact.demo.server import stop_all
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.series import Series
from sglang_bitexact.upstream import PINNED_VERSION, Wheel, download, unpacked
from sglang_bitexact.verify.answer import Answer
from sglang_bitexact.verify.local import NEW_TOKENS, run_configuration, summary_json
from sglang_bitexact.verify.matrix import Configuration, long_configurations, long_plans
from sglang_bitexact.verify.record import Log
from sglang_bitexact.verify.report import COLUMNS, ProgressBar, cells, describe
from sglang_bitexact.verify.tally import Summary, summarize
from sglang_bitexact.wheel import build

_LEAST = 5000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/verify-long"))
    parser.add_argument("--jobs", type=int, default=2, help="servers at a time (default: 2)")
    parser.add_argument("--only", help="names of configurations, separated by commas")
    parser.add_argument("--report", action="store_true", help="run nothing, report what is in the folder")
    parser.add_argument("--list", action="store_true", help="print the configurations and end")
    args = parser.parse_args(arguments)
    chosen = [c for c in long_configurations() if args.only is None or c.name in args.only.split(",")]
    if args.list:
        for configuration in chosen:
            print(configuration)
        return 0
    stop_on_signals()
    try:
        if args.report:
            return _report(args.out, chosen, whole=args.only is None)
        return _run(args.out, chosen, whole=args.only is None, jobs=args.jobs)
    except (BitexactError, OSError) as error:
        print(f"verify-long: {error}", file=sys.stderr)
        return 2


def _run(out: Path, chosen: Sequence[Configuration], whole: bool, jobs: int) -> int:
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(out / "checkpoint")
    trees = built_trees(out / "dist")
    cold: dict[str, Answer] = {}
    summaries: dict[str, Summary] = {}

    def run(number: int, configuration: Configuration, bar: ProgressBar) -> None:
        folder = out / configuration.name
        # A file of an earlier, interrupted run would be a hit in storage that nobody primed.
        shutil.rmtree(folder / "l3", ignore_errors=True)
        summaries[configuration.name] = run_configuration(
            configuration,
            long_plans(configuration, number),
            tree=trees[configuration.mode],
            checkpoint=checkpoint,
            folder=folder,
            cold=cold,
            log=_log(out, configuration),
            progress=bar,
        )
        _write(out, chosen, summaries)

    total = sum(plan.comparisons(256) for n, c in enumerate(chosen) for plan in long_plans(c, n))
    with ProgressBar(total, prefix=f"{len(chosen)} servers") as bar, ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run, number, configuration, bar) for number, configuration in enumerate(chosen)]
        try:
            for future in as_completed(running):
                future.result()
        except BaseException:
            # What waits must not begin, and what runs ends with its server.
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise
    return _verdict(chosen, summaries, whole)


def _report(out: Path, chosen: Sequence[Configuration], whole: bool) -> int:
    """What finished runs of ``chosen`` left in ``out``."""
    summaries = {c.name: summarize(_log(out, c).records) for c in chosen}
    _write(out, chosen, summaries)
    return _verdict(chosen, summaries, whole)


def _log(out: Path, configuration: Configuration) -> Log:
    return Log(
        out / configuration.name / "state.jsonl", {"configuration": repr(configuration), "new_tokens": NEW_TOKENS}
    )


def built_trees(folder: Path) -> dict[str, Path]:
    """Per mode the directory of its ``sglang``: stock's, and one with the series for off and on."""
    series = Series.default()
    patched = unpacked(Wheel(build(series, download(), series.last_part, folder)))
    return {"stock": unpacked(download()), "off": patched, "on": patched}


def _write(out: Path, chosen: Sequence[Configuration], summaries: dict[str, Summary]) -> None:
    content = {
        "sglang": PINNED_VERSION,
        "configurations": [summary_json(c, summaries[c.name]) for c in chosen if c.name in summaries],
    }
    (out / "report.json").write_text(json.dumps(content, indent=2) + "\n")


def _verdict(chosen: Sequence[Configuration], summaries: dict[str, Summary], whole: bool) -> int:
    console = Console(highlight=False)
    table = Table("server", "hit in", *COLUMNS, title="a cached prompt against its cold run")
    wrong: list[str] = []
    comparisons = 0
    for configuration in chosen:
        summary = summaries[configuration.name]
        table.add_row(configuration.name, "none", *cells(summary.cold, cold=True))
        for tier in sorted({tier for tier, _ in summary.rows}):
            table.add_row("", tier, *cells(summary.of(tier=tier)))
        comparisons += summary.of().comparisons
        if configuration.mode == "on" and summary.differing:
            wrong += [f"{configuration.name}: {describe(record)}" for record in summary.differing[:3]]
        if configuration.mode != "on" and not summary.of().differing_outputs:
            wrong.append(f"{configuration.name}: no difference, so this run would not have found one")
        wrong += [f"{configuration.name}: no hit in {tier}" for tier in summary.missing(configuration.tiers)]
    if whole and comparisons < _LEAST:
        wrong.append(f"{comparisons} comparisons, expected at least {_LEAST}")
    console.print(table)
    console.print(f"{comparisons} comparisons on {len(chosen)} servers")
    for line in wrong:
        console.print(line, soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
