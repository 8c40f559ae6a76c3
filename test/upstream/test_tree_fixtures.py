"""Upstream's tree fixtures do on the patched tree, flag off and on, what they do on stock.

The scenarios run in a child process per tree. Off and on must not differ from stock in any
outcome, nor in anything recorded: match and insert results, rows, sizes, LRU order, hashes, bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_bitexact.series import Series
from sglang_bitexact.upstream import Wheel, download, unpacked
from sglang_bitexact.wheel import build

_TESTS = Path(__file__).resolve().parents[1]
_FLAG = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"
_TIMEOUT_S = 900
# Each kind of component, pages of one and of many tokens, windows below, at and above a page.
_SOME = (
    *("FULL_ps16", "FULL_MAMBA_ps4", "FULL_SWA_ps1_sw4", "FULL_SWA_ps4_sw2", "FULL_SWA_ps16_sw16"),
    "FULL_SWA_MAMBA_ps64_sw64",
)


class Chosen(NamedTuple):
    """labels: of upstream's configurations, () for all. passing: by core, on stock; no test may get lost."""

    labels: tuple[str, ...]
    passing: dict[str, int]


_CHOSEN = {
    "some": Chosen(_SOME, {"python": 123, "rust": 90}),
    "all": Chosen((), {"python": 341, "rust": 257}),
}


class Runs(NamedTuple):
    chosen: Chosen
    trees: dict[str, Path]
    found: dict[str, dict[str, Any]]


def _run(tree: Path, labels: tuple[str, ...], out: Path, flag: str) -> dict[str, Any]:
    """Run the scenarios on ``tree``; its sglang comes first on the path of a new process."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tree), str(_TESTS))),
        "PYTHONHASHSEED": "0",
        "SGLANG_TEST_MAX_RETRY": "0",
        # More threads than cores make these many small copies an order of magnitude slower.
        "OMP_NUM_THREADS": "1",
        _FLAG: flag,
    }
    command = [sys.executable, "-m", "upstream.scenarios.run", str(out), *labels]
    with out.with_suffix(".log").open("w") as log:
        code = subprocess.run(
            command, env=environment, cwd=out.parent, stdout=log, stderr=log, timeout=_TIMEOUT_S, check=False
        ).returncode
    assert code == 0, f"ended with {code}:\n" + out.with_suffix(".log").read_text()[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(
    scope="module", params=[pytest.param("some", marks=pytest.mark.ci), pytest.param("all", marks=pytest.mark.slow)]
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    chosen = _CHOSEN[request.param]
    folder = tmp_path_factory.mktemp(f"kits-{request.param}")
    series = Series.default()
    patched = unpacked(Wheel(build(series, download(), series.check_part(None), folder / "dist")))
    trees = {"stock": unpacked(download()), "off": patched, "on": patched}
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = {
            name: pool.submit(_run, tree, chosen.labels, folder / f"{name}.json", str(int(name == "on")))
            for name, tree in trees.items()
        }
        return Runs(chosen, trees, {name: run.result() for name, run in started.items()})


_MODES = pytest.mark.parametrize("mode", ["off", "on"])


def test_each_run_had_its_tree_and_flag(runs):
    assert {name: Path(found["tree"]) for name, found in runs.found.items()} == runs.trees
    assert runs.trees["stock"] != runs.trees["off"]
    assert {name: found["flag"] for name, found in runs.found.items()} == {"stock": None, "off": False, "on": True}


def test_every_fixture_is_put_to_work(runs):
    """Of upstream's kit: a new release's fixtures must not go unnoticed."""
    assert runs.found["stock"]["unused"] == []


def test_as_many_pass_on_stock_as_ever(runs):
    outcomes = Counter((name.split("/")[0], outcome) for name, (outcome, _, _) in runs.found["stock"]["tests"].items())
    assert {core: outcomes[core, "pass"] for core in runs.chosen.passing} == runs.chosen.passing


def test_nothing_fails_on_stock(runs):
    tests = runs.found["stock"]["tests"]
    assert {name: text for name, (outcome, text, _) in tests.items() if outcome == "fail"} == {}


def test_skips_are_the_kit_s_own_or_need_an_inspection_build(runs):
    reasons = {text for outcome, text, _ in runs.found["stock"]["tests"].values() if outcome == "skip"}
    known = ("the wheel's Rust core has no ", "test scenario requires ps < sw")
    assert {reason for reason in reasons if not reason.startswith(known)} == set()


@_MODES
def test_outcomes_are_stock_s(runs, mode):
    ours, theirs = ({name: test[:2] for name, test in runs.found[key]["tests"].items()} for key in (mode, "stock"))
    assert ours.keys() == theirs.keys()
    assert {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]} == {}


@_MODES
def test_records_are_stock_s(runs, mode):
    """Names the first difference of each test that differs."""
    different = {}
    for name, (_, _, theirs) in runs.found["stock"]["tests"].items():
        ours = runs.found[mode]["tests"][name][2]
        if ours != theirs:
            different[name] = next(((a, b) for a, b in zip(ours, theirs, strict=False) if a != b), "lengths")
    assert different == {}


def test_much_is_recorded(runs):
    tests = runs.found["stock"]["tests"]
    silent = {
        name.split(".")[-1] for name, (outcome, _, recorded) in tests.items() if outcome == "pass" and not recorded
    }
    # These assert inside the fixture.
    assert silent <= {
        *("test_random_steps_at_page_1", "test_a_sibling_came_first", "test_full_rows_whose_window_is_gone"),
        "test_a_receipt_of_another_node_is_rejected",
    }
