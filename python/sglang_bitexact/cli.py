"""The console script ``sglang-bitexact``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_bitexact import __version__, patching
from sglang_bitexact.check import Finding, check
from sglang_bitexact.compatibility import markdown
from sglang_bitexact.doctor import command as doctor
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.export import Source, export, identity
from sglang_bitexact.series import Series
from sglang_bitexact.tree import Tree
from sglang_bitexact.upstream import PINNED_VERSION, download
from sglang_bitexact.verify import command as verify
from sglang_bitexact.wheel import build

# 0: done. 1: the answer is no (an edit does not anchor, the tree is not in order).
# 2: the command could not be carried out.
_OK, _NO, _ERROR = 0, 1, 2
_console = Console(highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except BrokenPipeError:
        # The reader went away (`... | head`); there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _OK
    except (BitexactError, OSError, ImportError) as error:
        # requests' exceptions are OSErrors.
        if args.json:
            print(json.dumps({"error": str(error)}))
        else:
            print(f"sglang-bitexact: {error}", file=sys.stderr)
        return _ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-bitexact",
        description="Bit-exact prefix reuse for DeepSeek-V4 on unified_kv, as a patch series to sglang "
        f"{PINNED_VERSION}. Exit codes: 0 done, 1 the answer is no, 2 the command could not be carried out.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        return sub

    def series(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--series", type=Path, help="directory of the series (default: this installation's)")

    def through(sub: argparse.ArgumentParser) -> None:
        series(sub)
        sub.add_argument("--through", type=int, metavar="PART", help="parts 1 to PART only (default: all)")

    def tree(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--tree", type=Path, help="an unpacked SGLang or a checkout (default: the installed one)")

    sub = command("build", _build, "Build a patched wheel from the released one.")
    through(sub)
    sub.add_argument("--out", type=Path, default=Path("dist"), help="directory of the wheel (default: dist)")
    sub = command("apply", _apply, "Patch an installed or unpacked SGLang, all or nothing.")
    through(sub)
    tree(sub)
    sub.add_argument(
        "--keep-local",
        action="store_true",
        help="also where edited files carry local changes, if every edit still has its one place; revert keeps them",
    )
    sub.add_argument("--link", action="store_true", help="link new files to the series instead of copying them")
    sub = command("revert", _revert, "Undo apply, byte for byte; also after a kill.")
    tree(sub)
    sub.add_argument("--force", action="store_true", help="discard changes made to the patched files since")
    sub = command("status", _status, "Say whether the series is applied, and whether its files are intact.")
    tree(sub)
    sub = command("export", _export, "Write the series as mail patches, one per part, for `git am`.")
    series(sub)
    sub.add_argument("--out", type=Path, required=True, help="directory of the patches")
    sub.add_argument("--checkout", type=Path, help="make them against this checkout (default: the released files)")
    sub.add_argument("--keep-local", action="store_true", help="as for apply: the checkout may carry local changes")
    sub = command("check", _check, "Say whether every edit still anchors in an SGLang release.")
    series(sub)
    sub.add_argument(
        "--sglang", action="append", metavar="VERSION", help=f"may be given several times (default: {PINNED_VERSION})"
    )
    sub.add_argument("--markdown", action="store_true", help="print tables for a page of documentation")
    sub = command("demo", _demo, "Run the real server on a CPU and compare cache hits with cold runs.")
    series(sub)
    sub.add_argument("--out", type=Path, default=Path("build/demo"), help="emptied first (default: build/demo)")
    sub.add_argument(
        "--modes", nargs="+", choices=("stock", "off", "on"), default=("stock", "off", "on"), help="default: all three"
    )
    sub = command("verify", verify.run, verify.DESCRIPTION)
    verify.add_arguments(sub)
    sub = command("doctor", doctor.run, doctor.DESCRIPTION)
    doctor.add_arguments(sub)
    sub = command("serve", _serve, "Serve the tiny checkpoint on a CPU until interrupted.")
    sub.add_argument("--out", type=Path, default=Path("build/serve"), help="checkpoint and log (default: build/serve)")
    sub.add_argument("--port", type=int, default=30000)
    sub.add_argument("arguments", nargs="*", help="further server arguments, after --")
    return parser


def _series(args: argparse.Namespace) -> Series:
    return Series(args.series) if args.series else Series.default()


def _build(args: argparse.Namespace) -> int:
    series = _series(args)
    path = build(series, download(), series.check_part(args.through), args.out)
    _report(args, {"wheel": str(path)}, str(path))
    return _OK


def _apply(args: argparse.Namespace) -> int:
    series = _series(args)
    part = series.check_part(args.through)
    done = patching.apply(Tree.locate(args.tree), series, part, link=args.link, keep_local=args.keep_local)
    return _report_status(args, done, _OK)


def _revert(args: argparse.Namespace) -> int:
    return _report_status(args, patching.revert(Tree.locate(args.tree), force=args.force), _OK)


def _status(args: argparse.Namespace) -> int:
    found = patching.status(Tree.locate(args.tree))
    return _report_status(args, found, _OK if found.condition == "applied" else _NO)


def _report_status(args: argparse.Namespace, found: patching.Status, code: int) -> int:
    lines = [found.condition if found.through is None else f"{found.condition}: parts 1 to {found.through}"]
    lines += [f"  {'changed ' if name in found.changed else ''}{name}" for name in found.files]
    _report(args, found._asdict(), "\n".join(lines))
    return code


def _export(args: argparse.Namespace) -> int:
    source, author = Source.of(args.checkout), identity(args.checkout)
    patches = export(_series(args), source, args.out, author=author, keep_local=args.keep_local)
    _report(args, {"patches": [str(path) for path in patches]}, "\n".join(map(str, patches)))
    return _OK


def _check(args: argparse.Namespace) -> int:
    series = _series(args)
    releases = {version: check(series, download(version)) for version in args.sglang or [PINNED_VERSION]}
    good = {version: all(found.state == "anchors" for found in findings) for version, findings in releases.items()}
    if args.json:
        content = [
            {"sglang": version, "ok": good[version], "edits": [found._asdict() for found in findings]}
            for version, findings in releases.items()
        ]
        print(json.dumps({"ok": all(good.values()), "releases": content}))
    elif args.markdown:
        print(markdown(releases))
    else:
        for version, findings in releases.items():
            _console.print(_table(version, findings))
    return _OK if all(good.values()) else _NO


def _table(version: str, findings: list[Finding]) -> Table:
    table = Table("part", "file", "anchor", "state", "line", title=f"edits against sglang {version}")
    for found in findings:
        colour = {"anchors": "green", "gone": "red"}.get(found.state, "yellow")
        line = found.where.removeprefix(f"{found.target}:") or "-"
        table.add_row(str(found.part), found.target, found.anchor, f"[{colour}]{found.state}[/]", line)
    return table


def _demo(args: argparse.Namespace) -> int:
    from sglang_bitexact.demo.run import print_report, problems, run_demo

    with _cpu_environment():
        content = run_demo(_series(args), args.out, args.modes)
    found = problems(content)
    if args.json:
        print(json.dumps({**content, "problems": found}))
    else:
        print_report(content, args.out)
        for problem in found:
            print(problem)
    return _NO if found else _OK


def _serve(args: argparse.Namespace) -> int:
    from sglang_bitexact.demo.run import serve

    with _cpu_environment():
        return serve(args.out, args.port, args.arguments, as_json=args.json)


@contextmanager
def _cpu_environment() -> Iterator[None]:
    """Says where a module that is missing would be."""
    try:
        yield
    except ImportError as error:
        raise BitexactError(
            f"{error}. `demo` and `serve` need torch and what SGLang imports: in a checkout of this project, "
            "`make demo` and `make serve` build that environment."
        ) from error


def _report(args: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    print(json.dumps(data) if args.json else text)


if __name__ == "__main__":
    sys.exit(main())
