#!/usr/bin/env python3
"""Fail if a Python file has more than 300 lines: one role per file."""

from __future__ import annotations

import sys
from pathlib import Path

_LIMIT = 300


def main(paths: list[str]) -> int:
    lengths = {path: len(Path(path).read_text().splitlines()) for path in paths}
    long = {path: length for path, length in lengths.items() if length > _LIMIT}
    for path, length in long.items():
        print(f"{path}: {length} lines, at most {_LIMIT}: split it by role")
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
