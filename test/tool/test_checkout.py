"""apply on source checkouts: which release they are, and local changes that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.git import git
from kit.toy_series import CACHE_SOURCE, LOOP_SOURCE, make_tree, snapshot
from sglang_bitexact import cli, patching
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.journal import State
from sglang_bitexact.plan import make_plan, refuse_if_edited
from sglang_bitexact.series import Series
from sglang_bitexact.tree import Tree
from sglang_bitexact.tree_version import found_version
from sglang_bitexact.upstream import download


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A repository with the toy tree as python/sglang, and no word about its version."""
    root = tmp_path / "checkout"
    make_tree(root / "python")
    git(tmp_path, "init", "--quiet", str(root))
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message=base")
    return root


def write(checkout: Path, name: str, text: str) -> None:
    (checkout / "python" / name).write_text(text)


def version(checkout: Path) -> str | None:
    return found_version(checkout / "python")


def test_the_first_source_that_names_a_release_counts(checkout):
    assert version(checkout) is None
    git(checkout, "tag", "v0.5.20")
    git(checkout, "tag", "gateway-v0.9.9")
    assert version(checkout) == "0.5.20"
    write(checkout, "sglang/version.py", '__version__ = "0.5.21"\n')
    assert version(checkout) == "0.5.21"
    write(checkout, "pyproject.toml", '[project]\nname = "sglang"\nversion = "0.5.22"\n')
    assert version(checkout) == "0.5.22"
    write(checkout, "sglang/_version.py", "__version__ = version = '0.5.23+rocm720'\n")
    assert version(checkout) == "0.5.23+rocm720"
    assert Tree.locate(checkout).version == "0.5.23+rocm720"


@pytest.mark.parametrize("told", ["0.5.24.dev3+g1a2b3c4", "0.0.0.dev0", "0.5.24.dev0+d20261130", "0.5.23+dev1"])
def test_a_development_version_is_no_release(checkout, told):
    write(checkout, "sglang/_version.py", f"__version__ = version = '{told}'\n")
    assert version(checkout) is None
    git(checkout, "tag", "v0.5.23.post1")
    assert version(checkout) == "0.5.23.post1"
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=later")
    assert version(checkout) is None


def test_other_projects_do_not_count(checkout):
    write(checkout, "pyproject.toml", '[project]\nname = "other"\nversion = "0.5.22"\n')
    assert version(checkout) is None
    write(checkout, "pyproject.toml", '[project]\nname = "sglang"\ndynamic = ["version"]\n')
    assert version(checkout) is None
    # As upstream's is: a fallback inside a function or a try.
    write(checkout, "sglang/version.py", 'try:\n    pass\nexcept Exception:\n    __version__ = "0.0.1"\n')
    assert version(checkout) is None


def test_another_release_is_refused_and_an_untold_one_by_its_files(checkout, series):
    git(checkout, "tag", "v0.5.22")
    with pytest.raises(BitexactError, match=r"is sglang 0\.5\.22.*check --sglang 0\.5\.22"):
        Tree.locate(checkout)
    git(checkout, "tag", "--delete", "v0.5.22")
    write(checkout, "sglang/srt/loop.py", LOOP_SOURCE + "# another release\n")
    with pytest.raises(BitexactError, match=r"loop\.py \(changed\)"):
        patching.apply(Tree.locate(checkout), series, 2)
    git(checkout, "checkout", "--quiet", ".")
    assert patching.apply(Tree.locate(checkout), series, 2).condition == "applied"


def test_a_checkout_comes_back_and_git_does_not_see_the_journal(checkout, series):
    before = snapshot(checkout / "python")
    tree = Tree.locate(checkout)
    patching.apply(tree, series, 2)
    assert git(checkout, "status", "--porcelain").splitlines() == [
        " M python/sglang/srt/cache.py",
        " M python/sglang/srt/loop.py",
        "?? python/sglang/srt/tiles/",
    ]
    # It takes our new files; the journal, which knows how it was, stays.
    git(checkout, "clean", "--quiet", "--force", "-d")
    assert patching.status(tree).condition == "changed"
    patching.revert(tree, force=True)
    assert snapshot(checkout / "python") == before


def test_local_changes_are_kept_and_come_back_byte_for_byte(checkout, series, capsys):
    write(checkout, "sglang/srt/cache.py", "import os\n\n" + CACHE_SOURCE.replace("Look up", "Look it up"))
    before = snapshot(checkout / "python")
    command = ["apply", "--tree", str(checkout), "--series", str(series.root)]
    assert cli.main(command) == 2
    assert "cache.py (changed)" in (error := capsys.readouterr().err) and "--keep-local" in error
    assert snapshot(checkout / "python") == before
    for _ in range(2):
        assert cli.main([*command, "--keep-local"]) == 0
    # Applied is applied: it need not be said again.
    assert cli.main(command) == 0
    text = (checkout / "python/sglang/srt/cache.py").read_text()
    assert "Look it up" in text and text.startswith("import os\n") and "reuse=reuse" in text
    assert "restore(batch)" in (checkout / "python/sglang/srt/loop.py").read_text()
    capsys.readouterr()
    assert cli.main(["status", "--tree", str(checkout), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["condition"] == "applied"
    assert cli.main(["revert", "--tree", str(checkout)]) == 0
    assert snapshot(checkout / "python") == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LOOP_SOURCE + "    run(batch)\n", "matches 2 times"),
        (LOOP_SOURCE.replace("run", "walk"), "matches 0 times"),
        (None, r"loop\.py \(missing\)"),
    ],
)
def test_kept_changes_must_leave_every_edit_its_one_place(checkout, series, text, words):
    if text is None:
        (checkout / "python/sglang/srt/loop.py").unlink()
    else:
        write(checkout, "sglang/srt/loop.py", text)
    before = snapshot(checkout / "python")
    with pytest.raises(BitexactError, match=words):
        patching.apply(Tree.locate(checkout), series, 2, keep_local=True)
    assert snapshot(checkout / "python") == before


@pytest.mark.parametrize("first", [1, 2])
def test_an_edit_is_never_there_twice(checkout, series, first):
    """The journal was lost: the edits look like local changes, and their anchors still match."""
    tree = Tree.locate(checkout)
    patching.apply(tree, series, first)
    State(tree.root).remove()
    for path in (tree.root / "sglang/srt/tiles").glob("*"):
        path.unlink()
    before = snapshot(tree.root)
    with pytest.raises(BitexactError, match=r"cache\.py holds the edits of part 1 already"):
        patching.apply(tree, series, 2, keep_local=True)
    assert snapshot(tree.root) == before


def test_every_part_of_our_series_is_recognised_where_it_is():
    """And nowhere else: a released file with a change of its own is planned."""
    wheel, series = download(), Series.default()
    released = {file.target: wheel.read(file.target) + b"# mine\n" for file in series.edit_files}
    for part in series.parts:
        plan = make_plan(series, part.number, released.get, lambda name: False, wheel.version, keep_local=True)
        for file in series.edit_files:
            if any(edit.part == part.number for edit in file.edits):
                alone = tuple(edit for edit in file.edits if edit.part == part.number)
                with pytest.raises(BitexactError, match=f"{file.target} holds the edits of part {part.number} already"):
                    refuse_if_edited(plan.edited[file.target].decode(), alone, file.target)
