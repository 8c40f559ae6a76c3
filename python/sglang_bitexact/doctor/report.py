"""A diagnosis as JSON data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from sglang_bitexact.doctor.environment import Environment
from sglang_bitexact.doctor.launch import Launch
from sglang_bitexact.doctor.prune import Doomed
from sglang_bitexact.doctor.server import Server
from sglang_bitexact.doctor.storage import File, Health
from sglang_bitexact.doctor.tree import Diagnosis
from sglang_bitexact.doctor.verdict import Findings


def as_json(found: Findings, wrong: list[str], line: str, code: int) -> dict[str, Any]:
    return {
        "tree": found.tree._asdict() if found.tree else None,
        "platform": found.platform._asdict(),
        "environment": {**found.environment._asdict(), "switch": found.environment.switch},
        "server": _server_json(found.server) if found.server else None,
        "guards": _guards_json(found.launch) if found.launch else None,
        "memory": found.launch.memory if found.launch else None,
        "storage": _storage_json(found.storage) if found.storage else None,
        "prune": None if found.doomed is None else _prune_json(found.doomed, found.deleted),
        "wrong": wrong,
        "verdict": line,
        "exit_code": code,
    }


def as_text(found: Findings, wrong: list[str], line: str) -> str:
    blocks = [
        *(_tree_text(found.tree) if found.tree else ["tree: none was looked at"]),
        _platform_text(found),
        _environment_text(found.environment),
        *(_server_text(found.server) if found.server else []),
        *(_launch_text(found.launch) if found.launch else []),
        *(_storage_text(found.storage) if found.storage else []),
        *(_prune_text(found.doomed, found.deleted) if found.doomed is not None else []),
        *(f"wrong: {each}" for each in wrong[1:]),
        line,
    ]
    return "\n".join(blocks)


def _tree_text(tree: Diagnosis) -> Iterator[str]:
    parts = f", parts 1 to {tree.through}" if tree.through else ""
    yield f"tree {tree.root}: sglang {tree.version}, {tree.condition}{parts}"
    yield from (f"  changed {name}" for name in tree.changed)
    yield from (f"  local changes were kept in {name}" for name in tree.local)


def _platform_text(found: Findings) -> str:
    platform = found.platform
    device = "" if platform.device else ", no device on this machine"
    return f"platform: {platform.kind}, torch {platform.torch or 'is not installed'}{device}"


def _environment_text(environment: Environment) -> str:
    if environment.variables is None:
        return f"environment of {environment.of}"
    values = [f"{name}={value}" for name, value in environment.variables.items()]
    return f"environment of {environment.of}: {', '.join(values) or 'nothing that matters is set'}"


def _server_json(server: Server) -> dict[str, Any]:
    return {
        "url": server.url,
        "version": server.version,
        "holds_series": server.holds_series,
        "arguments": server.arguments,
    }


def _server_text(server: Server) -> Iterator[str]:
    yield f"server {server.url}: sglang {server.version}, {'with the series' if server.holds_series else 'stock'}"
    yield from (f"  {name} {value}" for name, value in server.arguments.items())


def _guards_json(launch: Launch) -> dict[str, Any]:
    return {"fire": launch.fire, "unknown": launch.unknown, "error": launch.error}


def _launch_text(launch: Launch) -> Iterator[str]:
    if launch.error is not None:
        yield f"guards: this sglang could not be asked: {launch.error}"
        return
    yield f"guards: {len(launch.fire) or 'none'} would refuse this launch with the switch on"
    yield from (f"  {problem}" for problem in launch.fire)
    if launch.unknown:
        yield f"  not known from here: {', '.join(launch.unknown)}"
    if launch.memory is not None:
        memory = launch.memory
        words = {
            "device_tiles": "{:,} on the device",
            "device_tiles_needed": "of which {:,} are needed",
            "host_tiles": "{:,} on the host",
        }
        counts = [text.format(memory[name]) for name, text in words.items() if memory[name] is not None]
        when = " with the switch on, about" if memory["planned"] else ""
        yield f"tiles{when}: {memory['tile_bytes']:,} B each (a page: {memory['page_bytes']:,} B), {', '.join(counts)}"


def _total(files: Iterable[File]) -> dict[str, int]:
    sizes = [file.size for file in files]
    return {"files": len(sizes), "bytes": sum(sizes)}


def _storage_json(health: Health) -> dict[str, Any]:
    orphans = [each.file for orphan in health.orphans for each in orphan.objects]
    return {
        "identities": [identity._asdict() for identity in health.identities],
        "orphans": {**_total(orphans), "kinds": dict(Counter(orphan.lacks for orphan in health.orphans))},
        "unfinished": health.unfinished,
        "quarantined": _total(health.quarantined),
        "leftover": _total(health.temporary),
        "stock": _total(health.stock),
        "other": _total(health.other),
    }


def _storage_text(health: Health) -> Iterator[str]:
    content = _storage_json(health)
    for found in health.identities:
        yield (
            f"storage {found.identity}: {found.pages} pages, {found.tiles} tiles; "
            f"{found.files} files, {found.bytes:,} B"
        )
    for name in ("orphans", "quarantined", "leftover", "stock", "other"):
        kinds = content[name].get("kinds") or {}
        why = f" ({', '.join(f'{count} x {kind}' for kind, count in kinds.items())})" if kinds else ""
        yield f"storage {name}: {content[name]['files']} files, {content[name]['bytes']:,} B{why}"
    if health.unfinished:
        yield f"storage unfinished: {health.unfinished} pages or tiles, perhaps being written"


def _prune_json(files: tuple[Doomed, ...], deleted: bool) -> dict[str, Any]:
    listed = [{"name": each.file.name, "bytes": each.file.size, "why": each.why} for each in files]
    return {"deleted": deleted, **_total(each.file for each in files), "list": listed}


def _prune_text(files: tuple[Doomed, ...], deleted: bool) -> Iterator[str]:
    total = _total(each.file for each in files)
    done = "deleted" if deleted else "would delete (with --yes)"
    yield f"{done}: {total['files']} files, {total['bytes']:,} B"
    yield from (f"  {each.file.name}: {each.why}" for each in files)
