"""What is wrong, and the line at the end."""

from __future__ import annotations

from typing import NamedTuple

from sglang_bitexact.doctor.environment import Environment, Platform
from sglang_bitexact.doctor.launch import Launch
from sglang_bitexact.doctor.prune import Doomed
from sglang_bitexact.doctor.server import Server
from sglang_bitexact.doctor.storage import Health
from sglang_bitexact.doctor.tree import Diagnosis
from sglang_bitexact.series import SWITCH


class Findings(NamedTuple):
    """Everything that was looked at; None where it was not."""

    tree: Diagnosis | None
    environment: Environment
    platform: Platform
    server: Server | None
    launch: Launch | None
    storage: Health | None
    # None without --prune.
    doomed: tuple[Doomed, ...] | None = None
    deleted: bool = False


def problems(found: Findings, last_part: int) -> list[str]:
    """What is wrong, most important first; last_part: of the series."""
    return [*_of_tree(found, last_part), *_of_launch(found), *_of_storage(found.storage)]


def _of_tree(found: Findings, last_part: int) -> list[str]:
    tree, switch = found.tree, found.environment.switch
    if tree is None:
        return []
    parts = f"parts 1 to {tree.through}"
    if tree.condition == "interrupted":
        return [f"an apply or revert of {parts} was interrupted: run `sglang-bitexact revert`"]
    if tree.condition == "tampered":
        files = ", ".join(tree.changed)
        if tree.through is None:
            return [f"the series is not applied, and these files are not those of sglang {tree.version}: {files}"]
        return [f"{parts} are in the tree, and these files were changed since: {files}"]
    if switch and tree.condition == "stock":
        return [f"{SWITCH} is on, and this sglang is stock: it has no effect"]
    if switch and tree.through is not None and tree.through < last_part:
        return [f"{SWITCH} is on, and only {parts} are in the tree: a server does not start"]
    return []


def _of_launch(found: Findings) -> list[str]:
    server = found.server
    wrong = []
    if server is not None and server.environment.switch and not server.holds_series:
        wrong.append(f"{SWITCH} is on, and the server runs without the series: restart it after `apply`")
    stock = found.tree is None or found.tree.condition == "stock"
    # Of a stock tree with the switch off it is told, and nothing is wrong.
    if found.launch is not None and (found.environment.switch or not stock):
        wrong += found.launch.fire
    return wrong


def _of_storage(health: Health | None) -> list[str]:
    if health is None:
        return []
    counts = {
        "quarantined": len(health.quarantined),
        "no part of a whole page or tile": sum(len(orphan.objects) for orphan in health.orphans),
        "left behind half-written": len(health.temporary),
    }
    return [f"storage: {_files(count)} {what}" for what, count in counts.items() if count]


def _files(count: int) -> str:
    return "1 file is" if count == 1 else f"{count} files are"


def verdict(found: Findings, wrong: list[str]) -> str:
    """One line."""
    if wrong:
        return "wrong: " + wrong[0].rstrip(".") + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
    switch = {True: "on", False: "off", None: "not known"}[found.environment.switch]
    return f"healthy: {_subject(found)}, switch {switch}"


def _subject(found: Findings) -> str:
    if found.tree is not None:
        if found.tree.through is None:
            return f"sglang {found.tree.version}, stock"
        return f"sglang {found.tree.version} with parts 1 to {found.tree.through}, intact"
    if found.server is not None:
        return f"server sglang {found.server.version}, {'with the series' if found.server.holds_series else 'stock'}"
    return "storage"
