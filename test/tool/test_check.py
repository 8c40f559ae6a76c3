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
    directory.mkdir(exist_ok=True)
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
    (release,) = report["releases"]
    assert release["sglang"] == "0.5.23" and release["ok"] and report["ok"]
    assert {edit["state"] for edit in release["edits"]} == {"anchors"}
    assert {edit["part"] for edit in release["edits"]} == {1, 2, 3, 4, 5}


def test_exit_code_and_table(tmp_path, monkeypatch, capsys):
    series = make_series(tmp_path / "series")
    wheel = _wheel(tmp_path, cache=CACHE_SOURCE, loop="def other():\n    pass\n")
    monkeypatch.setattr(cli, "download", lambda version: wheel)
    assert cli.main(["check", "--series", str(series), "--sglang", "9.9.9"]) == 1
    out = capsys.readouterr().out
    assert "gone" in out and "9.9.9" in out


def test_several_releases_as_a_table_for_the_documentation(tmp_path, monkeypatch, capsys):
    series = make_series(tmp_path / "series")
    wheels = {
        "9.9.8": _wheel(tmp_path, cache="", tree=CACHE_SOURCE, loop="def other():\n    pass\n"),
        "9.9.9": _wheel(tmp_path / "next", cache=CACHE_SOURCE, loop=LOOP_SOURCE),
    }
    monkeypatch.setattr(cli, "download", wheels.__getitem__)
    versions = ["--sglang", "9.9.8", "--sglang", "9.9.9"]
    assert cli.main(["check", "--series", str(series), *versions, "--markdown"]) == 1
    assert capsys.readouterr().out == _TABLES
    # One that anchors does not make up for one that does not.
    assert cli.main(["check", "--series", str(series), *versions, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [(each["sglang"], each["ok"]) for each in report["releases"]] == [("9.9.8", False), ("9.9.9", True)]
    assert report["ok"] is False
    # Where everything has its place there is nothing more to list.
    assert cli.main(["check", "--series", str(series), "--sglang", "9.9.9", "--markdown"]) == 0
    assert capsys.readouterr().out == "\n".join([*_TABLES.splitlines()[:2], _TABLES.splitlines()[3], ""])


_TABLES = """\
| sglang | edits that anchor | part 1 | part 2 |
|---|---|---|---|
| 9.9.8 | 0 of 4 | 0 of 2 | 0 of 2 |
| 9.9.9 | 4 of 4 | 2 of 2 | 2 of 2 |

| sglang | part | file | anchor | state | looks like it |
|---|---|---|---|---|---|
| 9.9.8 | 1 | `sglang/srt/cache.py` | `class 'Cache'` | moved | sglang/srt/tree.py:1 |
| 9.9.8 | 2 | `sglang/srt/cache.py` | `class 'Cache', function 'match'` | moved | sglang/srt/tree.py:4 |
| 9.9.8 | 2 | `sglang/srt/cache.py` | `class 'Cache', function 'match', pattern 'self.find($$$)'` | moved | sglang/srt/tree.py:6 |
| 9.9.8 | 1 | `sglang/srt/loop.py` | `function 'step', pattern 'run($$$)'` | gone | - |
"""  # noqa: E501


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
