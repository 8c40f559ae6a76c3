"""The released SGLang wheels: download by pip, checksum from our lock, read and unpack."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cached_property
from pathlib import Path

from sglang_bitexact.errors import BitexactError

_LOCK = json.loads(Path(__file__).with_name("upstream.lock.json").read_text())
PINNED_VERSION: str = _LOCK["version"]


def cache_directory() -> Path:
    """Where wheels are kept: ``$XDG_CACHE_HOME/sglang-bitexact``, made if needed."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "sglang-bitexact"
    path.mkdir(parents=True, exist_ok=True)
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Wheel:
    """A wheel file, read without unpacking it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)

    @property
    def version(self) -> str:
        return self.path.name.split("-")[1]

    @property
    def entries(self) -> list[zipfile.ZipInfo]:
        return [entry for entry in self._archive.infolist() if not entry.is_dir()]

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(entry.filename for entry in self.entries)

    def read(self, name: str) -> bytes:
        return self._archive.read(name)

    def find(self, name: str) -> bytes | None:
        """As ``read``; None where there is no such file."""
        return self.read(name) if name in self.names else None

    def unpack(self, directory: Path) -> None:
        """Extract everything below ``directory``, with the default modes of new files."""
        self._archive.extractall(directory)


def download(version: str = PINNED_VERSION) -> Wheel:
    """The wheel of ``version`` for this Python and platform, from the cache or by pip.

    The pinned version's checksum must be the one in our lock; another version is only
    ever read, by ``check``.

    Raises:
        BitexactError: pip found no wheel, or the checksum differs.
    """
    directory = cache_directory() / "wheels" / f"{version}-{sys.implementation.cache_tag}"
    found = sorted(directory.glob("sglang-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        result = subprocess.run(
            [*command, "--dest", str(directory), f"sglang=={version}"], capture_output=True, text=True
        )
        found = sorted(directory.glob("sglang-*.whl"))
        if result.returncode != 0 or not found:
            raise BitexactError(
                f"pip could not download a wheel of sglang=={version} for Python "
                f"{sys.version_info.major}.{sys.version_info.minor}: {result.stderr.strip()[-500:]}"
            )
    wheel = Wheel(found[0])
    if version == PINNED_VERSION:
        verify(wheel.path)
    return wheel


def unpacked(wheel: Wheel) -> Path:
    """A directory with the wheel's files, from the cache; keyed by the wheel's content.

    Safe to call from several processes at once: the first one that is done wins.
    """
    trees = cache_directory() / "trees"
    target = trees / sha256(wheel.path.read_bytes())[:16]
    if not target.is_dir():
        trees.mkdir(exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix="unpacking-", dir=trees))
        wheel.unpack(partial)
        with contextlib.suppress(OSError):
            partial.rename(target)
        shutil.rmtree(partial, ignore_errors=True)
    return target


def verify(path: Path) -> None:
    """Raise BitexactError unless ``path`` is the wheel that our lock records."""
    expected = _LOCK["wheels"].get(path.name)
    if expected is None:
        raise BitexactError(
            f"{path.name} is not in upstream.lock.json, which records {', '.join(_LOCK['wheels'])}. "
            "Use one of these Python versions and platforms."
        )
    found = sha256(path.read_bytes())
    if found != expected:
        raise BitexactError(
            f"{path} has sha256 {found}, expected {expected}. The download is damaged or not the "
            "released wheel: delete the file and try again."
        )
