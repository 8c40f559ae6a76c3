"""``check``: does every edit still anchor in another SGLang?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ast_grep_py import SgNode, SgRoot

from sglang_bitexact.edits import Anchor, Edit
from sglang_bitexact.rewrite import definitions, find_anchor
from sglang_bitexact.series import Series
from sglang_bitexact.upstream import Wheel

State = Literal["anchors", "moved", "ambiguous", "gone"]


class Finding(NamedTuple):
    """What became of one edit. where: the place of the match, or of the one that looks like it."""

    target: str
    part: int
    edit: int
    anchor: str
    state: State
    where: str
    why: str


def check(series: Series, wheel: Wheel) -> list[Finding]:
    """One finding per edit, in the order of the files."""
    return [
        _find(wheel, file.target, number, edit)
        for file in series.edit_files
        for number, edit in enumerate(file.edits, start=1)
    ]


def _find(wheel: Wheel, target: str, number: int, edit: Edit) -> Finding:
    lines = _lines(wheel, target, edit.at)
    state: State
    if len(lines) == 1:
        state, where = "anchors", f"{target}:{lines[0]}"
    elif lines:
        state, where = "ambiguous", f"{target}:{','.join(map(str, lines))}"
    else:
        elsewhere = list(_elsewhere(wheel, target, edit.at))
        state = "moved" if elsewhere else "gone"
        where = ", ".join(elsewhere[:3])
    return Finding(target, edit.part, number, str(edit.at), state, where, edit.why)


def _lines(wheel: Wheel, target: str, anchor: Anchor) -> list[int]:
    root = _parse(wheel, target)
    return [] if root is None else [_line(node) for node in find_anchor(root, anchor)]


def _parse(wheel: Wheel, name: str) -> SgNode | None:
    return SgRoot(wheel.read(name).decode(), "python").root() if name in wheel.names else None


def _line(node: SgNode) -> int:
    return node.range().start.line + 1


def _elsewhere(wheel: Wheel, target: str, anchor: Anchor) -> Iterator[str]:
    """Places that look like the anchor.

    In its own file: the pattern anywhere, or a function of the name in any class. In
    another file: the whole anchor; only files that hold its name are parsed.
    """
    root = _parse(wheel, target)
    similar: list[SgNode] = []
    if root is not None and anchor.pattern:
        similar = root.find_all(pattern=anchor.pattern)
    elif root is not None and anchor.function:
        similar = definitions(root, "function_definition", anchor.function)
    for node in similar:
        yield f"{target}:{_line(node)}"
    needle = (anchor.class_ or anchor.function or "").encode()
    if not needle:
        return
    for name in sorted(wheel.names):
        if name.endswith(".py") and name != target and needle in wheel.read(name):
            for line in _lines(wheel, name, anchor):
                yield f"{name}:{line}"
