"""What ``check`` found in several releases, as a Markdown table for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from sglang_bitexact.check import Finding

Releases = Mapping[str, Sequence[Finding]]


def markdown(releases: Releases) -> str:
    """Two tables: how many edits anchor, per release and part; and each one that does not.

    Example: part 1 has two edits, in 0.5.22 one of them is gone ->

        | sglang | edits that anchor | part 1 |
        |---|---|---|
        | 0.5.22 | 1 of 2 | 1 of 2 |

        | sglang | part | file | anchor | state | looks like it |
        |---|---|---|---|---|---|
        | 0.5.22 | 1 | `sglang/srt/cache.py` | `class 'Cache'` | gone | - |
    """
    tables = [_table(_counts(releases))]
    if rest := list(_rest(releases)):
        tables.append(_table([("sglang", "part", "file", "anchor", "state", "looks like it"), *rest]))
    return "\n\n".join(tables)


def _counts(releases: Releases) -> list[tuple[str, ...]]:
    parts = sorted({found.part for findings in releases.values() for found in findings})
    rows: list[tuple[str, ...]] = [("sglang", "edits that anchor", *(f"part {part}" for part in parts))]
    for version, findings in releases.items():
        every = Counter(found.part for found in findings)
        good = Counter(found.part for found in findings if found.state == "anchors")
        rows.append(
            (version, f"{good.total()} of {every.total()}", *(f"{good[part]} of {every[part]}" for part in parts))
        )
    return rows


def _rest(releases: Releases) -> Iterator[tuple[str, ...]]:
    for version, findings in releases.items():
        for found in findings:
            if found.state != "anchors":
                where = found.where.replace(f"{found.target}:", "line ") or "-"
                yield version, str(found.part), f"`{found.target}`", _code(found.anchor), found.state, where


def _code(text: str) -> str:
    """As one cell: a bar would end it."""
    return "`" + text.replace("|", "\\|") + "`"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
