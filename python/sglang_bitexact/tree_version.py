"""Which release an SGLang on disk is, as far as it says so itself."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

# A development version ("0.5.24.dev3+g1a2b3c4", "0.0.0.dev0") names no release.
_RELEASE = re.compile(r"\d+\.\d+\.\d+((rc|\.post)\d+)?(\+(?!.*dev).*)?")


def found_version(root: Path) -> str | None:
    """The release in ``root``, the directory that holds ``sglang/``; None if nothing there names one.

    Looked at in this order: the version file that a build writes (wheels and editable installs
    have it), a version in pyproject.toml, one in sglang/version.py, the tag at a checkout's HEAD.
    """
    sources: tuple[Callable[[Path], str | None], ...] = (_version_file, _pyproject, _version_module, _tag)
    found = (source(root) for source in sources)
    return next((version for version in found if version and _RELEASE.fullmatch(version)), None)


def _version_file(root: Path) -> str | None:
    return _search(root / "sglang" / "_version.py", r"^__version__ = version = '([^']+)'")


def _version_module(root: Path) -> str | None:
    return _search(root / "sglang" / "version.py", r"""^__version__ = ["']([^"']+)["']""")


def _search(file: Path, pattern: str) -> str | None:
    match = re.search(pattern, file.read_text(), re.MULTILINE) if file.is_file() else None
    return match[1] if match else None


def _pyproject(root: Path) -> str | None:
    file = root / "pyproject.toml"
    if not file.is_file():
        return None
    try:
        project = tomllib.loads(file.read_text()).get("project", {})
    except tomllib.TOMLDecodeError:
        return None
    version = project.get("version")
    return str(version) if project.get("name") == "sglang" and version else None


def _tag(root: Path) -> str | None:
    """Of setuptools_scm's sources the one that names a release: a tag at HEAD itself."""
    if root.name != "python" or not (root.parent / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--tags", "--exact-match", "--match", "v[0-9]*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip().removeprefix("v") if done.returncode == 0 else None
