"""check: anchors, moved, ambiguous, gone."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import requests

from kit.toy_series import CACHE_SOURCE, LOOP_SOURCE, make_series
from sglang_bitexact import cli
from sglang_bitexact.check import check
from sglang_bitexact.series import Series
from sglang_bitexact.upstream import Wheel


def _wheel(directory: Path, **sources: str) -> Wheel:
    path = directory / "sglang-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, source in sources.items():
            archive.writestr(f"sglang/srt/{name}.py", source)
    return Wheel(path)


def _states(tmp_path: Path, **sources: str) -> list[tuple[str, str]]:
    series = Series(make_series(tmp_path / "series"))
    return [(f.state, f.where) for f in check(series, _wheel(tmp_path, **sources))]


def test_all_anchor(tmp_path):
    states = _states(tmp_path, cache=CACHE_SOURCE, loop=LOOP_SOURCE)
    assert states == [
        ("anchors", "sglang/srt/cache.py:1"),
        ("anchors", "sglang/srt/cache.py:4"),
        ("anchors", "sglang/srt/cache.py:6"),
        ("anchors", "sglang/srt/loop.py:3"),
    ]


def test_moved_within_the_file_and_to_another(tmp_path):
    renamed = LOOP_SOURCE.replace("def step", "def advance")
    states = _states(tmp_path, tree=CACHE_SOURCE, cache="", loop=renamed)
    assert states == [
        ("moved", "sglang/srt/tree.py:1"),
        ("moved", "sglang/srt/tree.py:4"),
        ("moved", "sglang/srt/tree.py:6"),
        ("moved", "sglang/srt/loop.py:3"),
    ]


def test_a_method_moved_to_another_class(tmp_path):
    renamed = CACHE_SOURCE.replace("class Cache", "class Store")
    states = _states(tmp_path, cache=renamed, loop=LOOP_SOURCE)
    # The class itself has no likeness; its method's name is found in two classes.
    assert states[:3] == [
        ("gone", ""),
        ("moved", "sglang/srt/cache.py:4, sglang/srt/cache.py:14"),
        ("moved", "sglang/srt/cache.py:6"),
    ]


def test_gone_and_ambiguous(tmp_path):
    twice = LOOP_SOURCE + "    run(batch)\n"
    states = _states(tmp_path, loop=twice)
    assert states == [("gone", ""), ("gone", ""), ("gone", ""), ("ambiguous", "sglang/srt/loop.py:3,4")]


def test_our_edits_anchor_in_the_pinned_release(capsys):
    assert cli.main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sglang"] == "0.5.23" and report["ok"]
    assert {edit["state"] for edit in report["edits"]} == {"anchors"}
    assert {edit["part"] for edit in report["edits"]} == {1, 2, 3, 4, 5}


def test_exit_code_and_table(tmp_path, monkeypatch, capsys):
    series = make_series(tmp_path / "series")
    wheel = _wheel(tmp_path, cache=CACHE_SOURCE, loop="def other():\n    pass\n")
    monkeypatch.setattr(cli, "download", lambda version: wheel)
    assert cli.main(["check", "--series", str(series), "--sglang", "9.9.9"]) == 1
    out = capsys.readouterr().out
    assert "gone" in out and "9.9.9" in out


@pytest.mark.parametrize("arguments", [["check", "--series", "/nowhere"], ["status", "--tree", "/nowhere"]])
def test_an_error_is_a_message_and_code_2(arguments, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("sglang-bitexact: ") and error.count("\n") == 1
    assert cli.main([*arguments, "--json"]) == 2
    assert "error" in json.loads(capsys.readouterr().out)


def test_errors_of_the_system_are_messages_too(tmp_path, monkeypatch, capsys):
    """A folder that cannot be written, no network, no CPU environment: no traceback."""
    for error in (PermissionError(13, "Permission denied", "/x"), ImportError("no module"), requests.Timeout("slow")):

        def fail(*arguments, error=error, **keywords):
            raise error

        monkeypatch.setattr(cli, "build", fail)
        assert cli.main(["build", "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"sglang-bitexact: {error}\n"
