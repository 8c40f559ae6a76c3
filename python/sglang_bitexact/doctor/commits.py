"""The series as commits of a checkout: `git am` of exported patches leaves no journal, and git has the originals."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from sglang_bitexact.edits import EditFile
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.plan import make_plan
from sglang_bitexact.series import Series
from sglang_bitexact.tree import Tree
from sglang_bitexact.upstream import sha256

# A file's commits that are looked through, newest first: the series brings at most one per part.
_COMMITS = 50


class Committed(NamedTuple):
    """through: the parts that are in the checkout. changed: files that are not as these parts make them."""

    through: int
    changed: tuple[str, ...]


def committed(tree: Tree, series: Series, differing: int) -> Committed | None:
    """The parts of ``series`` that a checkout's files hold; None if it is none, or its files say otherwise.

    Made of the release's files, which are looked for in the history. Where files were changed
    since, it is the parts from which the fewest files differ, and more parts if as few do; fewer
    than the ``differing`` ones that are not the release's.

    Example, the checkout of the release with the patches of parts 1 and 2 on it: through 2.
    """
    released: dict[str, bytes] = {}
    for file in series.edit_files:
        if (content := _released(tree.root, file)) is None:
            return None
        released[file.target] = content
    found: list[Committed] = []
    for part in series.parts:
        try:
            plan = make_plan(series, part.number, released.get, lambda name: False, tree.version)
        except BitexactError:
            return None
        made = released | plan.edited | plan.added
        # What later parts bring is not there yet.
        absent = series.new_files(series.last_part).keys() - plan.added.keys()
        changed = [name for name, content in made.items() if tree.read(name) != content]
        changed += [name for name in sorted(absent) if tree.exists(name)]
        found.append(Committed(part.number, tuple(changed)))
    best = min(found, key=lambda one: (len(one.changed), -one.through))
    return best if len(best.changed) < differing else None


def _released(root: Path, file: EditFile) -> bytes | None:
    """The file as the release has it, from the newest commits that touched it."""
    log = _git(root, "log", f"-{_COMMITS}", "--format=%H", "--", file.target)
    for commit in (log or b"").decode().split():
        content = _git(root, "show", f"{commit}:./{file.target}")
        if content is not None and sha256(content) == file.sha256:
            return content
    return None


def _git(root: Path, *arguments: str) -> bytes | None:
    """What git prints; None if there is no git, no repository, or no such thing in it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], env=environment, capture_output=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
