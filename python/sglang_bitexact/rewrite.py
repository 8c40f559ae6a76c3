"""Find anchors in a source file with ast-grep, and apply edits to its text."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from ast_grep_py import SgNode, SgRoot

from sglang_bitexact.edits import Anchor, Edit
from sglang_bitexact.errors import BitexactError

_DEFINITIONS = {"class_definition", "function_definition"}
_BODIES = {"block", "module"}


class _Change(NamedTuple):
    """Replace ``source[start:end]`` by ``text``; ``end == start`` inserts."""

    start: int
    end: int
    text: str


def apply_edits(source: str, edits: Sequence[Edit], target: str, version: str) -> str:
    """``source`` with all ``edits`` applied; they are resolved against ``source`` itself.

    Raises:
        BitexactError: an anchor does not match exactly once, two edits overlap, or the result
            does not parse. It names the file, the part, the edit, the number of matches and
            the SGLang version.
    """
    root = SgRoot(source, "python").root()
    changes: list[_Change] = []
    for number, edit in enumerate(edits, start=1):
        matches = find_anchor(root, edit.at)
        if len(matches) != 1:
            raise BitexactError(
                f"{target}: part {edit.part}, edit {number} ({edit.do} at {edit.at}) matches "
                f"{len(matches)} times in sglang {version}, expected once. Purpose: {edit.why}"
            )
        changes.append(_change(source, matches[0], edit))
    edited = _apply(source, changes, target)
    error = _syntax_error(edited)
    if error is not None:
        raise BitexactError(
            f"{target} is no Python after its edits: line {error.lineno}: {error.msg}. "
            f"{_guilty(source, changes, edits)}"
        )
    return edited


def _syntax_error(source: str) -> SyntaxError | None:
    """What Python has against ``source``; compiled, because a parser alone lets doubled names pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, "edited", "exec", dont_inherit=True)
        except SyntaxError as error:
            return error
    return None


def _guilty(source: str, changes: Sequence[_Change], edits: Sequence[Edit]) -> str:
    """Which edit breaks the file alone."""
    for number, (change, edit) in enumerate(zip(changes, edits, strict=True), start=1):
        if _syntax_error(_apply(source, [change], "")):
            return f"Part {edit.part}, edit {number} ({edit.do} at {edit.at}) breaks it: check its text."
    return "No edit breaks it alone, together they do: check what they insert at one place."


def find_anchor(root: SgNode, anchor: Anchor) -> list[SgNode]:
    """Nodes that the anchor means: pattern matches, or else the definition itself."""
    scopes = [root]
    if anchor.class_ is not None:
        scopes = definitions(root, "class_definition", anchor.class_)
    if anchor.function is not None:
        scopes = [
            function
            for scope in scopes
            for function in definitions(scope, "function_definition", anchor.function)
            if _owner(function) == (None if scope is root else scope)
        ]
    if anchor.pattern is None:
        return scopes
    return [match for scope in scopes for match in scope.find_all(pattern=anchor.pattern)]


def definitions(scope: SgNode, kind: str, name: str) -> list[SgNode]:
    """Definitions of ``kind`` (tree-sitter's word) with ``name``, at any depth below ``scope``."""
    return list(scope.find_all(kind=kind, has={"field": "name", "regex": f"^{re.escape(name)}$"}))


def _owner(node: SgNode) -> SgNode | None:
    """The class or function that directly holds a definition."""
    return next((a for a in node.ancestors() if a.kind() in _DEFINITIONS), None)


def _body(definition: SgNode) -> SgNode:
    body = definition.field("body")
    assert body is not None, "a class or function has a body"
    return body


def _statement(node: SgNode) -> SgNode:
    """The statement that holds ``node``: the ancestor directly inside a block."""
    current = node
    parent = current.parent()
    while parent is not None and parent.kind() not in _BODIES:
        current, parent = parent, parent.parent()
    return current


def _change(source: str, node: SgNode, edit: Edit) -> _Change:
    if edit.do in ("replace", "callee"):
        place = node.field("function") if edit.do == "callee" else node
        if place is None:
            raise BitexactError(f"do: callee at {edit.at} matches {node.text()!r}, which is no call")
        return _Change(place.range().start.index, place.range().end.index, edit.code)
    if edit.do == "keyword":
        return _argument(source, node.field("arguments") or node, edit.code)
    if edit.do == "parameter":
        parameters = node.field("parameters")
        assert parameters is not None
        return _argument(source, parameters, edit.code)
    blank = "\n" if re.match(r"(async )?def |@|class ", edit.code) else ""
    if edit.do == "append":
        body = _body(node)
        return _below(source, body.range().end.index, blank + _indented(edit.code, body.range().start.column))
    statement = _statement(node)
    column = statement.range().start.column
    if edit.do == "after":
        return _below(source, statement.range().end.index, blank + _indented(edit.code, column))
    start = _above_comments(source, _line_start(source, statement.range().start.index), column)
    return _Change(start, start, f"{_indented(edit.code, column)}\n{blank}")


def _above_comments(source: str, start: int, column: int) -> int:
    """Start of the comment lines directly above the line at ``start``, or ``start``."""
    while start > 0:
        above = _line_start(source, start - 1)
        if not re.match(rf" {{{column}}}#", source[above:start]):
            break
        start = above
    return start


def _argument(source: str, parentheses: SgNode, code: str) -> _Change:
    """Add ``code`` as the last item of a parenthesised list."""
    close = parentheses.range().end.index - 1
    items = [c for c in parentheses.children() if c.kind() not in ("(", ")", ",", "comment")]
    if not items:
        return _Change(close, close, code)
    last = items[-1].range()
    tail = source[last.end.index : close]
    if "\n" not in tail:
        return _Change(last.end.index, last.end.index, f", {code}")
    # One item per line: keep it so, with the trailing comma.
    comma = "" if tail.lstrip().startswith(",") else ","
    line_start = _line_start(source, last.start.index)
    first_in_line = len(source[line_start:]) - len(source[line_start:].lstrip())
    at = last.end.index + (0 if comma else tail.index(",") + 1)
    return _Change(at, at, f"{comma}\n{' ' * first_in_line}{code},")


def _indented(code: str, column: int) -> str:
    return textwrap.indent(code, " " * column)


def _line_start(source: str, index: int) -> int:
    return source.rfind("\n", 0, index) + 1


def _below(source: str, index: int, text: str) -> _Change:
    """Insert ``text`` as lines of its own below the line of ``index``."""
    newline = source.find("\n", index)
    if newline < 0:
        return _Change(len(source), len(source), f"\n{text}\n")
    return _Change(newline + 1, newline + 1, f"{text}\n")


def _apply(source: str, changes: list[_Change], target: str) -> str:
    # Stable: insertions at one place keep the order in which they are written.
    ordered = sorted(changes, key=lambda change: (change.start, change.end))
    pieces, position = [], 0
    for change in ordered:
        if change.start < position:
            raise BitexactError(f"{target}: two edits overlap near character {change.start}")
        pieces += [source[position : change.start], change.text]
        position = change.end
    return "".join(pieces) + source[position:]
