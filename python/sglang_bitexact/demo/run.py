"""``demo`` and ``serve``: prepare the parts, run, report, stop everything."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_bitexact.demo.compare import TIERS, ModeReport
from sglang_bitexact.demo.scenario import SERVER_ARGUMENTS, measure
from sglang_bitexact.demo.server import Server
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.series import Series
from sglang_bitexact.upstream import PINNED_VERSION, download, unpacked
from sglang_bitexact.wheel import build

_console = Console(stderr=True, highlight=False)


def run_demo(series: Series, out: Path) -> dict[str, Any]:
    """Build ``series`` and run all modes below ``out``; writes and returns ``report.json``."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    _stop_on_signals()
    checkpoint = make_checkpoint(out / "checkpoint")
    wheel = build(series, download(), series.last_part, out / "dist")
    _say(f"the series builds: {wheel.name}")
    _say(f"stock sglang {PINNED_VERSION}: unpacking the released wheel")
    stock = unpacked(download())
    modes = {"stock": _run_mode("stock", stock, checkpoint, out)}
    content = {"sglang": PINNED_VERSION, "modes": {name: mode.as_json() for name, mode in modes.items()}}
    (out / "report.json").write_text(json.dumps(content, indent=2) + "\n")
    return content


def make_checkpoint(directory: Path) -> Path:
    """The tiny checkpoint in ``directory``, made if it is not there."""
    from sglang_cpu_ref.tiny_checkpoint import write_checkpoint

    if not (directory / "config.json").is_file():
        _say("tiny DeepSeek-V4 checkpoint: 4 layers, compress ratios 0, 4, 128, 4")
        write_checkpoint(directory)
    return directory


def _run_mode(name: str, tree: Path, checkpoint: Path, out: Path) -> ModeReport:
    storage = out / name / "l3"
    storage.mkdir(parents=True)
    arguments = (*SERVER_ARGUMENTS, "--file-storage-path", str(storage.resolve()))
    server = Server(checkpoint, arguments, out / name / "server.log", tree=tree)
    try:
        _say(f"{name}: starting the server (log: {out / name / 'server.log'})")
        seconds = server.start()
        _say(f"{name}: up after {seconds:.0f} s")
        report = measure(server, storage, lambda text: _say(f"{name}: {text}"))
    finally:
        server.stop()
    if report.missing_tiers:
        raise BitexactError(
            f"mode {name} had no hit in: {', '.join(report.missing_tiers)}. Nothing was compared there; "
            f"see {out / name / 'server.log'}."
        )
    return report


def serve(out: Path, port: int, arguments: list[str], *, as_json: bool = False) -> int:
    """Serve the tiny checkpoint until interrupted; prints a curl line, or the address as JSON."""
    _stop_on_signals()
    checkpoint = make_checkpoint(out / "checkpoint")
    log = out / "server.log"
    server = Server(checkpoint, arguments, log, port=port)
    try:
        _say(f"starting the server (log: {log})")
        seconds = server.start()
        _say(f"up after {seconds:.0f} s; Ctrl-C stops it{'' if as_json else '. Try:'}")
        curl = (
            f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d "
            '\'{"model": "tiny", "max_tokens": 32, "messages": [{"role": "user", "content": "the cache keeps"}]}\''
        )
        print(json.dumps({"url": server.url, "log": str(log)}) if as_json else curl, flush=True)
        server.wait()
    except KeyboardInterrupt:
        _say("stopping")
    finally:
        server.stop()
    return 0


def print_report(content: dict[str, Any], out: Path) -> None:
    """The report for people."""
    console = Console(highlight=False)
    table = Table(
        *("mode", "hit in", "comparisons", "other answer", "largest logprob difference", "reused / held tokens"),
        title=f"sglang {content['sglang']}: a repeated prompt against its cold run",
    )
    for name, mode in content["modes"].items():
        cold = mode["cold_against_cold"]
        rows = [("none (cold against cold)", cold, "-")]
        for tier in TIERS:
            tally = mode["tiers"][tier]
            rows.append((tier, tally, f"{tally['reported_cached_tokens']} / {tally['nominal_cached_tokens']}"))
        for label, tally, reuse in rows:
            differing = tally["differing_outputs"]
            colour = "red" if differing else "green"
            numbers = (str(tally["comparisons"]), f"[{colour}]{differing}[/]", f"{tally['max_abs_logprob_diff']:.3g}")
            table.add_row(name, label, *numbers, reuse)
    console.print(table)
    console.print(
        "Greedy decoding, same prompt, same kernels. Cold runs agree to the last bit; a stock cache hit "
        "continues from a window and overlap states that belong to other requests."
    )
    console.print(f"Details: {out / 'report.json'}")


def _say(text: str) -> None:
    _console.print(f"[dim]>[/] {text}")


def _stop_on_signals() -> None:
    """Turn SIGTERM into an exception, so that servers are stopped on the way out."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
