"""Which files of a storage directory may go, and deleting them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from sglang_bitexact.doctor.storage import File, Health, Stored
from sglang_bitexact.errors import BitexactError


class Doomed(NamedTuple):
    """why: "quarantined", what an orphan lacks, "leftover", or the identity that is given up."""

    file: File
    why: str


def doomed(stored: Stored, health: Health, identities: Collection[str]) -> tuple[Doomed, ...]:
    """What no hit can use, and everything of ``identities``; each file once, by name.

    Files of a stock server and files whose names are not understood are never among them.

    Raises:
        BitexactError: nothing is stored under an identity.
    """
    known = {found.identity for found in stored.objects}
    if strange := sorted(set(identities) - known):
        raise BitexactError(
            f"nothing is stored under {', '.join(strange)}. There is: {', '.join(sorted(known)) or 'no identity'}."
        )
    found = [Doomed(file, "quarantined") for file in health.quarantined]
    found += [Doomed(file, "leftover") for file in health.temporary]
    found += [Doomed(each.file, orphan.lacks) for orphan in health.orphans for each in orphan.objects]
    found += [Doomed(each.file, each.identity) for each in stored.objects if each.identity in identities]
    first: dict[str, Doomed] = {}
    for each in found:
        first.setdefault(each.file.name, each)
    return tuple(first[name] for name in sorted(first))


def delete(directory: Path, files: Collection[Doomed]) -> None:
    """Delete ``files``. A server may run meanwhile: to it they are pages that are not stored."""
    for each in files:
        (directory / each.file.name).unlink(missing_ok=True)
