"""Whether tests that a table names are there: a table that names a renamed test is worth nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]


def missing_tests(table: Mapping[str, Iterable[str]], file: str) -> list[str]:
    """The names in ``table``'s values that no test file below test/ defines.

    A name is "test_x" or "Class.test_x" for a test in ``file``, a path, and "other.py::test_x" for another's.
    """
    named = [name for names in table.values() for name in names]
    return [name for name in named if not _exists(*name.rpartition("::")[::2], file)]


def _exists(other: str, test: str, file: str) -> bool:
    found = list(_TESTS.rglob(other)) if other else [Path(file)]
    assert len(found) <= 1, f"{other} is there {len(found)} times"
    return bool(found) and test in _defined(ast.parse(found[0].read_text()))


def _defined(tree: ast.Module) -> set[str]:
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return names | {f"{c.name}.{m.name}" for c in classes for m in c.body if isinstance(m, ast.FunctionDef)}
