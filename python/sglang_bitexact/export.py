"""``export``: the series as mail patches, one per part, for ``git am`` in a checkout of the release."""

from __future__ import annotations

import os
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from sglang_bitexact.errors import BitexactError
from sglang_bitexact.plan import make_plan
from sglang_bitexact.series import Part, Series
from sglang_bitexact.tree import Tree
from sglang_bitexact.upstream import download

# Where SGLang's repository has the package's parent.
_ROOT = "python"
_NOBODY = ("sglang-bitexact", "sglang-bitexact@localhost")


class Source(NamedTuple):
    """SGLang's files, as ``make_plan`` wants them."""

    read: Callable[[str], bytes | None]
    exists: Callable[[str], bool]
    version: str

    @classmethod
    def of(cls, checkout: Path | None) -> Source:
        """A checkout, or without one the released wheel."""
        if checkout is not None:
            tree = Tree.locate(checkout)
            return cls(tree.read, tree.exists, tree.version)
        wheel = download()
        return cls(wheel.find, lambda name: name in wheel.names, wheel.version)


def export(
    series: Series,
    source: Source,
    destination: Path,
    *,
    author: tuple[str, str] = _NOBODY,
    keep_local: bool = False,
) -> list[Path]:
    """Write a patch per part of ``series`` below ``destination``, against ``source``.

    The paths in the patches are those of SGLang's repository. author: name and address; nobody
    signs off. Needs git, whose settings do not matter.

    Raises:
        BitexactError: the files are not those of the release (see ``make_plan``), there is no
            git, or ``destination`` holds patches that are not these.
    """
    states: list[dict[str, bytes]] = []
    for part in series.parts:
        plan = make_plan(series, part.number, *source, keep_local=keep_local)
        states.append({**plan.edited, **plan.added})
    targets = {file.target for file in series.edit_files}
    base = {name: data for name in targets if (data := source.read(name)) is not None}
    with tempfile.TemporaryDirectory() as directory:
        repository = Path(directory) / "repository"
        repository.mkdir()
        _git(repository, "init", "--quiet", "--template=")
        # The user's own attributes would change line ends, the ignore list leave files out.
        (repository / ".git/info").mkdir()
        (repository / ".git/info/attributes").write_text("* -text\n")
        _commit(repository, base, f"sglang {source.version}", author)
        for part, state in zip(series.parts, states, strict=True):
            _commit(repository, state, message(series, part), author)
        made = Path(directory) / "patches"
        # Full object names, so that `git am -3` finds the files that a patch was made against.
        form = ("--numbered", "--no-signature", "--zero-commit", "--full-index", "--no-renames")
        _git(repository, "format-patch", "--quiet", *form, f"-{len(series.parts)}", "-o", str(made))
        return _place(sorted(made.iterdir()), destination)


def message(series: Series, part: Part) -> str:
    """The commit message of ``part``: its title, what it does, and why each file is edited."""
    blocks = [part.title]
    if part.does:
        blocks.append(_wrap(part.does, "", ""))
    for file in series.edit_files:
        whys = dict.fromkeys(edit.why for edit in file.edits if edit.part == part.number)
        if whys:
            blocks.append("\n".join([f"{_ROOT}/{file.target}:", *(_wrap(why, "- ", "  ") for why in whys)]))
    return "\n\n".join(blocks) + "\n"


def _wrap(text: str, first: str, others: str) -> str:
    return textwrap.fill(
        text, 72, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )


def identity(checkout: Path | None) -> tuple[str, str]:
    """Name and address that git knows its user by, in ``checkout`` or in general; else nobody's."""
    values = []
    for key in ("user.name", "user.email"):
        command = ["git", *(("-C", str(checkout)) if checkout else ()), "config", key]
        try:
            found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except FileNotFoundError as error:
            raise _no_git() from error
        values.append(found)
    name, address = values
    return (name, address) if name and address else _NOBODY


def _commit(repository: Path, contents: Mapping[str, bytes], text: str, author: tuple[str, str]) -> None:
    for name, data in contents.items():
        path = repository / _ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    _git(repository, "add", "--all", "--force")
    who = ("-c", f"user.name={author[0]}", "-c", f"user.email={author[1]}")
    _git(repository, *who, "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--file=-", text=text)


def _place(patches: list[Path], destination: Path) -> list[Path]:
    """Move ``patches`` to ``destination``; `git am DIRECTORY/*.patch` must find no others there."""
    destination.mkdir(parents=True, exist_ok=True)
    strange = {path.name for path in destination.glob("*.patch")} - {patch.name for patch in patches}
    if strange:
        raise BitexactError(f"{destination} holds other patches: {', '.join(sorted(strange))}. Choose an empty folder.")
    placed = [destination / patch.name for patch in patches]
    for patch, place in zip(patches, placed, strict=True):
        place.write_bytes(patch.read_bytes())
    return placed


def _git(repository: Path, *arguments: str, text: str | None = None) -> None:
    # Neither the user's settings, nor those of a hook that calls us.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=repository, env=environment, input=text, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise _no_git() from error
    if done.returncode:
        raise BitexactError(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")


def _no_git() -> BitexactError:
    return BitexactError("`export` needs git, and there is none on the PATH.")
