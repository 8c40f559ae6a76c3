"""``demo`` and ``serve``: prepare the parts, run, report, stop everything."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_bitexact.demo.page import render
from sglang_bitexact.demo.scenario import SERVER_ARGUMENTS, measure
from sglang_bitexact.demo.server import Server
from sglang_bitexact.doctor.environment import of_shell
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.series import SWITCH, Series
from sglang_bitexact.upstream import PINNED_VERSION, Wheel, download, unpacked
from sglang_bitexact.verify.answer import TIERS
from sglang_bitexact.wheel import build

_console = Console(stderr=True, highlight=False)


MODES = ("stock", "off", "on")


def run_demo(series: Series, out: Path, modes: Sequence[str] = MODES) -> dict[str, Any]:
    """Build ``series`` and run ``modes`` below ``out``; writes and returns ``report.json``, and ``index.html``.

    stock: the released SGLang; off, on: the built one, without and with the switch.

    Raises:
        BitexactError: a server did not start or compared nothing in some tier. The report then
            holds the modes before it.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    stop_on_signals()
    checkpoint = make_checkpoint(out / "checkpoint")
    wheel = build(series, download(), series.last_part, out / "dist")
    _say(f"the series builds: {wheel.name}")
    _say(f"stock sglang {PINNED_VERSION}: unpacking the released wheel")
    content: dict[str, Any] = {"sglang": PINNED_VERSION, "modes": {}}
    for mode in modes:
        tree = unpacked(download()) if mode == "stock" else unpacked(Wheel(wheel))
        content["modes"][mode] = _run_mode(mode, tree, checkpoint, out)
        (out / "report.json").write_text(json.dumps(content, indent=2) + "\n")
        (out / "index.html").write_text(render(content))
    return content


def problems(content: dict[str, Any]) -> list[str]:
    """Why the demo did not show what it is for; empty if it did."""
    modes = content["modes"]
    found = [f"{m}: two cold runs differ" for m in modes if modes[m]["cold_against_cold"]["differing_outputs"]]
    if "stock" in modes and not modes["stock"]["differing_outputs"]:
        found.append("stock: no hit differs from its cold run, so a fault would not have shown")
    if "on" in modes and (differing := modes["on"]["differing_outputs"]):
        found.append(f"on: {differing} of {modes['on']['comparisons']} hits differ from their cold run")
    asked = modes["on"]["questions"] if "on" in modes else []
    if differing := sum(each["differs_at"] is not None for each in asked):
        found.append(f"on: {differing} of {len(asked)} answers about the text differ from their cold run")
    if "stock" in modes and "on" in modes:
        stock, on = (modes[mode]["chat"]["reported_cached_tokens"] for mode in ("stock", "on"))
        if on < stock:
            found.append(f"on: the chat reused {on} tokens, fewer than stock's {stock}")
    return found


def make_checkpoint(directory: Path) -> Path:
    """The tiny checkpoint in ``directory``, made if it is not there."""
    from sglang_cpu_ref.tiny_checkpoint import write_checkpoint

    if not (directory / "config.json").is_file():
        _say("tiny DeepSeek-V4 checkpoint: 4 layers, compress ratios 0, 4, 128, 4")
        write_checkpoint(directory)
    return directory


def _run_mode(name: str, tree: Path, checkpoint: Path, out: Path) -> dict[str, Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    storage = out / name / "l3"
    storage.mkdir(parents=True)
    arguments = (*SERVER_ARGUMENTS, "--file-storage-path", str(storage.resolve()))
    environment = {SWITCH: str(int(name == "on"))}
    server = Server(checkpoint, arguments, out / name / "server.log", tree=tree, environment=environment)
    try:
        _say(f"{name}: starting the server (log: {out / name / 'server.log'})")
        seconds = server.start()
        _say(f"{name}: up after {seconds:.0f} s")
        report = measure(server, storage, lambda text: _say(f"{name}: {text}"), tokenizer)
    finally:
        server.stop()
    if report.missing_tiers:
        raise BitexactError(
            f"mode {name} had no hit in: {', '.join(report.missing_tiers)}. Nothing was compared there; "
            f"see {out / name / 'server.log'}."
        )
    return {**report.as_json(), "questions": [each.as_json(lambda t: tokenizer.decode([t])) for each in report.asked]}


def serve(out: Path, port: int, arguments: list[str], *, as_json: bool = False) -> int:
    """Serve the tiny checkpoint until interrupted; prints a curl line, or the address as JSON."""
    stop_on_signals()
    checkpoint = make_checkpoint(out / "checkpoint")
    log = out / "server.log"
    server = Server(checkpoint, arguments, log, port=port)
    try:
        _say(f"starting the server (log: {log})")
        seconds = server.start()
        _say(f"up after {seconds:.0f} s; Ctrl-C stops it")
        if as_json:
            print(json.dumps({"url": server.url, "log": str(log)}), flush=True)
        else:
            _say(f"{SWITCH} is {'on' if of_shell().switch else 'off'}; asked again, this prompt hits the cache:")
            print(curl_line(server.url), flush=True)
        server.wait()
    except KeyboardInterrupt:
        _say("stopping")
    finally:
        server.stop()
    return 0


def curl_line(url: str) -> str:
    """A chat of more than two pages of tokens, whose answer says what was reused; for any shell."""
    body = {
        "model": "tiny",
        "max_tokens": 32,
        # Else the second answer differs for want of a seed.
        "temperature": 0,
        "return_cached_tokens_details": True,
        "messages": [{"role": "user", "content": "TEXT"}],
    }
    text = """'"$(printf 'the cache keeps %.0s' $(seq 150))"'"""
    data = json.dumps(body).replace("TEXT", text)
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{data}'"


def print_report(content: dict[str, Any], out: Path) -> None:
    """The report for people."""
    console = Console(highlight=False)
    title = f"sglang {content['sglang']}: a cached prompt against its cold run"
    table = Table("server", "hit in", "differ", "logprob by", "reused tokens", title=title)
    for name, mode in content["modes"].items():
        table.add_section()
        for label, path in _ROWS.items():
            table.add_row(name, label, *_cells(mode[path] if path in mode else mode["tiers"][path]))
            name = ""
    console.print(table)
    console.print(
        "Greedy decoding, same prompt, same kernels; reused: of what whole pages of the cached tokens could give. "
        "Cold runs agree to the last bit. A stock hit continues from a window and overlap states that belong to "
        "other requests."
    )
    console.print(f"Details: {out / 'report.json'}", soft_wrap=True)
    console.print(f"To look at: {(out / 'index.html').resolve().as_uri()}", soft_wrap=True)


_ROWS = {
    "none (cold, again)": "cold_against_cold",
    **{tier: tier for tier in TIERS},
    "a chat's later turns": "chat",
}


def _cells(numbers: dict[str, Any]) -> list[str]:
    differing = numbers["differing_outputs"]
    reuse = "-"
    if "nominal_cached_tokens" in numbers:
        reuse = f"{numbers['reported_cached_tokens']} of {numbers['nominal_cached_tokens']}"
    shown = f"[{'red' if differing else 'green'}]{differing} of {numbers['comparisons']}[/]"
    return [shown, f"{numbers['max_abs_logprob_diff']:.3g}", reuse]


def _say(text: str) -> None:
    _console.print(f"[dim]>[/] {text}", soft_wrap=True)


def stop_on_signals() -> None:
    """Turn SIGTERM into an exception, so that servers are stopped on the way out."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
