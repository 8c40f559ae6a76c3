"""Few combinations of settings in which every two values of two settings meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

_Pair = tuple[tuple[str, Any], tuple[str, Any]]


def all_pairs(
    factors: Mapping[str, Sequence[Any]], possible: Callable[[Mapping[str, Any]], bool] = lambda row: True
) -> list[dict[str, Any]]:
    """Rows with one value per factor, greedily: the first rows cover the most pairs.

    possible: told a row, perhaps of some factors only, says whether it may be used; it must not
    forbid a pair, nor every value of a factor.

    The same rows every time. Example: {"a": (0, 1), "b": (0, 1), "c": (0, 1)} -> 4 of the 8
    combinations, in which each of the 12 pairs occurs.
    """
    names = list(factors)
    open_pairs = {((a, x), (b, y)): None for a, b in combinations(names, 2) for x, y in product(factors[a], factors[b])}
    rows = []
    while open_pairs:
        # Begun with each of the first open pairs; the row that closes the most stays.
        starts = list(open_pairs)[:20]
        row = max(
            (_fill(dict(start), factors, open_pairs, possible) for start in starts),
            key=lambda r: _closed(r, names, open_pairs),
        )
        for pair in pairs_of(row, names):
            open_pairs.pop(pair, None)
        rows.append({name: row[name] for name in names})
    return rows


def pairs_of(row: Mapping[str, Any], names: Sequence[str]) -> list[_Pair]:
    """Every two settings of a row, in the order of ``names``."""
    return [((a, row[a]), (b, row[b])) for a, b in combinations([n for n in names if n in row], 2)]


def _fill(
    row: dict[str, Any],
    factors: Mapping[str, Sequence[Any]],
    open_pairs: Mapping[_Pair, None],
    possible: Callable[[Mapping[str, Any]], bool],
) -> dict[str, Any]:
    names = list(factors)
    # Factors with many values have the most pairs to close.
    for name in sorted(factors, key=lambda n: -len(factors[n])):
        if name not in row:
            options = [{**row, name: value} for value in factors[name]]
            row = max(filter(possible, options), key=lambda r: _closed(r, names, open_pairs))
    return row


def _closed(row: Mapping[str, Any], names: Sequence[str], open_pairs: Mapping[_Pair, None]) -> int:
    return sum(pair in open_pairs for pair in pairs_of(row, names))
