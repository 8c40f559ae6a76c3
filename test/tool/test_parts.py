"""Every registered test file belongs to one part of the series."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def test_every_file_has_its_part():
    spec = importlib.util.spec_from_file_location("test_parts_tool", _ROOT / "tools/test_parts.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    found = Counter((_ROOT / "test/registered/mem_cache").glob("test_*.py"))
    assert Counter(tool.files(5)) == found
