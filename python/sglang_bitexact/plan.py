"""What the series does to a set of SGLang files: computed whole before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
    series: Series, through: int, read: Callable[[str], bytes | None], exists: Callable[[str], bool], version: str
) -> Plan:
    """Plan parts 1 to ``through`` against the files that ``read`` gives.

    ``read(path)`` returns None for a missing file.

    Raises:
        BitexactError: a target is missing or differs from the file that its edits were
            written against (all such files are listed), an edit does not anchor, or a
            new file already exists.
    """
    edited: dict[str, bytes] = {}
    changed: list[str] = []
    for file in series.edit_files:
        edits = file.through(through)
        if not edits:
            continue
        content = read(file.target)
        if content is None or sha256(content) != file.sha256:
            changed.append(f"{file.target} ({'missing' if content is None else 'changed'})")
            continue
        edited[file.target] = apply_edits(content.decode(), edits, file.target, version).encode()
    if changed:
        raise BitexactError(
            "these files are not those of the released sglang "
            f"{version}: {', '.join(changed)}. Restore them (reinstall sglang, or git checkout) and try again."
        )
    new = series.new_files(through)
    present = [name for name in new if exists(name)]
    if present:
        raise BitexactError(f"these files of the series already exist in the tree: {', '.join(present)}")
    return Plan(through, edited, {name: path.read_bytes() for name, path in new.items()})
