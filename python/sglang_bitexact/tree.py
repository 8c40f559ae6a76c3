"""An SGLang on disk: installed, unpacked from a wheel, or a source checkout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from sglang_bitexact.errors import BitexactError
from sglang_bitexact.tree_version import found_version
from sglang_bitexact.upstream import PINNED_VERSION


class Tree:
    """``root`` is the directory that holds the package ``sglang/``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def locate(cls, path: Path | None) -> Tree:
        """The tree of ``find``, which the series can be applied to.

        Raises:
            BitexactError: no SGLang there, or not the pinned version.
        """
        return cls.find(path).checked()

    @classmethod
    def find(cls, path: Path | None) -> Tree:
        """The tree at ``path``, or the installed one.

        ``path``: what holds ``sglang/`` (site-packages, a checkout's ``python/``), the checkout
        itself, or the package. An installed tree may be an editable one: it is its checkout.

        Raises:
            BitexactError: no SGLang there.
        """
        if path is None:
            return cls(_installed())
        for root in (path, path / "python", path.parent):
            if (root / "sglang" / "__init__.py").is_file() and (root != path.parent or path.name == "sglang"):
                return cls(root.resolve())
        raise BitexactError(f"{path} holds no sglang package (no sglang/__init__.py, no python/sglang/__init__.py)")

    def checked(self) -> Tree:
        """This tree; BitexactError if it is another release, or holds the series since its build."""
        found = self.version
        if found.startswith(f"{PINNED_VERSION}+bitexact."):
            raise BitexactError(
                f"{self.root} was installed from a wheel that holds the series already ({found}). "
                f"To go back: pip install --no-deps sglang=={PINNED_VERSION}"
            )
        if found.partition("+")[0] != PINNED_VERSION:
            raise BitexactError(
                f"{self.root} is sglang {found}, the series is made for {PINNED_VERSION}. "
                f"Install that version; `sglang-bitexact check --sglang {found}` says what would have to change."
            )
        return self

    @property
    def version(self) -> str:
        """The release that this tree is; the pinned one where it does not say.

        A checkout between two releases does not, nor does one without tags: there the checksums
        of the edited files decide.
        """
        return found_version(self.root) or PINNED_VERSION

    def read(self, name: str) -> bytes | None:
        path = self.root / name
        return path.read_bytes() if path.is_file() else None

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    @property
    def record(self) -> str | None:
        """Path of the RECORD of this sglang below ``root``, or None in a source checkout."""
        found = sorted(self.root.glob(f"sglang-{self.version}.dist-info/RECORD"))
        return found[0].relative_to(self.root).as_posix() if found else None

    def bytecode(self, name: str) -> list[str]:
        """Compiled files of a module, below ``root``."""
        source = self.root / name
        if source.suffix != ".py":
            return []
        found = (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc")
        return sorted(path.relative_to(self.root).as_posix() for path in found)


def _installed() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise BitexactError(
            f"no sglang is installed for this Python: install sglang=={PINNED_VERSION}, or pass --tree PATH"
        )
    return Path(spec.origin).parent.parent
