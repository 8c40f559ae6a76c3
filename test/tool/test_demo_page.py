"""The demo's page: one file that needs nothing else, and its figures are the report's."""

from __future__ import annotations

import copy
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from sglang_bitexact.demo import page
from sglang_bitexact.demo.bars import FULL, Bar, Chart, Group, Value, chart
from sglang_bitexact.demo.page import first_tokens, questions, render
from sglang_bitexact.demo.questions import Asked

_SVG = "{http://www.w3.org/2000/svg}"
_COLD = (5, 6, 7, 8)
# Number 7 is text that would break a page, were it not escaped.
_TEXT = {5: " a", 6: "b", 7: "<i&", 8: "c", 9: "d"}


def _tally(differing: int, comparisons: int, logprob: float, reported: int, nominal: int) -> dict[str, Any]:
    return {
        "comparisons": comparisons,
        "differing_outputs": differing,
        "max_abs_logprob_diff": logprob,
        "reported_cached_tokens": reported,
        "nominal_cached_tokens": nominal,
    }


def _asked(question: str, tier: str, tokens: tuple[int, ...], seconds: float, differs_at: int | None) -> dict[str, Any]:
    asked = Asked(question, tier, tier, 1093, 768, 1024, _COLD, tokens, 4.0, seconds, differs_at)
    return asked.as_json(_TEXT.__getitem__)


@pytest.fixture
def report() -> dict[str, Any]:
    on = {
        **_tally(0, 15, 0.0, 0, 0),
        "tiers": {
            "device": _tally(0, 6, 0.0, 4608, 4608),
            "host": _tally(0, 3, 0.0, 2304, 2304),
            "storage": _tally(0, 2, 0.0, 2200, 2304),
        },
        "chat": _tally(0, 4, 0.0, 1280, 1280),
        "cold_against_cold": _tally(0, 3, 0.0, 0, 0),
        "questions": [
            _asked("A?", "device", _COLD, 1.0, None),
            _asked("A?", "host", _COLD, 2.0, None),
            _asked("B?", "device", _COLD, 1.5, None),
        ],
    }
    stock = copy.deepcopy(on)
    stock["differing_outputs"] = 13
    stock["tiers"]["device"] = _tally(5, 6, 2.718, 4096, 4608)
    stock["questions"] = [
        _asked("A?", "device", (5, 6, 9, 8), 1.25, 1),
        _asked("A?", "host", _COLD, 2.0, 3),
        _asked("B?", "device", (9, 6, 7, 8), 3.25, 0),
    ]
    return {"sglang": "0.5.23", "modes": {"stock": stock, "on": on}}


def _parse(html: str) -> ET.Element:
    """The page is XML too, so that the standard library can say whether it is well-formed."""
    assert html.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(html)


def _words(element: ET.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def _bars(root: ET.Element, title: str) -> list[tuple[str, str]]:
    """(series, text) of every bar of the chart of this title, from the top."""
    (svg,) = (each for each in root.iter("svg") if each.get("aria-label") == title)
    texts = [_words(each) for each in svg.iter("text") if each.get("class") == "value"]
    return list(zip([str(each.get("class")) for each in svg.iter("rect")], texts, strict=True))


def test_the_charts_show_the_report(report):
    root = _parse(render(report))
    assert _bars(root, "continuations that differ") == [
        *(("stock", "5 of 6"), ("on", "0 of 6")),
        *(("stock", "0 of 3"), ("on", "0 of 3")),
        *(("stock", "0 of 2"), ("on", "0 of 2")),
        *(("stock", "0 of 4"), ("on", "0 of 4")),
    ]
    assert _bars(root, "tokens reused") == [
        *(("stock", "4096 of 4608"), ("on", "4608 of 4608")),
        *(("stock", "2304 of 2304"), ("on", "2304 of 2304")),
        *(("stock", "2200 of 2304"), ("on", "2200 of 2304")),
        *(("stock", "1280 of 1280"), ("on", "1280 of 1280")),
    ]
    # The fastest: device of stock of 1.25 and 3.25, of on of 1.0 and 1.5.
    assert _bars(root, "seconds to the first token") == [
        *(("stock", "4.00 s"), ("on", "4.00 s")),
        *(("stock", "1.25 s"), ("on", "1.00 s")),
        *(("stock", "2.00 s"), ("on", "2.00 s")),
    ]
    heads = [_words(each) for each in root.iter("strong")]
    assert heads == ["13 of 15", "0 of 15"]
    (table,) = (each for each in root.iter("table") if each.get("class") == "figures")
    rows = [[_words(cell) for cell in row] for row in table]
    assert rows[1] == ["stock", "device", "5 of 6", "2.72", "4096 of 4608"]
    assert rows[8] == ["", "a chat's later turns", "0 of 4", "0", "1280 of 1280"]
    assert len(rows) == 9


def test_answers_show_where_they_fork(report):
    root = _parse(render(report))
    tables = [each for each in root.iter("table") if each.get("class") == "answers"]
    # B forks at its first token and comes first.
    assert [_words(each) for each in root.iter("summary")] == ["B?", "A?", "The text"]
    rows = [[(cell.get("class"), _words(cell)) for cell in row] for row in tables[1]]
    assert [row[3:] for row in rows] == [
        [("same", "␣a5"), ("same", "b6"), ("same", "<i&7"), ("same", "c8")],
        [("same", "␣a5"), ("same", "b6"), ("fork", "d9"), ("behind", "c8")],
        [("same", "␣a5"), ("same", "b6"), ("same", "<i&7"), ("same", "c8")],
        [("same", "␣a5"), ("same", "b6"), ("same", "<i&7"), ("same", "c8")],
        [("same", "␣a5"), ("same", "b6"), ("same", "<i&7"), ("same", "c8")],
    ]
    assert [row[0][1] for row in rows] == ["cold", "stock, device", "stock, host", "on, device", "on, host"]
    says = [[words for _, words in row[1:3]] for row in rows]
    assert says == [
        ["reused", "differs"],
        ["768", "from token 3"],
        # The same tokens, and a log probability of the fourth is another one.
        ["768", "logprob, token 4"],
        ["768", "nowhere"],
        ["768", "nowhere"],
    ]


def test_the_page_needs_no_network(report):
    html = render(report)
    assert not re.search(r"https?:|//|@import|url\(|<script|<link|<img|\bsrc=", html)


def test_one_mode_alone_and_no_questions_are_a_page_too(report):
    del report["modes"]["stock"]
    report["modes"]["on"]["questions"] = []
    root = _parse(render(report))
    assert [_words(each) for each in root.iter("strong")] == ["0 of 15"]
    assert [_words(each) for each in root.iter("h2")] == ["In each tier"]
    assert first_tokens(report["modes"]) == {}
    assert questions(report["modes"]) == []


def test_a_missing_figure_is_no_empty_place(report):
    del report["modes"]["on"]["cold_against_cold"]["differing_outputs"]
    with pytest.raises(UndefinedError):
        render(report)


def test_bars_are_as_long_as_their_amounts():
    values = {"host": {"stock": Value(3, "3 of 3"), "on": Value(0, "0 of 3")}, "cold": {"on": Value(1.5, "half")}}
    host = (Bar("stock", 0, FULL, 14, 7, "3 of 3"), Bar("on", 18, 0, 14, 25, "0 of 3"))
    cold = (Bar("on", 44, FULL / 2, 14, 51, "half"),)
    assert chart(values) == Chart(70, (Group("host", 16, host), Group("cold", 51, cold)))
    assert chart({"host": {"on": Value(0.5, "")}}, most=1.0).groups[0].bars[0].width == FULL / 2


def test_the_template_and_the_text_are_beside_the_code():
    """Whatever carries the package carries them: both are below python/sglang_bitexact."""
    folder = Path(page.__file__).parent
    assert (folder / "page.html.j2").is_file() and (folder / "handbook.txt").is_file()
