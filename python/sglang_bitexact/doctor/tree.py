"""What is in an SGLang on disk: nothing of the series, parts of it, or something else."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Literal, NamedTuple

from sglang_bitexact.doctor.commits import committed
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.journal import State
from sglang_bitexact.patching import status
from sglang_bitexact.series import Series
from sglang_bitexact.tree import Tree
from sglang_bitexact.upstream import sha256
from sglang_bitexact.wheel import MANIFEST_NAME, record_row

Condition = Literal["stock", "patched", "tampered", "interrupted"]


class Diagnosis(NamedTuple):
    """One tree.

    through: the highest part that is in it, None without the series. by: what brought it.
    changed: files that are not as the release or the series left them. local: files that were
    changed before the series was applied (`apply --keep-local`).
    """

    root: str
    version: str
    condition: Condition
    through: int | None
    by: Literal["apply", "wheel", "commits"] | None
    changed: tuple[str, ...] = ()
    local: tuple[str, ...] = ()


def diagnose(tree: Tree, series: Series) -> Diagnosis:
    """Reads only.

    Raises:
        BitexactError: the tree is another release than the series' one.
    """
    manifest = next(tree.root.glob(f"sglang-*+bitexact.*.dist-info/{MANIFEST_NAME}"), None)
    if manifest is not None:
        return _built(tree, manifest)
    tree.checked()
    found = status(tree)
    root, version = str(tree.root), tree.version
    if found.condition == "not applied":
        changed = _differing(tree, series)
        if changed and (commits := committed(tree, series, len(changed))) is not None:
            condition: Condition = "tampered" if commits.changed else "patched"
            return Diagnosis(root, version, condition, commits.through, "commits", commits.changed)
        return Diagnosis(root, version, "tampered" if changed else "stock", None, None, changed)
    local = _kept(tree, series)
    conditions: dict[str, Condition] = {"applied": "patched", "changed": "tampered", "interrupted": "interrupted"}
    return Diagnosis(root, version, conditions[found.condition], found.through, "apply", found.changed, local)


def _differing(tree: Tree, series: Series) -> tuple[str, ...]:
    """Files that the series edits and that are not the release's, and files of the series itself."""
    edited = [file.target for file in series.edit_files if _digest(tree, file.target) != file.sha256]
    return (*edited, *(name for name in series.new_files(series.last_part) if tree.exists(name)))


def _kept(tree: Tree, series: Series) -> tuple[str, ...]:
    journal = State(tree.root).load()
    released = {file.target: file.sha256 for file in series.edit_files}
    files = () if journal is None else journal.files
    return tuple(file.name for file in files if file.before != released.get(file.name, file.before))


def _built(tree: Tree, manifest: Path) -> Diagnosis:
    """A wheel of `build`: its files have the digests of its RECORD."""
    content = json.loads(manifest.read_text())
    record = manifest.with_name("RECORD")
    if not record.is_file():
        raise BitexactError(f"{record} is missing: reinstall the wheel")
    with record.open(newline="") as lines:
        recorded = {row[0]: row[1] for row in csv.reader(lines)}
    changed = tuple(
        name
        for name in sorted([*content["edited"], *content["added"]])
        if (data := tree.read(name)) is None or record_row(name, data)[1] != recorded.get(name)
    )
    condition: Condition = "tampered" if changed else "patched"
    version = f"{content['sglang']}+bitexact.{content['through']}"
    return Diagnosis(str(tree.root), version, condition, content["through"], "wheel", changed)


def _digest(tree: Tree, name: str) -> str | None:
    data = tree.read(name)
    return None if data is None else sha256(data)
