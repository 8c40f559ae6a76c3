"""The command ``doctor``: arguments, run, exit code."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from sglang_bitexact.doctor import environment, launch, prune, report, server, storage, tree, verdict
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.series import Series
from sglang_bitexact.tree import Tree

DESCRIPTION = (
    "Say whether an SGLang on this machine, a running server and a storage directory are as they should be, and what "
    "is wrong. Exit codes: 0 healthy, 1 something is wrong, 2 it could not be looked at."
)
_HEALTHY, _WRONG = 0, 1


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--tree", type=Path, help="an unpacked SGLang or a checkout (default: the installed one)")
    sub.add_argument("--series", type=Path, help="directory of the series (default: this installation's)")
    sub.add_argument("--url", help="of a running server: its arguments, the guards, its tiles")
    sub.add_argument("--api-key", help="the server's, if it has one")
    sub.add_argument("--storage", type=Path, metavar="DIR", help="directory of the file backend: what is in it")
    sub.add_argument("--prune", action="store_true", help="list what no hit can use in the storage directory")
    sub.add_argument("--yes", action="store_true", help="and delete it")
    sub.add_argument(
        "--identity", action="append", default=[], metavar="ID", help="with --prune: everything under it as well"
    )


def run(args: argparse.Namespace) -> int:
    """Raises BitexactError if something that was asked for could not be looked at."""
    if args.prune and args.storage is None:
        raise BitexactError("--prune needs --storage DIR")
    if not args.prune and (args.yes or args.identity):
        raise BitexactError("--yes and --identity belong to --prune")
    series = Series(args.series) if args.series else Series.default()
    found = _look(args, series)
    wrong = verdict.problems(found, series.last_part)
    line = verdict.verdict(found, wrong)
    code = _WRONG if wrong else _HEALTHY
    if args.json:
        print(json.dumps(report.as_json(found, wrong, line, code)))
    else:
        print(report.as_text(found, wrong, line))
    return code


def _look(args: argparse.Namespace, series: Series) -> verdict.Findings:
    where = _tree(args)
    running = server.fetch(args.url, args.api_key) if args.url else None
    variables = running.environment if running else environment.of_shell()
    found = verdict.Findings(
        tree=tree.diagnose(where, series) if where else None,
        environment=variables,
        platform=environment.platform(where.root if where else None, variables),
        server=running,
        launch=None,
        storage=None,
    )
    # Importing SGLang takes a while: not for a switch that is off.
    if where is not None and (running is not None or variables.switch):
        found = found._replace(launch=launch.examine(where.root, series.root, variables, running))
    return _with_storage(found, args) if args.storage is not None else found


def _tree(args: argparse.Namespace) -> Tree | None:
    """None where there is none, and something else to look at."""
    try:
        return Tree.find(args.tree)
    except BitexactError:
        if args.tree is None and (args.url or args.storage):
            return None
        raise


def _with_storage(found: verdict.Findings, args: argparse.Namespace) -> verdict.Findings:
    """With --yes the health is that after deleting."""
    stored = storage.scan(args.storage)
    health = storage.examine(stored, time.time())
    if not args.prune:
        return found._replace(storage=health)
    files = prune.doomed(stored, health, args.identity)
    if args.yes:
        prune.delete(args.storage, files)
        health = storage.examine(storage.scan(args.storage), time.time())
    return found._replace(storage=health, doomed=files, deleted=args.yes)
