"""export: mail patches that `git am` takes, and that make the files of `build`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kit.git import git
from kit.toy_series import CACHE_SOURCE, make_tree
from sglang_bitexact import cli
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.export import Source, export, message
from sglang_bitexact.plan import make_plan
from sglang_bitexact.series import Series
from sglang_bitexact.tree import Tree
from sglang_bitexact.upstream import Wheel, download, unpacked
from sglang_bitexact.wheel import build


def commit_all(repository: Path) -> None:
    git(repository, "init", "--quiet")
    git(repository, "add", "--all", "--force")
    git(repository, "commit", "--quiet", "--message=base")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A repository with the toy tree where SGLang's has it."""
    root = tmp_path / "checkout"
    make_tree(root / "python")
    commit_all(root)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_each_of_our_patches_makes_the_files_of_the_build(tmp_path, capsys):
    """Part after part, byte for byte, in a repository that has the release as python/sglang."""
    wheel = download()
    repository = tmp_path / "repository"
    (repository / "python").mkdir(parents=True)
    subprocess.run(["cp", "-r", str(unpacked(wheel) / "sglang"), str(repository / "python/sglang")], check=True)
    commit_all(repository)
    assert cli.main(["export", "--out", str(tmp_path / "patches"), "--json"]) == 0
    patches = json.loads(capsys.readouterr().out)["patches"]
    assert patches == sorted(str(path) for path in (tmp_path / "patches").iterdir()) and len(patches) == 5
    released = {name: wheel.read(name) for name in wheel.names if name.startswith("sglang/")}
    for number, patch in enumerate(patches, start=1):
        git(repository, "am", "--quiet", patch)
        plan = make_plan(Series.default(), number, released.get, released.__contains__, wheel.version)
        assert contents(repository / "python") == {**released, **plan.edited, **plan.added}
    # What a build writes is this plan; once it is really built. One file names the build, and is not git's.
    built = Wheel(build(Series.default(), wheel, 5, tmp_path / "dist"))
    found = contents(repository / "python")
    names = {name for name in built.names if name.startswith("sglang/")}
    assert found.keys() == names
    assert [name for name in sorted(names) if found[name] != built.read(name)] == ["sglang/_version.py"]


def test_our_patches_say_what_and_why(tmp_path):
    series = Series.default()
    assert all(part.does for part in series.parts)
    for part in series.parts:
        text = " ".join(message(series, part).replace("\n  ", "\n").split())
        for file in series.edit_files:
            for edit in file.edits:
                if edit.part == part.number:
                    assert f"python/{file.target}:" in text and f"- {edit.why}" in text
        assert max(map(len, message(series, part).splitlines()[1:])) <= 100


def test_commits_carry_title_reasons_and_author(series, checkout, tmp_path):
    patches = export(series, Source.of(checkout), tmp_path / "out", author=("Ada", "ada@example.org"), keep_local=False)
    assert [path.name for path in patches] == ["0001-Hooks.patch", "0002-Tiles.patch"]
    git(checkout, "am", "--quiet", *map(str, patches))
    assert git(checkout, "log", "--format=%s|%an|%ae", "-2").splitlines() == [
        "Tiles|Ada|ada@example.org",
        "Hooks|Ada|ada@example.org",
    ]
    assert git(checkout, "log", "--format=%b", "-1", "HEAD^").strip() == (
        "python/sglang/srt/cache.py:\n- a field that later parts read\n\n"
        "python/sglang/srt/loop.py:\n- restore before the run reads"
    )
    # Two edits with one reason say it once; nobody signed.
    assert git(checkout, "log", "--format=%b", "-1") == "python/sglang/srt/cache.py:\n- a match says what it is for\n\n"
    added = git(checkout, "show", "--name-status", "--format=", "HEAD").splitlines()
    assert [line for line in added if line.startswith("A")] == [
        "A\tpython/sglang/srt/tiles/__init__.py",
        "A\tpython/sglang/srt/tiles/layout.py",
    ]


def test_the_users_own_settings_change_nothing(series, checkout, tmp_path, monkeypatch):
    # Line ends that a setting would change.
    (series.root / "srt/tiles/layout.py").write_bytes(b"ROWS = 128\r\n")
    plain = export(series, Source.of(checkout), tmp_path / "plain")
    assert b"+ROWS = 128\r\n" in plain[1].read_bytes()
    home = tmp_path / "home"
    (home / ".config/git").mkdir(parents=True)
    (home / ".config/git/ignore").write_text("tiles\n")
    (home / ".config/git/attributes").write_text("* text eol=crlf\n")
    (home / ".gitconfig").write_text(
        "[format]\n signOff = true\n attach = true\n subjectPrefix = X\n[commit]\n gpgSign = true\n"
        "[diff]\n noprefix = true\n context = 9\n[core]\n autocrlf = true\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    again = export(series, Source.of(checkout), tmp_path / "again")

    def without_date(patch: Path) -> list[bytes]:
        return [line for line in patch.read_bytes().split(b"\n") if not line.startswith(b"Date: ")]

    assert [without_date(patch) for patch in again] == [without_date(patch) for patch in plain]


def test_only_a_checkout_of_the_release_unless_changes_are_kept(series, checkout, tmp_path):
    path = checkout / "python/sglang/srt/cache.py"
    path.write_text(CACHE_SOURCE + "# mine\n")
    git(checkout, "commit", "--quiet", "--all", "--message=mine")
    with pytest.raises(BitexactError, match=r"cache\.py \(changed\).*--keep-local"):
        export(series, Source.of(checkout), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    patches = export(series, Source.of(checkout), tmp_path / "out", keep_local=True)
    git(checkout, "am", "--quiet", *map(str, patches))
    assert path.read_text().endswith("# mine\n") and "def restore" in path.read_text()


def test_other_patches_are_not_mixed_with_these(series, checkout, tmp_path):
    export(series, Source.of(checkout), tmp_path)
    export(series, Source.of(checkout), tmp_path)
    (tmp_path / "0003-Other.patch").write_text("")
    with pytest.raises(BitexactError, match=r"holds other patches: 0003-Other\.patch"):
        export(series, Source.of(checkout), tmp_path)


def test_no_git_is_said(series, tmp_path, monkeypatch, capsys):
    tree = make_tree(tmp_path / "site")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Tree.locate(tree).version == "0.5.23"
    assert (
        cli.main(["export", "--series", str(series.root), "--checkout", str(tree), "--out", str(tmp_path / "o")]) == 2
    )
    assert "needs git" in capsys.readouterr().err
