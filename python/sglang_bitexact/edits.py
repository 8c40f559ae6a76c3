"""The structural edits: what a ``*.edits.yaml`` may say."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sglang_bitexact.errors import BitexactError

Operation = Literal["append", "before", "after", "keyword", "parameter", "callee", "replace"]
_NEEDS_PATTERN = ("keyword", "callee", "replace")
PARTS = range(1, 6)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Anchor(_Strict):
    """The place of an edit: a class, a function in it (or in the module), a pattern in that.

    ``pattern`` is an ast-grep pattern (``$X`` one node, ``$$$`` any number).
    """

    class_: str | None = Field(default=None, alias="class")
    function: str | None = None
    pattern: str | None = None

    def __str__(self) -> str:
        parts = [("class", self.class_), ("function", self.function), ("pattern", self.pattern)]
        return ", ".join(f"{name} {value!r}" for name, value in parts if value is not None)


class Edit(_Strict):
    """One edit.

    do: ``append`` text to a class or function body, put it ``before`` or ``after`` the
    statement that holds the pattern (or the function itself), add it as a ``keyword``
    argument to the matched call or as a ``parameter`` to the function, call it with the
    matched call's arguments (``callee``), or ``replace`` the matched expression with it.
    """

    part: int = Field(ge=PARTS.start, lt=PARTS.stop)
    why: str = Field(min_length=10)
    at: Anchor
    do: Operation
    text: str = Field(min_length=1)

    @model_validator(mode="after")
    def _anchor_fits_operation(self) -> Edit:
        if self.do in _NEEDS_PATTERN and self.at.pattern is None:
            raise ValueError(f"do: {self.do} needs at.pattern")
        if self.do in ("before", "after") and not (self.at.pattern or self.at.function):
            raise ValueError(f"do: {self.do} needs at.pattern or at.function")
        if self.do == "append" and (self.at.pattern or not (self.at.class_ or self.at.function)):
            raise ValueError("do: append needs at.class or at.function and no at.pattern")
        if self.do == "parameter" and (self.at.pattern or not self.at.function):
            raise ValueError("do: parameter needs at.function and no at.pattern")
        return self

    @property
    def code(self) -> str:
        """Our text without common indentation and outer blank lines."""
        return textwrap.dedent(self.text).strip("\n")


class EditFile(_Strict):
    """All edits of one upstream file.

    sha256: of the upstream file that they were written against.
    """

    target: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    edits: tuple[Edit, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _each_edit_once(self) -> EditFile:
        seen: set[tuple[Anchor, str, str]] = set()
        for number, edit in enumerate(self.edits, start=1):
            key = (edit.at, edit.do, edit.code)
            if key in seen:
                raise ValueError(f"edit {number} ({edit.do} at {edit.at}) is there twice: remove one")
            seen.add(key)
        return self

    def through(self, part: int) -> tuple[Edit, ...]:
        return tuple(edit for edit in self.edits if edit.part <= part)


def load_edit_file(path: Path, series: Path) -> EditFile:
    """Read and check one YAML file; its target must be the file it lies beside.

    Raises:
        BitexactError: names the file and what is wrong.
    """
    try:
        content = EditFile.model_validate(yaml.safe_load(path.read_text()))
    except (ValidationError, yaml.YAMLError) as error:
        raise BitexactError(f"{path}: {error}") from error
    beside = f"sglang/{path.relative_to(series).as_posix()}".removesuffix(".edits.yaml") + ".py"
    if content.target != beside:
        raise BitexactError(f"{path}: target is {content.target}, expected {beside}: the file beside it")
    return content
