"""What the series does to a set of SGLang files: computed whole before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sglang_bitexact.edits import Edit
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.rewrite import apply_edits
from sglang_bitexact.series import Series
from sglang_bitexact.upstream import sha256


class Plan(NamedTuple):
    """Contents by path below the directory that holds ``sglang/``.

    edited: new contents of upstream files. added: contents of new files.
    """

    through: int
    edited: dict[str, bytes]
    added: dict[str, bytes]

    @property
    def version(self) -> str:
        """Local version suffix of a tree with this plan: the highest part that it contains."""
        return f"bitexact.{self.through}"


def make_plan(
    series: Series,
    through: int,
    read: Callable[[str], bytes | None],
    exists: Callable[[str], bool],
    version: str,
    *,
    keep_local: bool = False,
) -> Plan:
    """Plan parts 1 to ``through`` against the files that ``read`` gives.

    ``read(path)`` returns None for a missing file. keep_local: a target may differ from the file
    that its edits were written against, as long as each of them still anchors exactly once.

    Raises:
        BitexactError: a target is missing or differs from the file that its edits were
            written against (all such files are listed), an edit does not anchor or is there
            already, or a new file already exists.
    """
    edited: dict[str, bytes] = {}
    changed: list[str] = []
    for file in series.edit_files:
        edits = file.through(through)
        if not edits:
            continue
        content = read(file.target)
        differs = content is not None and sha256(content) != file.sha256
        if content is None or (differs and not keep_local):
            changed.append(f"{file.target} ({'missing' if content is None else 'changed'})")
            continue
        if differs:
            refuse_if_edited(content.decode(), edits, file.target)
        edited[file.target] = apply_edits(content.decode(), edits, file.target, version).encode()
    if changed:
        raise BitexactError(
            "these files are not those of the released sglang "
            f"{version}: {', '.join(changed)}. Restore them (reinstall sglang, or git checkout) and try again. "
            "Changes of your own stay with --keep-local, if every edit still has its one place."
        )
    new = series.new_files(through)
    present = [name for name in new if exists(name)]
    if present:
        raise BitexactError(f"these files of the series already exist in the tree: {', '.join(present)}")
    return Plan(through, edited, {name: path.read_bytes() for name, path in new.items()})


def refuse_if_edited(text: str, edits: tuple[Edit, ...], target: str) -> None:
    """Most anchors still match behind their own edit, which would then be there twice.

    Raises:
        BitexactError: all texts that a part brings stand in ``text``, whatever its line breaks.
    """
    words = " ".join(text.split())
    for part in sorted({edit.part for edit in edits}):
        if all(" ".join(edit.code.split()) in words for edit in edits if edit.part == part):
            raise BitexactError(
                f"{target} holds the edits of part {part} already, and no journal says how it was before. "
                "Restore it (reinstall sglang, or git checkout) and try again."
            )
