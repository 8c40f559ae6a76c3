#!/usr/bin/env python3.11
"""Breaks the feature in listed ways, one at a time, and shows that the fast tests notice each.

    tools/mutants.py [--list] [--only NAME ...] [--jobs N] [--tests-pass] [--json FILE]    (see `make mutants`)

A mutant of tools/mutants.yaml changes one file of the patched SGLang. First every selection of
tests passes without a mutant: a test that fails anyway would catch everything. Then each mutant
gets a copy of the tree, of links except for the changed file, and its tests must fail there.

Exit code 0: every mutant is caught; 1: one is missed, or a test fails without a mutant.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from sglang_bitexact.edits import Anchor, Edit, Operation
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.plan import make_plan
from sglang_bitexact.rewrite import apply_edits
from sglang_bitexact.series import Series
from sglang_bitexact.upstream import Wheel, cache_directory, download, unpacked

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tools/mutants.yaml"
TESTS = ROOT / "test"
_LIMIT_S = 600  # The slowest selection takes a minute on an idle core.
# A mutant that ends in one of these does not misbehave: it is no Python that could have been written.
_MISTAKES = ("ImportError", "NameError", "NotImplementedError", "SyntaxError", "TypeError", "UnboundLocalError")
# One thread per test process: as many processes as cores run at once.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Change(BaseModel):
    """One structural edit of the patched file; at, do, text as in a ``*.edits.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: Anchor
    do: Operation = "replace"
    text: str


class Mutant(BaseModel):
    """One way to break the feature.

    file: sglang/..., which changes. change: what changes in it; or drop: the ``why`` of the
    series' edits that it loses. tests: node ids below test/, which must notice. may_hang: running
    out of time counts as noticed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern="^[a-z0-9-]+$")
    why: str = Field(min_length=10)
    file: str
    change: tuple[Change, ...] = ()
    drop: str | None = None
    tests: tuple[str, ...] = Field(min_length=1, max_length=2)
    may_hang: bool = False

    @model_validator(mode="after")
    def _changes_or_drops(self) -> Mutant:
        if bool(self.change) == bool(self.drop):
            raise ValueError(f"{self.name}: give either change or drop")
        return self


def load(path: Path = LIST) -> tuple[Mutant, ...]:
    """The mutants of a list, each under a name of its own; ValueError otherwise."""
    mutants = tuple(Mutant.model_validate(entry) for entry in yaml.safe_load(path.read_text())["mutants"])
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: {', '.join(twice)} there twice")
    return mutants


class Sources:
    """What the series makes of SGLang, and what a mutant makes of that."""

    def __init__(self, series: Series, wheel: Wheel) -> None:
        self._series, self._wheel = series, wheel

    @cached_property
    def patched(self) -> dict[str, bytes]:
        """The series' files by path: sglang/..."""
        names, last = self._wheel.names, self._series.last_part
        plan = make_plan(self._series, last, self._wheel.read, names.__contains__, self._wheel.version)
        return plan.edited | plan.added

    def mutated(self, mutant: Mutant) -> bytes:
        """The mutant's file; BitexactError if a place in it is not there once, or it is what it was."""
        if mutant.file not in self.patched:
            raise BitexactError(f"{mutant.name}: {mutant.file} is no file of the series")
        before = self.patched[mutant.file]
        if mutant.drop is None:
            text = before.decode()
            edits = [Edit(part=1, why=mutant.why, at=c.at, do=c.do, text=c.text) for c in mutant.change]
        else:
            (file,) = (file for file in self._series.edit_files if file.target == mutant.file)
            text = self._wheel.read(mutant.file).decode()
            edits = [edit for edit in file.edits if edit.why != mutant.drop]
        after = apply_edits(text, edits, f"{mutant.name}: {mutant.file}", self._wheel.version).encode()
        if after == before:
            raise BitexactError(f"{mutant.name} changes nothing in {mutant.file}")
        return after


def linked_copy(source: Path, target: Path) -> Path:
    """``target``, a copy of the tree ``source`` by hard links. Never write to a file of it: see put()."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def put(tree: Path, name: str, content: bytes) -> Path:
    """Give ``tree`` a file of its own, without touching what its name was linked to; the compiled one goes."""
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    compiled(path).unlink(missing_ok=True)
    return path


def compiled(path: Path) -> Path:
    """Where this Python keeps the module's compiled form: it is there once a process imported the file."""
    return Path(importlib.util.cache_from_source(str(path)))


class Outcome(NamedTuple):
    """One run of some tests. code: pytest's, None if it ran out of time. failed: which tests
    failed in their call, not in a fixture, and with what. skipped: how many did not run."""

    code: int | None
    failed: tuple[str, ...]
    skipped: int
    seconds: float
    output: str


def run_tests(tree: Path, tests: Sequence[str]) -> Outcome:
    """pytest up to the first failure, on the SGLang in ``tree``."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # "ci" tests as well: what is listed runs.
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "ci or not ci", f"--junitxml={report}"]
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(tree)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *(str(TESTS / test) for test in tests)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=_LIMIT_S)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            # The tests' own processes as well.
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            code = None
        cases = list(ET.parse(report).iter("testcase")) if report.is_file() else []
    failed = tuple(
        f"{case.get('name')}: {(failure.get('message') or '-').splitlines()[0]}"
        for case in cases
        for failure in case.iter("failure")
    )
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Outcome(code, failed, skipped, time.monotonic() - began, output)


class Verdict(NamedTuple):
    """What became of a mutant. by: the test that noticed; else, why it counts as missed."""

    name: str
    caught: bool
    by: str
    seconds: float
    output: str


def judge(mutant: Mutant, outcome: Outcome, imported: bool) -> Verdict:
    """Caught is what made a test fail in a process that imported the changed file, by what it does."""
    caught = False
    if not imported:
        by = f"no process imported {mutant.file}"
    elif outcome.code is None:
        caught, by = mutant.may_hang, f"out of time after {_LIMIT_S} s"
    elif outcome.code == 1 and outcome.failed:
        by = outcome.failed[0]
        caught = not any(f": {error}: " in by for error in _MISTAKES)
    else:
        by = "its tests pass" if outcome.code == 0 else f"no test failed, but pytest ended with {outcome.code}"
    return Verdict(mutant.name, caught, by, round(outcome.seconds, 1), outcome.output)


def try_mutant(mutant: Mutant, sources: Sources, base: Path) -> Verdict:
    """Run the mutant's tests on a copy of ``base`` with its file."""
    tree = linked_copy(base, base.parent / mutant.name)
    path = put(tree, mutant.file, sources.mutated(mutant))
    outcome = run_tests(tree, mutant.tests)
    verdict = judge(mutant, outcome, compiled(path).is_file())
    shutil.rmtree(tree)
    return verdict


def all_pass(base: Path, selections: Iterable[tuple[str, ...]], pool: ThreadPoolExecutor) -> bool:
    """Whether each selection of tests passes in full on the tree as it is; prints a line for each."""
    runs = {pool.submit(run_tests, base, tests): tests for tests in selections}
    good = True
    for run in as_completed(runs):
        outcome = run.result()
        passes = outcome.code == 0 and not outcome.skipped
        good = good and passes
        print(f"{'passes' if passes else 'FAILS '}  {' '.join(runs[run])}  {outcome.seconds:.0f} s", flush=True)
        if not passes:
            print(outcome.output, flush=True)
    return good


def check(mutants: Sequence[Mutant], jobs: int, *, tests_pass: bool = False) -> list[Verdict] | None:
    """A verdict per mutant; None if a test does not pass without one. Prints a line for each.

    tests_pass: the tests are known to pass; one selection of them shows that they do in the copy, too.
    """
    sources = Sources(Series.default(), download())
    verdicts = []
    # Beside the unpacked wheel: links do not leave a file system.
    with (
        tempfile.TemporaryDirectory(prefix="mutants-", dir=cache_directory()) as folder,
        ThreadPoolExecutor(jobs) as pool,
    ):
        base = linked_copy(unpacked(download()), Path(folder) / "tree")
        for file, content in sources.patched.items():
            put(base, file, content)
        selections = list(dict.fromkeys(mutant.tests for mutant in mutants))
        if not all_pass(base, selections[:1] if tests_pass else selections, pool):
            return None
        runs = {pool.submit(try_mutant, mutant, sources, base): mutant for mutant in mutants}
        for run in as_completed(runs):
            verdict = run.result()
            verdicts.append(verdict)
            state = "caught" if verdict.caught else "MISSED"
            print(f"{state}  {verdict.name} ({runs[run].why}): {verdict.by}, {verdict.seconds:.0f} s", flush=True)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tests at a time; default: one per core")
    parser.add_argument("--tests-pass", action="store_true", help="the suite has just passed: do not run it first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there")
    options = parser.parse_args()
    mutants = load()
    if unknown := set(options.only or ()) - {mutant.name for mutant in mutants}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}; --list prints them")
    mutants = tuple(mutant for mutant in mutants if options.only is None or mutant.name in options.only)
    if options.list:
        print(*(f"{mutant.name}: {mutant.why}" for mutant in mutants), sep="\n")
        return 0
    verdicts = check(mutants, options.jobs, tests_pass=options.tests_pass)
    if verdicts is None:
        print("tests fail without a mutant: nothing that they say of one counts")
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps([verdict._asdict() for verdict in verdicts], indent=2))
    missed = [verdict for verdict in verdicts if not verdict.caught]
    for verdict in missed:
        print(f"missed: {verdict.name}: {verdict.by}\n{verdict.output[-4000:]}")
    print(f"{len(verdicts) - len(missed)} caught, {len(missed)} missed")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
