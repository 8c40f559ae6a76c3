"""The benchmark's pure parts: ratios, the projection by hand, the summary of server runs, the page, the arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))

import bench
from geometry import FLASH, PRO
from page import flat, render
from paired import alternate, ratio
from projection import DEPLOYMENTS, Deployment, project, tile_bytes
from server import Chats, Record, Start, summarize


def test_a_ratio_is_the_median_of_the_pairs():
    figure = ratio([2, 6, 3], [1, 2, 2])
    assert figure == {"ratio": 2.0, "q1": 1.5, "q3": 3.0, "seconds": 3, "base_seconds": 2}


def test_calls_take_turns_and_the_first_round_is_not_kept():
    order, now = [], iter(range(100))
    times = alternate(
        {"a": lambda n: order.append(("a", n)), "b": lambda n: order.append(("b", n))}, 2, lambda: next(now)
    )
    assert order == [("a", -1), ("b", -1), ("b", 0), ("a", 0), ("a", 1), ("b", 1)]
    assert times == {"a": [1, 1], "b": [1, 1]}


# The projection, in numbers that were worked out by hand ------------------------------------------


def test_geometry():
    assert (FLASH.layers, FLASH.overlapping, tile_bytes(FLASH)) == (43, 21, 6_496_256)
    assert (PRO.layers, PRO.overlapping, tile_bytes(PRO)) == (61, 30, 9_224_192)


def test_the_documented_projection():
    found = project(FLASH, DEPLOYMENTS[0], prompt=8_192)
    assert (found.steps, found.tiles, found.launches) == (1, 32, 85)
    # 2 x 13e9 x 8,192 x 8 / (8 x 5e15 x 0.4) and 85 x 4 us, 2 x 32 x 6,496,256 / 4.8e12.
    assert found.step_seconds == pytest.approx(0.106496)
    assert found.launch_seconds == pytest.approx(340e-6)
    assert found.copy_seconds == pytest.approx(86.61675e-6, rel=1e-6)
    assert found.capture_seconds == pytest.approx(426.61675e-6, rel=1e-6)
    assert found.share == pytest.approx(0.004005941, rel=1e-6)
    # Two launches and 2 x 6,496,256 / 4.8e12.
    assert found.restore_seconds == pytest.approx(10.7067733e-6, rel=1e-6)


def test_tensor_parallelism_divides_the_step_and_not_the_capture():
    shared, alone = (project(PRO, d, prompt=8_192) for d in (Deployment("tp", 8, 1), Deployment("one", 1, 1)))
    assert shared.capture_seconds == alone.capture_seconds
    assert alone.step_seconds == pytest.approx(8 * shared.step_seconds)
    assert shared.launches == 61 + 2 * 30


def test_chunks_that_end_on_the_grid_take_three_launches():
    found = project(FLASH, DEPLOYMENTS[0], stride=64)
    # 16,384, 32,768 and 49,152 end a chunk; 65,280 and 65,536 are in the last one.
    assert (found.steps, found.tiles, found.launches) == (8, 5, 3 * 3 + 85)
    assert found.share == pytest.approx((94 * 4e-6 + 2 * 5 * 6_496_256 / 4.8e12) / (8 * 0.106496), rel=1e-6)
    # Every fourth page lies inside the chunks as well; and the page before the last.
    assert project(FLASH, DEPLOYMENTS[0], stride=4)[4:7] == (8, 65, 8 * 85)


@pytest.mark.parametrize(
    ("sizes", "deployment", "message"),
    [
        ({"prompt": 100, "chunk": 100}, DEPLOYMENTS[0], "expected a prompt of whole chunks"),
        ({"prompt": 700, "chunk": 512}, DEPLOYMENTS[0], "expected a prompt of whole chunks"),
        ({"stride": 0}, DEPLOYMENTS[0], "a stride of 1 or more"),
        ({}, Deployment("x", 2, 3), "expected 1 <= dp <= ranks"),
    ],
)
def test_the_projection_refuses(sizes, deployment, message):
    with pytest.raises(ValueError, match=message):
        project(FLASH, deployment, **sizes)


# Servers --------------------------------------------------------------------------------------


def _record(mode, server, tier, cpu, *, hit="same"):
    return Record(
        mode, server, 512, tier, (None if tier == "cold" else tier) if hit == "same" else hit, 256, 2 * cpu, cpu
    )


def test_a_hit_is_compared_with_the_cold_run_of_its_own_server_and_only_in_its_tier():
    records = [
        *(_record("off", 0, "cold", 4.0), _record("off", 0, "device", 1.0)),
        *(_record("on", 1, "cold", 8.0), _record("on", 1, "device", 1.0), _record("on", 1, "host", 9.0, hit="device")),
        *(_record("on", 2, "cold", 2.0), _record("on", 2, "device", 1.0)),
    ]
    starts = [Start("off", 10.0, 5.0, 100), Start("on", 12.0, 6.0, 110), Start("on", 14.0, 8.0, 130)]
    chats = [Chats("off", 4.0, 4.0, 16, 1000, 500), Chats("on", 2.0, 3.0, 16, 1000, 600)]
    found = summarize(records, starts, chats)
    rows = {row["tier"]: row for row in found["first_token"]}
    assert rows["device"]["off"]["cpu_over_cold"] == 0.25
    # 1 / 8 and 1 / 2; not the medians' ratio, 1 / 5.
    assert rows["device"]["on"]["cpu_over_cold"] == 0.3125
    assert rows["cold"]["cpu_on_over_off"] == 5.0 / 4.0
    assert rows["host"]["on"]["answers"] == 0 and rows["host"]["on"]["cpu"] is None
    assert [r["hit"] for r in found["elsewhere"]] == ["device"]
    assert found["start"]["cpu_on_over_off"] == 7.0 / 5.0 and found["start"]["rss_on_over_off"] == 1.2
    assert found["chats"]["wall_on_over_off"] == 0.5 and found["chats"]["on"]["cached"] == 600


# The page ------------------------------------------------------------------------------------


def _report():
    pair = {"ratio": 1.21, "q1": 1.1, "q3": 1.3, "seconds": 2.0, "base_seconds": 1.0}
    tier = {"cpu_over_cold": 0.2, "cpu": 1.0}
    row = {"length": 512, "tier": "device", "on": tier, "off": {**tier, "cpu_over_cold": None}}
    projected = {"is_projection": True, "goal": 0.005, "rows": [project(FLASH, DEPLOYMENTS[0])._asdict()]}
    figures = {
        "restore": {"one_slot": pair},
        "capture": {"decode_without_boundary": {**pair, "tile_calls": 0}},
        "server": {"first_token": [row]},
        "projection": projected,
    }
    parts = {name: {"title": f"<{name}>", "seconds": 1.0, "figures": value} for name, value in figures.items()}
    parts["gpu_tiles"] = {"title": "GPU", "seconds": 0.1, "skipped": "no NVIDIA GPU"}
    parts["digests"] = {"title": "digests", "seconds": 0.1, "error": "digests.py ended with code 1"}
    return {"quick": True, "machine": {"cores": 2}, "parts": parts}


def test_the_page_is_self_contained_and_says_what_it_is_of():
    page = render(_report())
    assert page.count("<svg") == page.count("</svg>") == 4
    assert "<script" not in page and 'src="' not in page and "<link" not in page
    assert "cores 2" in page and "A quick run" in page
    assert "restore: &lt;restore&gt;" in page and "<restore>" not in page
    assert "skipped: no NVIDIA GPU" in page and "error: digests.py ended with code 1" in page
    assert page.count("A projection on paper, not a measurement.") == 1
    assert "<td>one_slot.ratio</td><td>1.21</td>" in page
    assert "<td>decode_without_boundary.tile_calls</td><td>0</td>" in page


def test_a_page_without_figures_has_no_plots():
    assert "<svg" not in render({"parts": {"gpu_tiles": {"title": "GPU", "skipped": "no GPU"}}})


def test_leaves_have_their_path():
    assert list(flat({"a": {"b": 0.12345}, "c": [1]})) == [("a.b", "0.1235"), ("c.0", "1")]


# Arguments -----------------------------------------------------------------------------------


def test_only_takes_parts_in_their_order():
    assert bench.chosen(None) == list(bench.PARTS)
    assert bench.chosen(["projection", "restore"]) == ["restore", "projection"]


@pytest.mark.parametrize("arguments", [["--only", "resotre"], ["--only"], ["--quick", "3"], ["--rounds", "3"]])
def test_wrong_arguments_start_nothing(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main([*arguments, "--out", str(tmp_path / "out")])
    assert ended.value.code == 2 and not (tmp_path / "out").exists()
    if arguments[-1] == "resotre":
        assert "--only resotre: expected one of restore, capture_rows," in capsys.readouterr().err


def test_every_part_is_a_script_that_says_what_it_takes():
    for name, part in bench.PARTS.items():
        text = (Path(bench.__file__).parent / f"{name}.py").read_text()
        assert f"python benchmark/{name}.py" in text
        assert all(argument in text for argument in (*part.full, *part.quick, "--json") if argument.startswith("--"))


def test_a_run_writes_report_and_page_and_keeps_going_after_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "_HERE", tmp_path)
    (tmp_path / "projection.py").write_text(
        'print(\'noise\'); print(\'{"is_projection": true, "goal": 1, "rows": []}\')'
    )
    (tmp_path / "digests.py").write_text("raise SystemExit('no xxhash')")
    (tmp_path / "gpu_tiles.py").write_text('print(\'{"skipped": "no GPU"}\')')
    code = bench.main(["--only", "digests", "gpu_tiles", "projection", "--json", "--out", str(tmp_path / "out")])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 1 and report == json.loads((tmp_path / "out/report.json").read_text())
    assert list(report["parts"]) == ["digests", "gpu_tiles", "projection"]
    assert "no xxhash" in report["parts"]["digests"]["error"]
    assert report["parts"]["gpu_tiles"]["skipped"] == "no GPU"
    assert report["parts"]["projection"]["figures"]["is_projection"] is True
    assert "no GPU" in (tmp_path / "out/index.html").read_text()
