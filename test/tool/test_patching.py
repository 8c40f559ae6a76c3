"""apply, revert and status: all or nothing, and byte for byte back."""

from __future__ import annotations

import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from kit.toy_series import make_series, make_tree, snapshot
from sglang_bitexact import journal, patching
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.series import Series
from sglang_bitexact.tree import Tree


def test_apply_revert_round_trip(tree, series):
    before = snapshot(tree.root)
    done = patching.apply(tree, series, 2)
    assert (done.condition, done.through, done.changed) == ("applied", 2, ())
    assert "def match(self, key, limit=None, reuse=False)" in (tree.root / "sglang/srt/cache.py").read_text()
    assert (tree.root / "sglang/srt/tiles/layout.py").read_text() == "ROWS = 128\n"
    assert patching.revert(tree).condition == "not applied"
    assert snapshot(tree.root) == before


def test_through_applies_the_first_parts_only(tree, series):
    patching.apply(tree, series, 1)
    assert "reuse" not in (tree.root / "sglang/srt/cache.py").read_text()
    assert "def restore" in (tree.root / "sglang/srt/cache.py").read_text()
    assert not (tree.root / "sglang/srt/tiles").exists()


def test_applying_twice_does_nothing_and_other_parts_are_refused(tree, series):
    patching.apply(tree, series, 1)
    once = snapshot(tree.root)
    assert patching.apply(tree, series, 1).condition == "applied"
    assert snapshot(tree.root) == once
    with pytest.raises(BitexactError, match="revert"):
        patching.apply(tree, series, 2)
    assert snapshot(tree.root) == once


def test_an_edited_series_must_be_reverted_first(tree, series):
    patching.apply(tree, series, 1)
    path = series.root / "srt/loop.edits.yaml"
    path.write_text(path.read_text().replace("restore(batch)", "restore_all(batch)"))
    with pytest.raises(BitexactError, match="revert"):
        patching.apply(tree, Series(series.root), 1)
    patching.revert(tree)
    patching.apply(tree, Series(series.root), 1)
    assert "restore_all" in (tree.root / "sglang/srt/loop.py").read_text()


def test_local_changes_are_refused_with_the_list(tree, series):
    for name in ("cache", "loop"):
        path = tree.root / f"sglang/srt/{name}.py"
        path.write_text(path.read_text() + "# mine\n")
    before = snapshot(tree.root)
    with pytest.raises(BitexactError, match=r"cache\.py \(changed\), sglang/srt/loop\.py \(changed\)"):
        patching.apply(tree, series, 2)
    assert snapshot(tree.root) == before


def test_a_missing_file_and_a_file_in_the_way_are_refused(tree, series):
    (tree.root / "sglang/srt/tiles").mkdir()
    (tree.root / "sglang/srt/tiles/layout.py").write_text("theirs\n")
    before = snapshot(tree.root)
    with pytest.raises(BitexactError, match=r"already exist.*layout"):
        patching.apply(tree, series, 2)
    (tree.root / "sglang/srt/loop.py").unlink()
    with pytest.raises(BitexactError, match=r"loop\.py \(missing\)"):
        patching.apply(tree, series, 2)
    (tree.root / "sglang/srt/loop.py").write_bytes(before["sglang/srt/loop.py"][0])
    assert (tree.root / "sglang/srt/tiles/layout.py").read_text() == "theirs\n"


def test_an_edit_that_does_not_anchor_leaves_the_tree_alone(tree, series):
    path = series.root / "srt/loop.edits.yaml"
    path.write_text(path.read_text().replace("run($$$)", "walk($$$)"))
    before = snapshot(tree.root)
    with pytest.raises(BitexactError, match="matches 0 times"):
        patching.apply(tree, Series(series.root), 2)
    assert snapshot(tree.root) == before


def test_changes_after_apply_are_reported_and_not_lost(tree, series):
    original = snapshot(tree.root)
    patching.apply(tree, series, 2)
    path = tree.root / "sglang/srt/loop.py"
    path.write_text(path.read_text() + "# mine\n")
    found = patching.status(tree)
    assert (found.condition, found.changed) == ("changed", ("sglang/srt/loop.py",))
    with pytest.raises(BitexactError, match=r"loop\.py.*--force"):
        patching.revert(tree)
    assert path.read_text().endswith("# mine\n")
    assert patching.revert(tree, force=True).condition == "not applied"
    assert snapshot(tree.root) == original


def test_compiled_files_come_back_too(tree, series):
    compiled = Path(py_compile.compile(str(tree.root / "sglang/srt/cache.py"), doraise=True))
    before = snapshot(tree.root)
    patching.apply(tree, series, 2)
    for name in ("cache", "tiles/layout"):
        py_compile.compile(str(tree.root / f"sglang/srt/{name}.py"), doraise=True)
    assert compiled.read_bytes() != before[compiled.relative_to(tree.root).as_posix()][0]
    patching.revert(tree)
    assert snapshot(tree.root) == before


def test_linked_files_follow_the_series(tree, series):
    before = snapshot(tree.root)
    patching.apply(tree, series, 2, link=True)
    (series.root / "srt/tiles/layout.py").write_text("ROWS = 64\n")
    assert (tree.root / "sglang/srt/tiles/layout.py").read_text() == "ROWS = 64\n"
    assert patching.status(tree).condition == "applied"
    assert patching.apply(tree, Series(series.root), 2, link=True).condition == "applied"
    patching.revert(tree)
    assert snapshot(tree.root) == before
    assert (series.root / "srt/tiles/layout.py").is_file()


def test_a_link_to_a_deleted_file_is_noticed_and_needs_no_force(tree, series):
    before = snapshot(tree.root)
    patching.apply(tree, series, 2, link=True)
    (series.root / "srt/tiles/layout.py").unlink()
    found = patching.status(tree)
    assert (found.condition, found.changed) == ("changed", ("sglang/srt/tiles/layout.py",))
    assert patching.revert(tree).condition == "not applied"
    assert snapshot(tree.root) == before


def test_links_copies_and_another_series_are_told_apart(tree, series, tmp_path):
    other = Series(make_series(tmp_path / "other"))
    for first, second in (
        ((series, False), (series, True)),
        ((series, True), (series, False)),
        ((series, True), (other, True)),
    ):
        patching.apply(tree, first[0], 2, link=first[1])
        assert patching.apply(tree, first[0], 2, link=first[1]).condition == "applied"
        with pytest.raises(BitexactError, match="revert"):
            patching.apply(tree, second[0], 2, link=second[1])
        patching.revert(tree)


def test_modes_are_kept(tree, series):
    path = tree.root / "sglang/srt/loop.py"
    path.chmod(0o640)
    before = snapshot(tree.root)
    patching.apply(tree, series, 2)
    assert path.stat().st_mode & 0o777 == 0o640
    patching.revert(tree)
    assert snapshot(tree.root) == before


def test_a_failure_half_way_leaves_the_tree_as_it_was(tree, series, monkeypatch):
    before = snapshot(tree.root)
    original, calls = patching.replace_file, []

    def fails_second(path, data, like=None):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("disk full")
        original(path, data, like)

    monkeypatch.setattr(patching, "replace_file", fails_second)
    with pytest.raises(OSError, match="disk full"):
        patching.apply(tree, series, 2)
    assert snapshot(tree.root) == before


# Kills the process at the n-th call of a function that changes the disk.
_KILLED = """
import os, shutil, sys
from pathlib import Path
from sglang_bitexact import patching
from sglang_bitexact.series import Series
from sglang_bitexact.tree import Tree
root, series, command, last = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
count = 0
def counting(function):
    def call(*arguments, **keywords):
        global count
        count += 1
        if count == last:
            os._exit(77)
        return function(*arguments, **keywords)
    return call
os.replace, os.fsync = counting(os.replace), counting(os.fsync)
Path.rename, Path.unlink, Path.mkdir = counting(Path.rename), counting(Path.unlink), counting(Path.mkdir)
Path.write_bytes, Path.rmdir, shutil.copy2 = counting(Path.write_bytes), counting(Path.rmdir), counting(shutil.copy2)
tree = Tree.locate(root)
patching.apply(tree, Series(series), 2) if command == "apply" else patching.revert(tree)
"""


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_kill_at_any_moment_is_recoverable(tmp_path, command):
    series = make_series(tmp_path / "series")
    for moment in range(1, 200):
        root = make_tree(tmp_path / f"site{moment}")
        before = snapshot(root)
        if command == "revert":
            patching.apply(Tree.locate(root), Series(series), 2)
        arguments = [str(root), str(series), command, str(moment)]
        code = subprocess.run([sys.executable, "-c", _KILLED, *arguments]).returncode
        if code == 0:
            assert moment > 15, "the process was hardly interrupted"
            return
        assert code == 77
        condition = patching.status(Tree.locate(root)).condition
        assert condition in ("not applied", "applied", "interrupted")
        if condition == "interrupted":
            with pytest.raises(BitexactError, match="revert"):
                patching.apply(Tree.locate(root), Series(series), 2)
        patching.revert(Tree.locate(root))
        assert snapshot(root) == before, f"not restored after a kill at step {moment}"
    raise AssertionError("never ran to its end")


def test_a_damaged_journal_is_named(tree, series):
    patching.apply(tree, series, 1)
    path = tree.root / journal.DIRECTORY / "journal.json"
    path.write_text("{")
    with pytest.raises(BitexactError, match=r"journal\.json cannot be read"):
        patching.status(tree)


def test_locate(tmp_path):
    checkout = tmp_path / "checkout"
    make_tree(checkout / "python")
    assert Tree.locate(checkout).root == (checkout / "python").resolve()
    with pytest.raises(BitexactError, match="holds no sglang package"):
        Tree.locate(tmp_path)
    (checkout / "python/sglang/_version.py").write_text("__version__ = version = '0.5.22'\n")
    with pytest.raises(BitexactError, match=r"is sglang 0\.5\.22.*check --sglang 0\.5\.22"):
        Tree.locate(checkout)
    (checkout / "python/sglang/_version.py").write_text("__version__ = version = '0.5.23+bitexact.1'\n")
    with pytest.raises(BitexactError, match="holds the series already"):
        Tree.locate(checkout)
