"""Where the bars of a chart are. Lengths in SVG user units; the page draws them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WIDTH = 560
LEFT, FULL = 148, 300
_BAR, _STEP, _GAP = 14, 18, 12


class Value(NamedTuple):
    """amount: what the bar is as long as; text: what is written behind it."""

    amount: float
    text: str


class Bar(NamedTuple):
    """series: its colour and its name. middle: of the bar and its text, from the top."""

    series: str
    y: int
    width: float
    height: int
    middle: int
    text: str


class Group(NamedTuple):
    label: str
    middle: int
    bars: tuple[Bar, ...]


class Chart(NamedTuple):
    height: int
    groups: tuple[Group, ...]


def chart(values: Mapping[str, Mapping[str, Value]], most: float | None = None) -> Chart:
    """Horizontal bars, one group per label, one bar per series of it, from the top down.

    most: the amount of a full bar, by default the largest.

    Example: {"host": {"stock": Value(3, "3 of 3"), "on": Value(0, "0 of 3")}} -> one group, two bars:
    y 0, width 300; y 18, width 0. Its label's middle is 16, the height 44.
    """
    amounts = [value.amount for series in values.values() for value in series.values()]
    scale = FULL / (most or max(amounts, default=0) or 1)
    groups, top = [], 0
    for label, series in values.items():
        bars = tuple(_bar(name, top + i * _STEP, value, scale) for i, (name, value) in enumerate(series.items()))
        bottom = top + len(bars) * _STEP - (_STEP - _BAR)
        groups.append(Group(label, (top + bottom) // 2, bars))
        top = bottom + _GAP
    return Chart(top, tuple(groups))


def _bar(series: str, y: int, value: Value, scale: float) -> Bar:
    return Bar(series, y, round(value.amount * scale, 1), _BAR, y + _BAR // 2, value.text)
