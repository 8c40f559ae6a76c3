"""The state directory of a patched tree: what was there before, so that it can come back.

It lies beside the package, ``.sglang-bitexact/``: ``journal.json`` and ``before/``, the
original of every file that is changed. It is complete before the first file is touched
and removed after the last one is restored, so that a kill at any moment can be undone.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from sglang_bitexact.errors import BitexactError

DIRECTORY = ".sglang-bitexact"
Phase = Literal["applying", "applied", "reverting"]


class File(BaseModel):
    """One file that the series changes. before / after: sha256, None where it does not exist."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    before: str | None
    after: str | None


class Journal(BaseModel):
    """directories: those that ``apply`` makes, deepest last."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    phase: Phase
    through: int
    linked: bool
    files: tuple[File, ...]
    directories: tuple[str, ...]


class State:
    """Reads and writes the state directory of the tree at ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.directory = root / DIRECTORY

    def load(self) -> Journal | None:
        path = self.directory / "journal.json"
        if not path.is_file():
            return None
        try:
            return Journal.model_validate_json(path.read_text())
        except ValueError as error:
            raise BitexactError(
                f"{path} cannot be read: {error}. Reinstall sglang, then delete {self.directory}."
            ) from error

    def create(self, journal: Journal, saved: list[str]) -> None:
        """Save copies of ``saved`` (paths below the root) and the journal; all or nothing."""
        self.clean()
        partial = self._root / f"{DIRECTORY}.new"
        partial.mkdir()
        for name in saved:
            copy = partial / "before" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self._root / name, copy)
            _sync(copy)
        # In a git checkout: not listed as a change, and not deleted by `git clean`.
        (partial / ".gitignore").write_text("*\n")
        (partial / "journal.json").write_text(journal.model_dump_json(indent=1))
        _sync(partial / "journal.json")
        partial.rename(self.directory)
        _sync(self._root)

    def enter(self, journal: Journal, phase: Phase) -> Journal:
        """Record the next phase; returns the new journal."""
        journal = journal.model_copy(update={"phase": phase})
        replace_file(self.directory / "journal.json", journal.model_dump_json(indent=1).encode())
        return journal

    def saved(self, name: str) -> Path:
        return self.directory / "before" / name

    def remove(self) -> None:
        """Forget the state; a half-removed directory no longer counts as one."""
        self.clean()
        self.directory.rename(self._root / f"{DIRECTORY}.old")
        self.clean()

    def clean(self) -> None:
        """Remove what a kill inside ``create`` or ``remove`` left."""
        for suffix in (".new", ".old"):
            shutil.rmtree(self._root / f"{DIRECTORY}{suffix}", ignore_errors=True)


def replace_file(path: Path, data: bytes, like: Path | None = None) -> None:
    """Write ``path`` at once; with the mode and times of ``like`` if given, else with its own mode."""
    partial = partial_name(path)
    partial.write_bytes(data)
    if like is not None:
        shutil.copystat(like, partial)
    elif path.exists():
        shutil.copymode(path, partial)
    _sync(partial)
    os.replace(partial, path)


def partial_name(path: Path) -> Path:
    """Where ``replace_file`` writes before it renames."""
    return path.with_name(f"{path.name}.bitexact-new")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
