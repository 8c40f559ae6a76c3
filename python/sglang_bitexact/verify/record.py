"""Finished comparisons, kept in a file if wanted, so that an interrupted run can go on."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sglang_bitexact.errors import BitexactError
from sglang_bitexact.verify.answer import Difference

COLD = "cold"


class Record(NamedTuple):
    """One prompt asked again.

    key: names prompt, depth and tier. asked: the tier that was meant, or ``COLD`` for a second
    cold run. tier: where the hit was; None without one, and for a cold run. held: tokens of the
    prompt that had been cached; nominal_tokens: what whole pages of these could give.
    """

    key: str
    kind: str
    asked: str
    tier: str | None
    seed: int
    length: int
    held: int
    cached_tokens: int
    nominal_tokens: int
    difference: Difference | None
    repeat: str


class Log:
    """Records in the order in which they were added; with ``path``, also lines of JSON in that file.

    The first line names ``settings``: comparisons of other settings do not mix.
    """

    def __init__(self, path: Path | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        if path is not None:
            self._open(path, dict(settings or {}))

    def _open(self, path: Path, settings: dict[str, Any]) -> None:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings) + "\n")
            return
        # What a kill cut off in the middle of a line has no line end; it is done again.
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]
        try:
            found, *lines = [json.loads(line) for line in whole.splitlines()]
            for line in lines:
                difference = None if line["difference"] is None else Difference(*line["difference"])
                record = Record(**{**line, "difference": difference})
                self._records[record.key] = record
        except (ValueError, TypeError, KeyError) as error:
            raise BitexactError(f"{path} is no state file of verify: {error}. Name another file.") from error
        if found != settings:
            raise BitexactError(
                f"{path} was written with {found}, this run has {settings}: the comparisons would mix. "
                "Name another file, or repeat the settings."
            )
        if whole != text:
            path.write_text(whole)

    def add(self, record: Record) -> None:
        with self._lock:
            self._records[record.key] = record
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(record._asdict()) + "\n")

    def __contains__(self, key: str) -> bool:
        return key in self._records

    @property
    def records(self) -> list[Record]:
        with self._lock:
            return list(self._records.values())
