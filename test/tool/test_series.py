"""The series' files: read, checked, and complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kit.toy_series import make_series
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.series import Series
from sglang_bitexact.upstream import download

_CHECKOUT = Path(__file__).resolve().parents[2]


def test_toy_series(tmp_path):
    series = Series(make_series(tmp_path))
    assert [file.target for file in series.edit_files] == ["sglang/srt/cache.py", "sglang/srt/loop.py"]
    assert list(series.new_files(1)) == []
    assert list(series.new_files(2)) == ["sglang/srt/tiles/__init__.py", "sglang/srt/tiles/layout.py"]
    assert (series.check_part(None), series.check_part(1)) == (2, 1)
    with pytest.raises(BitexactError, match="--through 3: the series has parts 1 to 2"):
        series.check_part(3)


def test_a_new_file_must_belong_to_a_part(tmp_path):
    root = make_series(tmp_path)
    (root / "srt/stray.py").write_text("")
    with pytest.raises(BitexactError, match=r"in no part \['srt/stray.py'\]"):
        Series(root).new_files(2)
    (root / "srt/stray.py").unlink()
    (root / "srt/tiles/layout.py").unlink()
    with pytest.raises(BitexactError, match=r"named but missing \['srt/tiles/layout.py'\]"):
        Series(root).new_files(1)


def test_an_edit_must_not_be_there_twice(tmp_path):
    path = make_series(tmp_path) / "srt/loop.edits.yaml"
    text = path.read_text()
    path.write_text(text + text.split("edits:\n")[1])
    with pytest.raises(BitexactError, match=r"edit 2 \(before at .*\) is there twice: remove one"):
        _ = Series(tmp_path).edit_files


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("target: sglang/srt/loop.py", "target: sglang/srt/cache.py"), "the file beside it"),
        (("do: before", "do: above"), "loop.edits.yaml"),
        (("edits:", "edit:"), "loop.edits.yaml"),
        (("why: restore", "why:\n  restore"), "loop.edits.yaml"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, change, words):
    path = make_series(tmp_path) / "srt/loop.edits.yaml"
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(BitexactError, match=words):
        _ = Series(tmp_path).edit_files


def test_parts_are_numbered_without_a_gap(tmp_path):
    make_series(tmp_path)
    (tmp_path / "series.yaml").write_text("parts:\n  - {number: 2, title: Tiles}\n")
    with pytest.raises(BitexactError, match=r"numbered \[2\]"):
        _ = Series(tmp_path).parts


def test_our_series_is_complete():
    series = Series.default()
    assert series.root == _CHECKOUT / "python" / "sglang"
    series.new_files(series.last_part)
    assert series.edit_files


def test_the_series_folder_cannot_shadow_sglang():
    """A package file in an upstream-owned folder would hide SGLang from an import."""
    root = _CHECKOUT / "python" / "sglang"
    owners = [path.relative_to(root) for path in root.rglob("__init__.py")]
    assert all("swa_bitexact" in path.parts for path in owners), owners


def test_no_upstream_text_is_carried():
    """An anchor is a few tokens; no line of five words that an edit brings stands in the file already."""
    wheel = download()
    for file in Series.default().edit_files:
        theirs = {line.strip() for line in wheel.read(file.target).decode().splitlines()}
        for edit in file.edits:
            assert len((edit.at.pattern or "").split()) <= 8, edit.at
            ours = {line.strip() for line in edit.code.splitlines() if len(re.findall(r"\w+", line)) > 4}
            assert not ours & theirs
