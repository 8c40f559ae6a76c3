"""A small tree and a small series, for every test of the tool that does not bring its own."""

from __future__ import annotations

import pytest

from kit.toy_series import make_series, make_tree
from sglang_bitexact.series import Series
from sglang_bitexact.tree import Tree


@pytest.fixture
def tree(tmp_path) -> Tree:
    return Tree.locate(make_tree(tmp_path / "site"))


@pytest.fixture
def series(tmp_path) -> Series:
    return Series(make_series(tmp_path / "series"))
