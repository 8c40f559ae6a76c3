"""``apply``, ``revert`` and ``status`` of the series on a tree."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from sglang_bitexact.errors import BitexactError
from sglang_bitexact.journal import File, Journal, State, partial_name, replace_file
from sglang_bitexact.plan import Plan, make_plan
from sglang_bitexact.series import Series
from sglang_bitexact.tree import Tree
from sglang_bitexact.upstream import sha256
from sglang_bitexact.wheel import record_row, write_record

Condition = Literal["not applied", "applied", "interrupted", "changed"]


class Status(NamedTuple):
    """changed: files that are neither as before nor as the series left them."""

    condition: Condition
    through: int | None
    files: tuple[str, ...]
    changed: tuple[str, ...]


def status(tree: Tree) -> Status:
    """What state the tree is in; reads only."""
    journal = State(tree.root).load()
    if journal is None:
        return Status("not applied", None, (), ())
    names = tuple(file.name for file in journal.files)
    if journal.phase == "applied":
        changed = _differing(tree, journal, expected=lambda file: {file.after})
        return Status("changed" if changed else "applied", journal.through, names, changed)
    changed = _differing(tree, journal, expected=lambda file: {file.before, file.after})
    return Status("interrupted", journal.through, names, changed)


def apply(tree: Tree, series: Series, through: int, *, link: bool = False, keep_local: bool = False) -> Status:
    """Patch the tree, all or nothing. ``link``: new files become symbolic links to the series.

    keep_local: edited files may carry local changes, which ``revert`` brings back. Applying the
    same parts again does nothing.

    Raises:
        BitexactError: the tree has other parts applied, was interrupted, or differs from
            the release in a touched file (see ``make_plan``); it is left as it was.
    """
    before = status(tree)
    if before.condition != "not applied":
        if before.condition == "applied" and before.through == through and _is_current(tree, series, through, link):
            return before
        raise BitexactError(
            f"{tree.root} is in state {before.condition!r} (parts 1 to {before.through}). "
            "Run `sglang-bitexact revert` first."
        )
    plan = make_plan(series, through, tree.read, tree.exists, tree.version, keep_local=keep_local)
    contents = {**plan.edited, **plan.added}
    if tree.record is not None:
        contents[tree.record] = _updated_record(tree, plan)
    journal = Journal(
        phase="applying",
        through=through,
        linked=link,
        files=tuple(File(name=n, before=_digest(tree, n), after=sha256(data)) for n, data in contents.items()),
        directories=_new_directories(tree.root, plan.added),
    )
    state = State(tree.root)
    existing = [name for name in contents if tree.exists(name)]
    state.create(journal, existing + [c for name in existing for c in tree.bytecode(name)])
    links = series.new_files(through) if link else {}
    try:
        for directory in journal.directories:
            (tree.root / directory).mkdir()
        for name, data in contents.items():
            path = tree.root / name
            if name in links:
                path.symlink_to(links[name].resolve())
            else:
                replace_file(path, data)
        state.enter(journal, "applied")
    except BaseException:
        _restore(tree, state, journal)
        raise
    return status(tree)


def revert(tree: Tree, *, force: bool = False) -> Status:
    """Bring every touched file back, byte for byte; also after an interrupted apply or revert.

    Raises:
        BitexactError: a touched file was changed since, and ``force`` is not set.
    """
    state = State(tree.root)
    journal = state.load()
    if journal is None:
        state.clean()
        return status(tree)
    # A link whose target is gone holds nothing that could be lost.
    changed = [name for name in status(tree).changed if not (tree.root / name).is_symlink()]
    if changed and not force:
        raise BitexactError(
            f"these files were changed after `apply`: {', '.join(changed)}. "
            "Save your changes, then revert with --force, which discards them."
        )
    _restore(tree, state, state.enter(journal, "reverting"))
    return status(tree)


def _restore(tree: Tree, state: State, journal: Journal) -> None:
    for file in journal.files:
        path, saved = tree.root / file.name, state.saved(file.name)
        partial_name(path).unlink(missing_ok=True)
        for compiled in tree.bytecode(file.name):
            (tree.root / compiled).unlink()
        if file.before is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, saved.read_bytes(), like=saved)
    for copy in sorted((state.directory / "before").rglob("*.pyc")):
        target = tree.root / copy.relative_to(state.directory / "before")
        replace_file(target, copy.read_bytes(), like=copy)
    for directory in reversed(journal.directories):
        _remove_directory(tree.root / directory)
    state.remove()


def _remove_directory(path: Path) -> None:
    """Remove a directory that ``apply`` made; one that holds somebody's files stays."""
    cache = path / "__pycache__"
    for directory in (cache, path):
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def _new_directories(root: Path, added: dict[str, bytes]) -> tuple[str, ...]:
    missing = {parent for name in added for parent in Path(name).parents if not (root / parent).exists()}
    return tuple(sorted(directory.as_posix() for directory in missing))


def _digest(tree: Tree, name: str) -> str | None:
    data = tree.read(name)
    return None if data is None else sha256(data)


def _differing(tree: Tree, journal: Journal, expected: Callable[[File], set[str | None]]) -> tuple[str, ...]:
    """Names of files whose digest is none of ``expected(file)``; a linked file may be edited."""

    def may_differ(path: Path) -> bool:
        return journal.linked and path.is_symlink() and path.exists()

    return tuple(
        file.name
        for file in journal.files
        if not may_differ(tree.root / file.name) and _digest(tree, file.name) not in expected(file)
    )


def _is_current(tree: Tree, series: Series, through: int, link: bool) -> bool:
    """Whether the applied files are those that the series would write, or link, today."""
    state = State(tree.root)
    journal = state.load()
    assert journal is not None

    def original(name: str) -> bytes | None:
        saved = state.saved(name)
        return saved.read_bytes() if saved.is_file() else None

    plan = make_plan(series, through, original, lambda name: False, tree.version, keep_local=True)
    planned = {name: sha256(data) for name, data in {**plan.edited, **plan.added}.items()}
    applied = {file.name: file.after for file in journal.files if file.name != tree.record}
    if not link:
        return not journal.linked and planned == applied
    links = {name: path.resolve() for name, path in series.new_files(through).items()}
    return (
        journal.linked
        and planned.keys() == applied.keys()
        and all(applied[name] == planned[name] for name in plan.edited)
        and all((tree.root / name).resolve() == source for name, source in links.items())
    )


def _updated_record(tree: Tree, plan: Plan) -> bytes:
    """RECORD with the new digests and files, so that pip knows what to uninstall.

    Other rows stay as they are, byte for byte.
    """
    assert tree.record is not None
    lines = (tree.root / tree.record).read_bytes().decode().splitlines(keepends=True)
    newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    rows = {name: write_record([record_row(name, data)], newline) for name, data in plan.edited.items()}
    kept = [rows.pop(next(csv.reader([line]))[0], line.encode()) for line in lines]
    added = [write_record([record_row(name, data)], newline) for name, data in plan.added.items()]
    return b"".join([*kept, *added])
