"""``index.html``: the report for eyes. One file, no network: style and charts are in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sglang_bitexact.demo.bars import FULL, LEFT, WIDTH, Chart, Value, chart
from sglang_bitexact.demo.questions import HANDBOOK
from sglang_bitexact.verify.answer import TIERS

MEANING = {
    "stock": "the released SGLang",
    "off": "the same with the series, switch off",
    "on": "with the series, switch on",
}
_CHAT = "a chat's later turns"


class Token(NamedTuple):
    """state: "same" as in the cold run, "fork" (the first that is not), "behind" it."""

    id: int
    text: str
    state: str


class Line(NamedTuple):
    """One answer. differs_at, forks_at: tokens count from 1; None where nothing differs."""

    server: str
    tier: str
    tokens: tuple[Token, ...]
    differs_at: int | None
    forks_at: int | None
    cached_tokens: int


class Question(NamedTuple):
    text: str
    prompt_tokens: int
    nominal_tokens: int
    cold: tuple[Token, ...]
    lines: tuple[Line, ...]


def render(content: dict[str, Any]) -> str:
    """The page of a ``report.json``; every figure in it is the report's, or a share of it."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    modes = content["modes"]
    return environment.get_template("page.html.j2").render(
        sglang=content["sglang"],
        modes=modes,
        meaning=MEANING,
        questions=questions(modes),
        handbook=HANDBOOK,
        charts={
            "differ": _chart(modes, _differing),
            "reuse": _chart(modes, _reused),
            "first_token": chart(first_tokens(modes)),
        },
        tiers={**{tier: tier for tier in TIERS}, "chat": _CHAT},
        width=WIDTH,
        left=LEFT,
        full=FULL,
    )


def _chart(modes: dict[str, Any], value: Callable[[dict[str, Any]], Value]) -> Chart:
    """A group per tier and one for the chat, each with a bar per server; a full bar is the whole."""
    rows = {tier: {name: value(mode["tiers"][tier]) for name, mode in modes.items()} for tier in TIERS}
    rows[_CHAT] = {name: value(mode["chat"]) for name, mode in modes.items()}
    return chart(rows, most=1.0)


def _differing(numbers: dict[str, Any]) -> Value:
    return _of(numbers["differing_outputs"], numbers["comparisons"])


def _reused(numbers: dict[str, Any]) -> Value:
    return _of(numbers["reported_cached_tokens"], numbers["nominal_cached_tokens"])


def _of(part: int, whole: int) -> Value:
    return Value(part / whole if whole else 0.0, f"{part} of {whole}")


def first_tokens(modes: dict[str, Any]) -> dict[str, dict[str, Value]]:
    """The fastest of the questions, cold and in each tier: the one that the rest of the machine disturbed least."""
    rows: dict[str, dict[str, Value]] = {"cold": {}, **{tier: {} for tier in TIERS}}
    for name, mode in modes.items():
        asked = mode["questions"]
        for tier in TIERS:
            if seconds := [each["first_token_s"] for each in asked if each["tier"] == tier]:
                rows[tier][name] = _seconds(seconds)
        # Each question ran cold once, and is in the report with every tier.
        if cold := {each["question"]: each["cold_first_token_s"] for each in asked}:
            rows["cold"][name] = _seconds(cold.values())
    return {label: row for label, row in rows.items() if row}


def _seconds(values: Iterable[float]) -> Value:
    fastest = min(values)
    return Value(fastest, f"{fastest:.2f} s")


def questions(modes: dict[str, Any]) -> list[Question]:
    """Per question the cold answer, and those of every server and tier; the one that forks first, first."""
    asked = [(each["question"], name, each) for name, mode in modes.items() for each in mode["questions"]]
    asked.sort(key=lambda found: found[0])
    found = []
    for text, members in groupby(asked, key=lambda each: each[0]):
        group = list(members)
        one = group[0][2]
        cold = tuple(Token(number, shown, "same") for number, shown in one["cold_tokens"])
        lines = tuple(_line(name, each) for _, name, each in group)
        found.append(Question(text, one["prompt_tokens"], one["nominal_tokens"], cold, lines))
    return sorted(found, key=lambda question: min((line.forks_at or 999 for line in question.lines), default=999))


def _line(server: str, asked: dict[str, Any]) -> Line:
    pairs = list(zip(asked["cold_tokens"], asked["tokens"], strict=True))
    fork = next((i for i, (cold, warm) in enumerate(pairs) if cold[0] != warm[0]), None)
    tokens = tuple(Token(warm[0], warm[1], _state(i, fork)) for i, (_, warm) in enumerate(pairs))
    first = asked["differs_at"]
    return Line(
        server,
        asked["tier"],
        tokens,
        None if first is None else first + 1,
        None if fork is None else fork + 1,
        asked["cached_tokens"],
    )


def _state(position: int, fork: int | None) -> str:
    if fork is None or position < fork:
        return "same"
    return "fork" if position == fork else "behind"
