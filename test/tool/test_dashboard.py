"""The Grafana dashboard names metrics that exist, and is what Grafana imports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from sglang.srt.mem_cache.swa_bitexact.metrics import METRICS, PREFIX
from sglang.srt.mem_cache.swa_bitexact.receipt import MODES, REASONS, TIERS

ROOT = Path(__file__).parents[2]
_FILE = ROOT / "examples/grafana/bit-exact-reuse.json"
_SELECTOR = r'{__name__=~"sglang\[:_\]bitexact_(\w+)"'
_OBSERVING = (ROOT / "docs/observing.md").read_text()


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class _Datasource(_Strict):
    type: Literal["prometheus"]
    uid: str


class _Target(_Strict):
    ref_id: str = Field(pattern="^[A-Z]$")
    expr: str
    legend_format: str


class _Grid(_Strict):
    h: int = Field(gt=0)
    w: int = Field(gt=0)
    x: int = Field(ge=0)
    y: int = Field(ge=0)


class _Panel(_Strict):
    id: int
    type: Literal["timeseries", "stat"]
    title: str = Field(min_length=1)
    description: str = Field(min_length=1)
    datasource: _Datasource
    grid_pos: _Grid
    field_config: dict[str, Any]
    options: dict[str, Any]
    targets: list[_Target] = Field(min_length=1)


class _Variable(_Strict):
    name: str
    type: Literal["datasource", "query"]
    query: str
    label: str
    datasource: _Datasource | None = None
    refresh: int = 0
    multi: bool = False
    include_all: bool = False


class _Dashboard(_Strict):
    """The classic dashboard of schema version 39, as far as this one uses it."""

    uid: str = Field(pattern="^[a-z-]{1,40}$")
    title: str
    tags: list[str]
    schema_version: Literal[39]
    version: int
    editable: bool
    refresh: str
    time: dict[str, str]
    templating: dict[Literal["list"], list[_Variable]]
    annotations: dict[Literal["list"], list[Any]]
    panels: list[_Panel]


@pytest.fixture(scope="module")
def dashboard() -> _Dashboard:
    return _Dashboard.model_validate(json.loads(_FILE.read_text()))


def test_its_panels_do_not_overlap(dashboard):
    cells = [
        (x, y)
        for panel in dashboard.panels
        for x in range(panel.grid_pos.x, panel.grid_pos.x + panel.grid_pos.w)
        for y in range(panel.grid_pos.y, panel.grid_pos.y + panel.grid_pos.h)
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel.id for panel in dashboard.panels}) == len(dashboard.panels)


def test_it_names_metrics_that_exist_and_shows_all_of_them(dashboard):
    queries = [t.expr for p in dashboard.panels for t in p.targets] + [v.query for v in dashboard.templating["list"]]
    named = {PREFIX + name for query in queries for name in _named(query)}
    series = {PREFIX + m.name + ("_bucket" if m.kind == "histogram" else "") for m in METRICS}
    assert named == series


def _named(query: str) -> list[str]:
    """The metrics of ``query``, without their prefix."""
    found = re.findall(_SELECTOR, query)
    assert len(found) == query.count("sglang")
    return found


def test_its_selectors_match_both_names_that_a_scrape_can_bring():
    """prometheus_client writes no colon for who asks for OpenMetrics and names no escaping: a Prometheus before 3."""
    registry = CollectorRegistry()
    Gauge(f"{PREFIX}tiles", "help", registry=registry)
    names = set()
    for accept in ("text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0"):
        text = choose_encoder(accept)[0](registry).decode()
        names |= set(re.findall("^sglang[^ ]*", text, re.MULTILINE))
    assert names == {"sglang:bitexact_tiles", "sglang_bitexact_tiles"}
    assert all(re.fullmatch("sglang[:_]bitexact_tiles", name) for name in names)


def test_it_groups_by_labels_that_the_metrics_have(dashboard):
    labels = {PREFIX + metric.name: metric.label for metric in METRICS}
    for panel in dashboard.panels:
        for target in panel.targets:
            for by, name in re.findall(rf"by \((\w+)\) \((?:rate\(|increase\()?{_SELECTOR}", target.expr):
                assert by == ("le" if name.endswith("_bucket") else labels[PREFIX + name])
            for shown in re.findall(r"{{(\w+)}}", target.legend_format):
                assert f"by ({shown})" in target.expr


def test_the_variables_that_it_uses_are_defined(dashboard):
    defined = {variable.name for variable in dashboard.templating["list"]}
    used = set(re.findall(r"\$\{?(\w+)", _FILE.read_text()))
    assert {name for name in used if not name.startswith("__")} == defined


def test_every_metric_is_documented():
    """With kind, label and meaning, as /metrics gives them."""
    for metric in METRICS:
        row = next((line for line in _OBSERVING.splitlines() if line.startswith(f"| `{PREFIX}{metric.name}` |")), "")
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:3] == [metric.kind, f"`{metric.label}`" if metric.label else ""], metric.name
        assert len(cells[3]) > 10


def test_every_value_of_a_receipt_is_documented():
    for value in (*MODES, *REASONS, *TIERS):
        assert f"`{value}`" in _OBSERVING
