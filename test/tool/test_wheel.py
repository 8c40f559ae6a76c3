"""The built wheel: valid, reproducible, installable, and as the released one elsewhere."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sglang_bitexact import patching, upstream
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.series import Series
from sglang_bitexact.tree import Tree
from sglang_bitexact.wheel import build, record_row


@pytest.fixture(scope="module")
def released() -> upstream.Wheel:
    return upstream.download()


@pytest.fixture(scope="module")
def built(released, tmp_path_factory) -> Path:
    return build(Series.default(), released, 1, tmp_path_factory.mktemp("dist"))


def test_two_builds_have_the_same_bytes(released, built, tmp_path):
    again = build(Series.default(), released, 1, tmp_path)
    assert again.name == built.name
    assert again.read_bytes() == built.read_bytes()


def test_name_and_version(built):
    assert built.name.startswith("sglang-0.5.23+bitexact.1-cp311-cp311-")
    with zipfile.ZipFile(built) as archive:
        info = "sglang-0.5.23+bitexact.1.dist-info"
        assert "\nVersion: 0.5.23+bitexact.1\n" in archive.read(f"{info}/METADATA").decode()
        assert "'0.5.23+bitexact.1'" in archive.read("sglang/_version.py").decode()


def test_record_is_right(built):
    with zipfile.ZipFile(built) as archive:
        record = next(name for name in archive.namelist() if name.endswith("/RECORD"))
        rows = {row[0]: tuple(row) for row in csv.reader(io.StringIO(archive.read(record).decode()))}
        assert rows.keys() == set(archive.namelist())
        assert rows.pop(record) == (record, "", "")
        for name, row in rows.items():
            assert record_row(name, archive.read(name)) == row


@pytest.mark.parametrize("through", [1, 2, 3])
def test_only_declared_files_differ_from_the_release(released, through, tmp_path):
    """Inertness begins here: every part adds its new files and edits its targets, nothing else."""
    series = Series.default()
    ours = upstream.Wheel(build(series, released, through, tmp_path))
    plain, stock = ({name for name in w.names if ".dist-info/" not in name} for w in (ours, released))
    assert plain == stock | set(series.new_files(through))
    differing = {name for name in stock if ours.read(name) != released.read(name)}
    edited = {file.target for file in series.edit_files if file.through(through)}
    assert differing == edited | {"sglang/_version.py"}


def test_pip_installs_it_and_it_runs(built, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-qq", "--target", str(tmp_path)]
    subprocess.run([*command, str(built)], check=True)
    code = (
        "import sglang, importlib.metadata as m; from sglang.srt.environ import envs;"
        "print(sglang.__version__, m.version('sglang'), envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.get())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path), "PATH": ""}, capture_output=True, text=True
    )
    assert out.stdout.split() == ["0.5.23+bitexact.1", "0.5.23+bitexact.1", "False"], out.stderr


def test_apply_on_the_unpacked_release_equals_the_build(released, built, tmp_path):
    """One plan, two ways: a patched tree has the wheel's files, and comes back byte for byte."""
    released.unpack(tmp_path / "tree")
    released.unpack(tmp_path / "untouched")
    tree = Tree.locate(tmp_path / "tree")
    patching.apply(tree, Series.default(), 1)
    ours = upstream.Wheel(built)
    for file in Series.default().edit_files:
        assert (tree.root / file.target).read_bytes() == ours.read(file.target)
    record = (tree.root / "sglang-0.5.23.dist-info/RECORD").read_text()
    for name, digest, _ in csv.reader(io.StringIO(record)):
        if digest:
            assert record_row(name, (tree.root / name).read_bytes())[1] == digest
    patching.revert(tree)
    assert subprocess.run(["diff", "-r", tmp_path / "tree", tmp_path / "untouched"]).returncode == 0


def test_a_wrong_checksum_is_refused(tmp_path, released):
    copy = tmp_path / released.path.name
    copy.write_bytes(b"not the wheel")
    with pytest.raises(BitexactError, match=r"expected [0-9a-f]{64}"):
        upstream.verify(copy)
    with pytest.raises(BitexactError, match=r"not in upstream\.lock\.json"):
        upstream.verify(tmp_path / "sglang-0.5.23-other.whl")
