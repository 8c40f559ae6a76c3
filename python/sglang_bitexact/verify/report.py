"""The result of ``verify`` for people."""

from __future__ import annotations

from dataclasses import astuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from sglang_bitexact.verify.record import Record
from sglang_bitexact.verify.tally import SHOWN, Summary, Tally

COLUMNS = ("compared", "differing", "logprob by", "reused / nominal", "no hit")


def cells(tally: Tally, *, cold: bool = False) -> tuple[str, ...]:
    """One row's cells under ``COLUMNS``; red where something differs."""
    comparisons, differing, largest, nominal, reported, no_hit = astuple(tally)
    colour = "red" if differing else "green"
    reuse = ("", "") if cold else (f"{reported} / {nominal}", str(no_hit))
    return (str(comparisons), f"[{colour}]{differing}[/]", f"{largest:.3g}", *reuse)


def print_summary(console: Console, summary: Summary, title: str) -> None:
    """A row per tier and kind of prompt, then up to ten differences, each with arguments that repeat it."""
    table = Table("hit in", "prompts", *COLUMNS, title=title)
    table.add_row("none", "cold, again", *cells(summary.cold, cold=True))
    for (tier, kind), tally in sorted(summary.rows.items()):
        table.add_row(tier, kind, *cells(tally))
    console.print(table)
    for record in summary.differing[:SHOWN]:
        console.print(describe(record), soft_wrap=True)
    if len(summary.differing) > SHOWN:
        console.print(f"... and {len(summary.differing) - SHOWN} more")


def describe(record: Record) -> str:
    """One difference on a line."""
    assert record.difference is not None
    where = f"{record.tier} hit" if record.tier else "no hit"
    return (
        f"{where}, {record.kind}, seed {record.seed}, {record.length} tokens, {record.held} cached before, "
        f"{record.cached_tokens} reused: differs from token {record.difference.position} on, logprob by "
        f"{record.difference.logprob:.3g}; again with {record.repeat}"
    )


class ProgressBar:
    """A bar on stderr, where that is no terminal a line per step; use as a context manager."""

    def __init__(self, comparisons: int, prefix: str = "verify") -> None:
        columns = (
            TextColumn(prefix),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        console = Console(stderr=True, highlight=False)
        # Elsewhere rich would show nothing until the end.
        self._lines = None if console.is_terminal else console
        self._prefix = prefix
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=comparisons)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def step(self, text: str) -> None:
        self._bar.update(self._task, description=text)
        if self._lines is not None:
            (task,) = self._bar.tasks
            done = f"{task.completed:.0f}/{task.total:.0f}"
            self._lines.print(f"{self._prefix} {done}: {text}", soft_wrap=True, markup=False)

    def advance(self, comparisons: int) -> None:
        self._bar.advance(self._task, comparisons)


class NoProgress:
    """Tells nobody."""

    def step(self, text: str) -> None:
        pass

    def advance(self, comparisons: int) -> None:
        pass
