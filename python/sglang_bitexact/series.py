"""The patch series: where it lies, its parts, its new files and its edits."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from sglang_bitexact.edits import PARTS, EditFile, load_edit_file
from sglang_bitexact.errors import BitexactError

# The environment variable that turns the feature on.
SWITCH = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"
_EDITS_SUFFIX = ".edits.yaml"
_MANIFEST = "series.yaml"
_IGNORED_PARTS = ("__pycache__",)


class Part(BaseModel):
    """One part of the series. does: for its commit. adds: new files, relative to ``sglang/``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    title: str
    does: str = ""
    adds: tuple[str, ...] = ()


class Series:
    """``python/sglang`` of this project, or the copy of it inside our wheel."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / _MANIFEST).is_file():
            raise BitexactError(f"{root} holds no {_MANIFEST}: it is not the series")

    @classmethod
    def default(cls) -> Series:
        """The checkout's series if the tool runs from one, else the packaged copy."""
        package = Path(__file__).parent
        checkout = package.parent / "sglang"
        return cls(checkout if (checkout / _MANIFEST).is_file() else package / "series")

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        path = self.root / _MANIFEST
        try:
            parts = tuple(Part.model_validate(entry) for entry in yaml.safe_load(path.read_text())["parts"])
        except (ValidationError, yaml.YAMLError, KeyError, TypeError) as error:
            raise BitexactError(f"{path}: {error}") from error
        numbers = [part.number for part in parts]
        if numbers != list(PARTS)[: len(numbers)] or not numbers:
            raise BitexactError(f"{path}: parts are numbered {numbers}, expected 1, 2, ... without a gap")
        return parts

    @property
    def last_part(self) -> int:
        return self.parts[-1].number

    def check_part(self, through: int | None) -> int:
        """``through``, or the last part if it is None; BitexactError if there is no such part."""
        if through is None:
            return self.last_part
        if not 1 <= through <= self.last_part:
            raise BitexactError(f"--through {through}: the series has parts 1 to {self.last_part}")
        return through

    @cached_property
    def edit_files(self) -> tuple[EditFile, ...]:
        """All edit files, by target."""
        paths = sorted(self.root.rglob(f"*{_EDITS_SUFFIX}"))
        return tuple(load_edit_file(path, self.root) for path in paths)

    def new_files(self, through: int) -> dict[str, Path]:
        """New files of parts 1 to ``through``: path below ``sglang/``'s parent -> source.

        Raises:
            BitexactError: a file belongs to no part, or a part names a missing file.
        """
        named = {name: part.number for part in self.parts for name in part.adds}
        present = {
            path.relative_to(self.root).as_posix()
            for path in self.root.rglob("*")
            if path.is_file() and not set(path.parts) & set(_IGNORED_PARTS)
        }
        present = {name for name in present if name != _MANIFEST and not name.endswith(_EDITS_SUFFIX)}
        if present != set(named):
            stray, missing = sorted(present - set(named)), sorted(set(named) - present)
            raise BitexactError(
                f"{self.root / _MANIFEST} and the files beside it differ: in no part {stray}, "
                f"named but missing {missing}. List every new file under the part that adds it."
            )
        return {f"sglang/{name}": self.root / name for name, part in sorted(named.items()) if part <= through}
