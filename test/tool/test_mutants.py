"""The list of mutants: each changes its file, and the tests that must notice are there."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from sglang_bitexact.errors import BitexactError
from sglang_bitexact.series import Series
from sglang_bitexact.upstream import download

_ROOT = Path(__file__).resolve().parents[2]


def _tool():
    spec = importlib.util.spec_from_file_location("mutants_tool", _ROOT / "tools/mutants.py")
    module = importlib.util.module_from_spec(spec)
    # Where pydantic looks for what an annotation names.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = _tool()
CHANGED = {"at": {"function": "f", "pattern": "a + b"}, "text": "a - b"}


def mutant(**fields):
    return tool.Mutant(
        **{"name": "m", "why": "a reason of some length", "file": "sglang/f.py", "tests": ("t.py",), **fields}
    )


@pytest.fixture(scope="module")
def sources():
    return tool.Sources(Series.default(), download())


def test_every_mutant_changes_its_file(sources):
    mutants = tool.load()
    assert len(mutants) >= 20
    assert all(sources.mutated(m) != sources.patched[m.file] for m in mutants)


def test_every_named_test_is_there():
    for m in tool.load():
        for test in m.tests:
            file, _, name = test.partition("::")
            text = (_ROOT / "test" / file).read_text()
            for part in filter(None, name.partition("[")[0].split("::")):
                assert f"def {part}(" in text or f"class {part}(" in text, test


def test_a_place_must_be_found_once_and_change(sources, monkeypatch):
    text = b"def f(a, b):\n    return a + b\n"
    monkeypatch.setitem(sources.patched, "sglang/f.py", text)
    assert sources.mutated(mutant(change=[CHANGED])) == b"def f(a, b):\n    return a - b\n"
    with pytest.raises(BitexactError, match="m changes nothing"):
        sources.mutated(mutant(change=[{**CHANGED, "text": "a + b"}]))
    monkeypatch.setitem(sources.patched, "sglang/f.py", text + b"    return a + b\n")
    with pytest.raises(BitexactError, match="matches 2 times"):
        sources.mutated(mutant(change=[CHANGED]))
    with pytest.raises(BitexactError, match="no file of the series"):
        sources.mutated(mutant(file="sglang/version.py", change=[CHANGED]))
    with pytest.raises(BitexactError, match="changes nothing"):
        sources.mutated(mutant(file="sglang/srt/environ.py", drop="a reason that no edit has"))


def test_a_mutant_changes_or_drops_and_its_name_is_its_own(tmp_path):
    for fields in ({}, {"change": [CHANGED], "drop": "both"}):
        with pytest.raises(ValueError, match="m: give either change or drop"):
            mutant(**fields)
    path = tmp_path / "mutants.yaml"
    entry = "  - {name: m, why: a reason of some length, file: sglang/f.py, drop: an edit, tests: [t.py]}\n"
    path.write_text("mutants:\n" + 2 * entry)
    with pytest.raises(ValueError, match="m there twice"):
        tool.load(path)


def test_a_file_is_put_beside_its_link(tmp_path):
    base = tmp_path / "base/sglang/f.py"
    base.parent.mkdir(parents=True)
    base.write_text("old")
    copy = tool.linked_copy(tmp_path / "base", tmp_path / "copy")
    assert os.path.samefile(base, copy / "sglang/f.py")
    tool.put(copy, "sglang/f.py", b"new")
    assert (base.read_text(), (copy / "sglang/f.py").read_text()) == ("old", "new")


@pytest.mark.parametrize(
    ("outcome", "imported", "may_hang", "expected"),
    [
        ((1, ("t::a", "t::b")), True, False, (True, "t::a")),
        ((1, ("a: NameError: b",)), True, False, (False, "a: NameError: b")),
        ((1, ("t::a",)), False, False, (False, "no process imported sglang/f.py")),
        ((0, ()), True, False, (False, "its tests pass")),
        ((1, ()), True, False, (False, "no test failed, but pytest ended with 1")),
        ((2, ()), True, False, (False, "no test failed, but pytest ended with 2")),
        ((None, ()), True, False, (False, "out of time after 600 s")),
        ((None, ()), True, True, (True, "out of time after 600 s")),
    ],
)
def test_caught_is_a_failed_test_that_ran_the_mutant(outcome, imported, may_hang, expected):
    code, failed = outcome
    made = mutant(change=[CHANGED], may_hang=may_hang)
    verdict = tool.judge(made, tool.Outcome(code, failed, 0, 1.0, ""), imported)
    assert (verdict.caught, verdict.by) == expected


def test_what_a_run_of_tests_says(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "TESTS", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import os, pytest, thing\n"
        "def test_passes(): assert os.environ['OMP_NUM_THREADS'] == '1'\n"
        "@pytest.mark.skip\ndef test_skips(): pass\n"
        "class TestIt:\n    def test_fails(self): assert thing.VALUE == 1\n"
        "    def test_is_not_reached(self): assert 0\n"
    )
    tree = tmp_path / "tree"
    path = tool.put(tree, "thing.py", b"VALUE = 2\n")
    outcome = tool.run_tests(tree, ["test_it.py"])
    assert (outcome.code, outcome.skipped) == (1, 1), outcome.output
    assert outcome.failed == ("test_fails: assert 2 == 1",)
    assert tool.compiled(path).is_file()
    outcome = tool.run_tests(tree, ["test_it.py::test_passes"])
    assert (outcome.code, outcome.failed, outcome.skipped) == (0, (), 0), outcome.output
    monkeypatch.setattr(tool, "_LIMIT_S", 2)
    (tmp_path / "test_it.py").write_text("import time\ndef test_hangs(): time.sleep(600)\n")
    assert tool.run_tests(tree, ["test_it.py"]).code is None
