"""``build``: a patched wheel from the released one, the same bytes every time."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import zipfile
from pathlib import Path

from sglang_bitexact.plan import Plan, make_plan
from sglang_bitexact.series import Series
from sglang_bitexact.upstream import Wheel

MANIFEST_NAME = "bitexact.json"
# The earliest time that a zip can hold: a build does not depend on the clock.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_FILE_MODE = 0o100644 << 16


def build(series: Series, wheel: Wheel, through: int, destination: Path) -> Path:
    """Write ``sglang-<version>+bitexact.<through>-<tags>.whl`` below ``destination``.

    Raises:
        BitexactError: an edit does not anchor (see ``make_plan``); nothing is written.
    """
    plan = make_plan(series, through, wheel.find, wheel.names.__contains__, wheel.version)
    version = f"{wheel.version}+{plan.version}"
    contents = _contents(wheel, plan, version)
    destination.mkdir(parents=True, exist_ok=True)
    path = destination / wheel.path.name.replace(f"-{wheel.version}-", f"-{version}-", 1)
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, (data, mode) in contents.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = mode
            archive.writestr(entry, data)
    partial.replace(path)
    return path


def _contents(wheel: Wheel, plan: Plan, version: str) -> dict[str, tuple[bytes, int]]:
    """Archive members in order: name -> (data, external attributes)."""
    old_info, new_info = (f"sglang-{v}.dist-info" for v in (wheel.version, version))
    members: dict[str, tuple[bytes, int]] = {}
    for entry in wheel.entries:
        name = entry.filename
        data = plan.edited.get(name)
        if data is None:
            data = wheel.read(name)
        if name == "sglang/_version.py":
            data = _version_module(data, wheel.version, plan.version)
        if name == f"{old_info}/METADATA":
            data = data.replace(f"\nVersion: {wheel.version}\n".encode(), f"\nVersion: {version}\n".encode(), 1)
        if name != f"{old_info}/RECORD":
            members[name.replace(f"{old_info}/", f"{new_info}/", 1)] = (data, entry.external_attr)
    for name, data in plan.added.items():
        members[name] = (data, _FILE_MODE)
    members[f"{new_info}/{MANIFEST_NAME}"] = (manifest(plan, wheel.version), _FILE_MODE)
    record = f"{new_info}/RECORD"
    rows = [record_row(name, data) for name, (data, _) in members.items()]
    members[record] = (write_record([*rows, (record, "", "")]), _FILE_MODE)
    return members


def _version_module(source: bytes, version: str, local: str) -> bytes:
    """``sglang.__version__`` of the patched wheel says so."""
    text = source.decode()
    numbers = ", ".join(version.split("."))
    text = text.replace(f"'{version}'", f"'{version}+{local}'")
    return text.replace(f"({numbers})", f"({numbers}, '{local}')").encode()


def manifest(plan: Plan, version: str) -> bytes:
    """``bitexact.json``: what was changed, for whoever meets the installed wheel."""
    content = {
        "sglang": version,
        "through": plan.through,
        "edited": sorted(plan.edited),
        "added": sorted(plan.added),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def record_row(name: str, data: bytes) -> tuple[str, str, str]:
    """A RECORD row: path, digest as the wheel format spells it, size."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return name, f"sha256={digest}", str(len(data))


def write_record(rows: list[tuple[str, ...]], newline: str = "\n") -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator=newline).writerows(rows)
    return buffer.getvalue().encode()
