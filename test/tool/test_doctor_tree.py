"""doctor on trees: stock, patched, tampered, interrupted, built; what the switch makes of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.git import git
from kit.toy_series import make_tree
from sglang_bitexact import cli, patching
from sglang_bitexact.doctor.environment import VARIABLES, of_shell, platform
from sglang_bitexact.export import Source, export
from sglang_bitexact.journal import State
from sglang_bitexact.series import SWITCH, Series
from sglang_bitexact.tree import Tree
from sglang_bitexact.wheel import manifest, record_row, write_record

CACHE, LOOP, LAYOUT = (f"sglang/srt/{name}.py" for name in ("cache", "loop", "tiles/layout"))


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def doctor(capsys, tree: Tree, series: Series, *arguments: str) -> dict:
    capsys.readouterr()
    code = cli.main(["doctor", "--tree", str(tree.root), "--series", str(series.root), "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert report.get("exit_code", 2) == code
    return report


def append(tree: Tree, name: str) -> None:
    path = tree.root / name
    path.write_text(path.read_text() + "# mine\n")


def test_three_trees_three_verdicts(tree, series, capsys):
    stock = doctor(capsys, tree, series)
    assert (stock["tree"]["condition"], stock["tree"]["through"], stock["wrong"]) == ("stock", None, [])
    assert (stock["exit_code"], stock["verdict"]) == (0, "healthy: sglang 0.5.23, stock, switch off")
    patching.apply(tree, series, 1)
    patched = doctor(capsys, tree, series)
    assert (patched["tree"]["condition"], patched["tree"]["through"]) == ("patched", 1)
    assert (patched["exit_code"], patched["verdict"]) == (
        0,
        "healthy: sglang 0.5.23 with parts 1 to 1, intact, switch off",
    )
    append(tree, LOOP)
    tampered = doctor(capsys, tree, series)
    assert (tampered["tree"]["condition"], tampered["tree"]["changed"]) == ("tampered", [LOOP])
    assert (tampered["exit_code"], tampered["verdict"]) == (
        1,
        f"wrong: parts 1 to 1 are in the tree, and these files were changed since: {LOOP}",
    )


def test_a_tree_without_a_journal_must_have_the_releases_files(tree, series, capsys):
    """The journal was deleted: the series is half there, and no revert can know how it was."""
    patching.apply(tree, series, 2)
    State(tree.root).remove()
    report = doctor(capsys, tree, series)
    added = "sglang/srt/tiles/__init__.py"
    assert (report["tree"]["condition"], report["tree"]["changed"]) == ("tampered", [CACHE, LOOP, added, LAYOUT])
    assert report["verdict"] == (
        "wrong: the series is not applied, and these files are not those of sglang 0.5.23: "
        f"{CACHE}, {LOOP}, {added}, {LAYOUT}"
    )


def test_an_interrupted_apply_is_wrong(tree, series, capsys):
    patching.apply(tree, series, 2)
    state = State(tree.root)
    state.enter(state.load(), "applying")
    report = doctor(capsys, tree, series)
    assert (report["tree"]["condition"], report["exit_code"]) == ("interrupted", 1)
    assert report["verdict"].startswith("wrong: an apply or revert of parts 1 to 2 was interrupted")


def test_local_changes_that_were_kept_are_listed_and_no_fault(tree, series, capsys):
    append(tree, CACHE)
    patching.apply(tree, series, 2, keep_local=True)
    report = doctor(capsys, tree, series)
    assert (report["tree"]["condition"], report["tree"]["local"], report["exit_code"]) == ("patched", [CACHE], 0)


def make_built(tree: Tree, series: Series, through: int) -> None:
    """``tree`` as an installed wheel of `build`."""
    patching.apply(tree, series, through)
    names = [file.name for file in State(tree.root).load().files]
    contents = {name: (tree.root / name).read_bytes() for name in names}
    State(tree.root).remove()
    info = tree.root / f"sglang-0.5.23+bitexact.{through}.dist-info"
    info.mkdir()
    added = {name: data for name, data in contents.items() if "tiles" in name}
    edited = {name: data for name, data in contents.items() if name not in added}
    (info / "bitexact.json").write_bytes(manifest(patching.Plan(through, edited, added), "0.5.23"))
    (info / "RECORD").write_bytes(write_record([record_row(name, data) for name, data in contents.items()]))
    (tree.root / "sglang/_version.py").write_text(f"__version__ = version = '0.5.23+bitexact.{through}'\n")


def test_a_built_wheel_is_compared_with_its_record(tree, series, capsys):
    make_built(tree, series, 2)
    report = doctor(capsys, tree, series)
    assert (report["tree"]["condition"], report["tree"]["by"], report["tree"]["changed"]) == ("patched", "wheel", [])
    assert report["verdict"] == "healthy: sglang 0.5.23+bitexact.2 with parts 1 to 2, intact, switch off"
    append(tree, LAYOUT)
    (tree.root / LOOP).unlink()
    report = doctor(capsys, tree, series)
    assert (report["tree"]["condition"], report["tree"]["changed"]) == ("tampered", [LOOP, LAYOUT])
    assert report["exit_code"] == 1


@pytest.mark.parametrize(
    ("through", "value", "wrong"),
    [
        (None, "true", f"{SWITCH} is on, and this sglang is stock: it has no effect"),
        (1, "1", f"{SWITCH} is on, and only parts 1 to 1 are in the tree: a server does not start"),
        (2, "YES", None),
        (None, "0", None),
        (None, "on", None),
    ],
)
def test_the_switch_needs_the_whole_series(tree, series, capsys, monkeypatch, through, value, wrong):
    if through:
        patching.apply(tree, series, through)
    monkeypatch.setenv(SWITCH, value)
    report = doctor(capsys, tree, series)
    assert report["wrong"] == ([wrong] if wrong else [])
    assert report["environment"]["variables"] == {SWITCH: value}
    # With the switch on the tree is asked for its guards; this toy cannot be.
    asked = value not in ("0", "on")
    assert (report["guards"] is not None) == asked
    if asked:
        assert report["guards"]["fire"] == [] and "sglang" in report["guards"]["error"]


def test_another_release_and_no_tree_are_not_diagnosed(tree, series, capsys, tmp_path):
    (tree.root / "sglang/_version.py").write_text("__version__ = version = '0.5.22'\n")
    assert "is sglang 0.5.22" in doctor(capsys, tree, series)["error"]
    assert cli.main(["doctor", "--tree", str(tmp_path / "nothing"), "--json"]) == 2
    assert "holds no sglang package" in json.loads(capsys.readouterr().out)["error"]


_TORCH = "__version__ = '2.9.1{0}'\ndebug = False\ncuda: Optional[str] = {1}\nhip: Optional[str] = {2}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_TORCH.format("+rocm7.0", None, "'7.0.51831'"), ("rocm", "2.9.1+rocm7.0")),
        (_TORCH.format("+cu130", "'13.0'", None), ("cuda", "2.9.1+cu130")),
        (_TORCH.format("+cpu", None, None), ("cpu", "2.9.1+cpu")),
    ],
)
def test_the_platform_is_that_of_the_torch_beside_the_tree(tree, text, expected, monkeypatch):
    (tree.root / "torch").mkdir()
    (tree.root / "torch/version.py").write_text(text)
    assert platform(tree.root, of_shell())[:2] == expected
    monkeypatch.setenv("SGLANG_PLATFORM", "cpu_ref")
    assert platform(tree.root, of_shell()) == ("cpu_ref", expected[1], True)


def test_text_ends_with_the_verdict(tree, series, capsys):
    append(tree, LOOP)
    assert cli.main(["doctor", "--tree", str(tree.root), "--series", str(series.root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"tree {tree.root}: sglang 0.5.23, tampered" and lines[1] == f"  changed {LOOP}"
    assert lines[-1] == (f"wrong: the series is not applied, and these files are not those of sglang 0.5.23: {LOOP}")


def test_a_checkout_is_diagnosed_where_its_package_is(series, tmp_path, capsys):
    make_tree(tmp_path / "checkout/python")
    for path in ("checkout", "checkout/python", "checkout/python/sglang"):
        arguments = ["doctor", "--tree", str(tmp_path / path), "--series", str(series.root), "--json"]
        assert cli.main(arguments) == 0
        assert Path(json.loads(capsys.readouterr().out)["tree"]["root"]) == tmp_path / "checkout/python"


@pytest.fixture
def checkout(series, tmp_path) -> Tree:
    """A repository of the toy release; patches/ beside it has the series."""
    root = tmp_path / "repository"
    make_tree(root / "python")
    git(root, "init", "--quiet")
    git(root, "add", "--all", "--force")
    git(root, "commit", "--quiet", "--message=base")
    export(series, Source.of(root), tmp_path / "patches")
    return Tree.find(root)


def test_commits_of_exported_patches_are_the_series(checkout, series, tmp_path, capsys):
    root = checkout.root.parent
    for number, patch in enumerate(sorted((tmp_path / "patches").iterdir()), start=1):
        git(root, "am", "--quiet", str(patch))
        report = doctor(capsys, checkout, series)
        assert (report["tree"]["condition"], report["tree"]["through"], report["tree"]["by"]) == (
            "patched",
            number,
            "commits",
        )
        assert report["verdict"] == f"healthy: sglang 0.5.23 with parts 1 to {number}, intact, switch off"
    append(checkout, CACHE)
    (checkout.root / LAYOUT).unlink()
    report = doctor(capsys, checkout, series)
    assert report["verdict"] == (
        f"wrong: parts 1 to 2 are in the tree, and these files were changed since: {CACHE}, {LAYOUT}"
    )


def test_changes_of_ones_own_are_no_series(checkout, series, capsys):
    """In a checkout as well: nothing of a part is there."""
    append(checkout, LOOP)
    assert doctor(capsys, checkout, series)["verdict"] == (
        f"wrong: the series is not applied, and these files are not those of sglang 0.5.23: {LOOP}"
    )


def test_commits_that_never_had_the_release_say_nothing(checkout, series, tmp_path, capsys):
    root = checkout.root.parent
    git(root, "am", "--quiet", *map(str, sorted((tmp_path / "patches").iterdir())))
    git(root, "checkout", "--quiet", "--orphan", "flat")
    git(root, "commit", "--quiet", "--message=flat")
    assert doctor(capsys, checkout, series)["tree"]["through"] is None
