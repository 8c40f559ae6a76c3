"""A small SGLang tree and a small series for it, for the tool's tests."""

from __future__ import annotations

import hashlib
from pathlib import Path

CACHE_SOURCE = """\
class Cache:
    size: int = 4

    def match(self, key, limit=None):
        # Look up.
        found = self.find(
            key,
            limit=limit,
        )
        return found


class Other:
    def match(self, key):
        return key
"""
LOOP_SOURCE = "def step(batch):\n    plan(batch)\n    run(batch)\n"

CACHE_EDITS = """\
edits:
  - part: 1
    why: a field that later parts read
    at: {class: Cache}
    do: append
    text: |
      def restore(self):
          pass
  - part: 2
    why: a match says what it is for
    at: {class: Cache, function: match}
    do: parameter
    text: "reuse=False"
  - part: 2
    why: a match says what it is for
    at: {class: Cache, function: match, pattern: self.find($$$)}
    do: keyword
    text: reuse=reuse
"""
LOOP_EDITS = """\
edits:
  - part: 1
    why: restore before the run reads
    at: {function: step, pattern: run($$$)}
    do: before
    text: restore(batch)
"""


def make_tree(root: Path) -> Path:
    """``root`` with a package ``sglang`` of three files; returns ``root``."""
    package = root / "sglang" / "srt"
    package.mkdir(parents=True)
    (root / "sglang" / "__init__.py").write_text("")
    (package / "cache.py").write_text(CACHE_SOURCE)
    (package / "loop.py").write_text(LOOP_SOURCE)
    return root


def make_series(root: Path) -> Path:
    """The series for ``make_tree``: two parts, edits of two files, a new package in part 2."""
    folder = root / "srt"
    (folder / "tiles").mkdir(parents=True)
    (folder / "tiles" / "__init__.py").write_text('"""Tiles."""\n')
    (folder / "tiles" / "layout.py").write_text("ROWS = 128\n")
    (root / "series.yaml").write_text(
        "parts:\n  - {number: 1, title: Hooks}\n"
        "  - {number: 2, title: Tiles, adds: [srt/tiles/__init__.py, srt/tiles/layout.py]}\n"
    )
    for name, source, edits in (("cache", CACHE_SOURCE, CACHE_EDITS), ("loop", LOOP_SOURCE, LOOP_EDITS)):
        digest = hashlib.sha256(source.encode()).hexdigest()
        text = f"target: sglang/srt/{name}.py\nsha256: {digest}\n{edits}"
        (folder / f"{name}.edits.yaml").write_text(text)
    return root


def snapshot(root: Path) -> dict[str, tuple[bytes, int, int]]:
    """Content, mode and modification time of every file below ``root``, and every directory."""
    out = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            out[name + "/"] = (b"", 0, 0)
        else:
            stat = path.stat()
            out[name] = (path.read_bytes(), stat.st_mode, stat.st_mtime_ns)
    return out
