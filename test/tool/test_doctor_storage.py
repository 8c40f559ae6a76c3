"""doctor on a storage directory: what is whole, what is not, and what --prune may delete."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from kit.toy_series import make_series, make_tree
from sglang_bitexact import cli
from sglang_bitexact.doctor.environment import VARIABLES
from sglang_bitexact.doctor.storage import File, sort_out

ONE, TWO = (f"bitexact1-{digit * 32}" for digit in "12")
PAGE = ("", "deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128", "bitexact_page")
TILE = ("swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state", "bitexact_tile")
A, B, C = (digit * 64 for digit in "abc")
HOURS = 3600


class Directory:
    """A storage directory; files are two hours old unless told otherwise, and 10 B long."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def add(self, name: str, *, hours: float = 2) -> str:
        file = self.path / name
        file.write_bytes(bytes(10))
        stamp = time.time() - hours * HOURS
        os.utime(file, (stamp, stamp))
        return name

    def put(self, key: str, pools=(*PAGE, *TILE), suffix: str = f"tiny-{ONE}", *, end: str = ".bin", hours: float = 2):
        """One object per pool; "" is the anchor. Returns the names."""
        return [
            self.add(f"{key}.{pool}_{suffix}{end}" if pool else f"{key}_{suffix}{end}", hours=hours) for pool in pools
        ]

    def names(self) -> set[str]:
        return {path.name for path in self.path.iterdir()}


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Directory:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return Directory(tmp_path / "l3")


@pytest.fixture
def doctor(tmp_path, directory, capsys):
    """The command on this directory and a stock tree: (exit code, report)."""
    fixed = ["--tree", str(make_tree(tmp_path / "site")), "--series", str(make_series(tmp_path / "series")), "--json"]

    def run(*arguments: str):
        code = cli.main(["doctor", *fixed, "--storage", str(directory.path), *arguments])
        return code, json.loads(capsys.readouterr().out)

    return run


def orphans(report: dict) -> dict[str, int]:
    return report["storage"]["orphans"]["kinds"]


def test_whole_pages_and_tiles_are_counted_by_identity(directory, doctor):
    directory.put(A)
    directory.put(B, PAGE)
    directory.put(A, suffix=f"org-model_v2-{TWO}_2_0_cp1_2")
    directory.add(f"{A}_tiny.bin")
    directory.add(f"{A}.deepseek_v4_c4_tiny-unified-token-major.bin")
    directory.add("notes.txt")
    code, report = doctor()
    assert (code, report["wrong"]) == (0, [])
    assert report["storage"] == {
        "identities": [
            {"identity": ONE, "pages": 2, "tiles": 1, "files": 14, "bytes": 140},
            {"identity": TWO, "pages": 1, "tiles": 1, "files": 9, "bytes": 90},
        ],
        "orphans": {"files": 0, "bytes": 0, "kinds": {}},
        "unfinished": 0,
        "quarantined": {"files": 0, "bytes": 0},
        "leftover": {"files": 0, "bytes": 0},
        "stock": {"files": 2, "bytes": 20},
        "other": {"files": 1, "bytes": 10},
    }


@pytest.mark.parametrize(
    ("pools", "kinds"),
    [
        (TILE, {"tile without its page": 1}),
        ((*PAGE, *TILE[:-1]), {"tile without its digest": 1}),
        ((*PAGE, TILE[-1]), {"digest without its tile": 1}),
        ((*PAGE, TILE[0], TILE[-1]), {"tile in pieces": 1}),
        ((*PAGE, *TILE[1:]), {"tile in pieces": 1}),
        (PAGE[:-1], {"page without its digest": 1}),
        (PAGE[-1:], {"digest without its page": 1}),
        (PAGE[1:], {"page in pieces": 1}),
        ((*PAGE[:2], *PAGE[3:]), {"page in pieces": 1}),
        ((*PAGE[:-1], *TILE), {"page without its digest": 1, "tile without its page": 1}),
        ((*PAGE[:-1], *TILE[1:]), {"page without its digest": 1, "tile in pieces": 1}),
    ],
)
def test_what_is_no_part_of_a_whole_page_or_tile_is_an_orphan(directory, doctor, pools, kinds):
    directory.put(A)
    directory.put(B, pools)
    code, report = doctor()
    assert (code, orphans(report)) == (1, kinds)
    whole = sum(set(names) <= set(pools) for names in (PAGE, TILE)) if set(PAGE) <= set(pools) else 0
    count = report["storage"]["orphans"]["files"]
    assert count == len(pools) - (len(PAGE) if whole else 0)
    are = "1 file is" if count == 1 else f"{count} files are"
    assert report["verdict"] == f"wrong: storage: {are} no part of a whole page or tile"
    # The same a moment ago: a server may be writing it.
    for name in directory.names():
        os.utime(directory.path / name)
    code, report = doctor()
    assert (code, orphans(report), report["storage"]["unfinished"]) == (0, {}, sum(kinds.values()))


def test_objects_of_different_ranks_and_models_do_not_complete_each_other(directory, doctor):
    directory.put(A, suffix=f"tiny-{ONE}_2_0")
    directory.put(B, PAGE, suffix=f"tiny-{ONE}_2_0")
    directory.put(B, TILE, suffix=f"tiny-{ONE}_2_1")
    assert orphans(doctor()[1]) == {"tile without its page": 1}


def test_quarantined_files_and_old_leftovers_are_wrong(directory, doctor):
    directory.put(A)
    directory.put(B, PAGE, end=".bin.quarantined")
    directory.add(f".{'0' * 32}.tmp")
    directory.add(f".{'1' * 32}.tmp", hours=0.9)
    code, report = doctor()
    assert (code, report["storage"]["quarantined"], report["storage"]["leftover"]) == (
        1,
        {"files": 5, "bytes": 50},
        {"files": 1, "bytes": 10},
    )
    assert report["wrong"] == ["storage: 5 files are quarantined", "storage: 1 file is left behind half-written"]
    assert report["verdict"] == "wrong: storage: 5 files are quarantined (and 1 more)"
    assert report["storage"]["identities"] == [{"identity": ONE, "pages": 1, "tiles": 1, "files": 14, "bytes": 140}]
    directory.put(B, TILE)
    assert orphans(doctor()[1]) == {"tile without its page": 1}


@pytest.mark.parametrize(
    ("pools", "kinds"),
    [
        ((*PAGE, *TILE[1:]), {"tile in pieces": 1}),
        ((*PAGE, *TILE[:-1]), {"tile without its digest": 1}),
        (PAGE[:-1], {"page without its digest": 1}),
        (PAGE[1:], {"page in pieces": 1}),
    ],
)
def test_anchor_window_and_digests_are_missed_even_where_none_has_them(directory, doctor, pools, kinds):
    directory.put(A, pools)
    assert orphans(doctor()[1]) == kinds


def test_prune_lists_and_deletes_only_with_yes(directory, doctor):
    directory.put(A)
    directory.put(A, suffix=f"tiny-{TWO}")
    directory.add(f"{A}_tiny.bin")
    directory.add(f"{C}.swa_tiny.bin.quarantined")
    directory.add(f".{'1' * 32}.tmp", hours=0.9)
    directory.put(C, TILE, hours=0.9)
    directory.add(f"{A}.unheard-of_tiny-{ONE}.bin")
    kept = directory.names()
    why = dict.fromkeys(directory.put(B, TILE), "tile without its page")
    why |= dict.fromkeys(directory.put(C, PAGE, end=".bin.quarantined", hours=0), "quarantined")
    why[directory.add(f".{'0' * 32}.tmp")] = "leftover"
    code, report = doctor("--prune")
    assert code == 1 and not report["prune"]["deleted"]
    assert {each["name"]: each["why"] for each in report["prune"]["list"]} == why
    assert (report["prune"]["files"], report["prune"]["bytes"]) == (10, 100)
    assert directory.names() == kept | why.keys()
    code, report = doctor("--prune", "--yes")
    assert (code, report["wrong"], report["prune"]["deleted"], report["prune"]["files"]) == (0, [], True, 10)
    assert directory.names() == kept


def test_prune_gives_up_an_identity(directory, doctor):
    directory.put(A)
    kept = directory.names()
    gone = directory.put(A, suffix=f"tiny-{TWO}") + directory.put(B, PAGE, f"x-{TWO}", end=".bin.quarantined")
    code, report = doctor("--prune", "--identity", TWO)
    assert {each["name"] for each in report["prune"]["list"]} == set(gone)
    assert code == 1 and {each["why"] for each in report["prune"]["list"]} == {TWO, "quarantined"}
    assert doctor("--prune", "--identity", TWO, "--yes")[0] == 0
    assert directory.names() == kept
    code, report = doctor("--prune", "--identity", TWO, "--yes")
    assert code == 2 and report["error"] == f"nothing is stored under {TWO}. There is: {ONE}."
    assert directory.names() == kept


def test_a_name_with_two_readings_is_read_by_the_models_that_are_there():
    """A model "indexer_x": its c4 rows look like the index keys of a model "x"."""
    name = f"{A}.deepseek_v4_c4_indexer_x-{ONE}.bin"
    anchors = {model: f"{B}_{model}-{ONE}.bin" for model in ("x", "indexer_x")}

    def pool(*names: str) -> str | None:
        stored = sort_out(File(each, 0, 0.0) for each in names)
        return next((found.pool for found in stored.objects if found.key == A), None)

    assert pool(name, anchors["indexer_x"]) == "deepseek_v4_c4"
    assert pool(name, anchors["x"]) == "deepseek_v4_c4_indexer"
    assert pool(name) is None and pool(name, *anchors.values()) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prune"], "--prune needs --storage"),
        (["--storage", ".", "--yes"], "belong to --prune"),
        (["--storage", ".", "--identity", ONE], "belong to --prune"),
        (["--storage", "/nowhere"], "/nowhere is no directory"),
    ],
)
def test_what_cannot_be_carried_out_is_said(tmp_path, capsys, arguments, words):
    tree, series = make_tree(tmp_path / "site"), make_series(tmp_path / "series")
    assert cli.main(["doctor", "--tree", str(tree), "--series", str(series), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_links_and_folders_are_left_alone(directory, doctor, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("")
    link = directory.path / f".{'0' * 32}.tmp"
    link.symlink_to(outside)
    os.utime(link, (0, 0), follow_symlinks=False)
    (directory.path / f"{A}_tiny-{ONE}.bin.quarantined").mkdir()
    code, report = doctor("--prune", "--yes")
    assert (code, report["prune"]["list"]) == (0, []) and outside.exists() and len(directory.names()) == 2
