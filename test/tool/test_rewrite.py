"""Anchors and edits: what the text looks like afterwards."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kit.toy_series import CACHE_SOURCE, LOOP_SOURCE
from sglang_bitexact.edits import Anchor, Edit
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.rewrite import apply_edits

_FIND = {"class": "Cache", "function": "match", "pattern": "self.find($$$)"}


def edit(do: str, text: str, part: int = 1, **at: str) -> Edit:
    return Edit.model_validate({"part": part, "why": "a reason of some length", "at": at, "do": do, "text": text})


def apply(source: str, *edits: Edit) -> str:
    return apply_edits(source, edits, "sglang/srt/x.py", "0.5.23")


def test_append_to_a_class_keeps_a_blank_line_before_a_method():
    out = apply(CACHE_SOURCE, edit("append", "def restore(self):\n    pass\n", **{"class": "Cache"}))
    assert "        return found\n\n    def restore(self):\n        pass\n\n\nclass Other:" in out


def test_append_a_field_directly_below():
    source = "class P:\n    key: int\n\n    limit: int = 0\n"
    out = apply(source, edit("append", "reuse: bool = False", **{"class": "P"}))
    assert out == source + "    reuse: bool = False\n"


def test_append_where_the_file_has_no_last_newline():
    assert apply("class P:\n    a = 1", edit("append", "b = 2", **{"class": "P"})) == "class P:\n    a = 1\n    b = 2\n"


def test_before_goes_above_the_comment_of_the_statement():
    out = apply(CACHE_SOURCE, edit("before", "check(key)", **_FIND))
    assert "        check(key)\n        # Look up.\n        found = self.find(\n" in out


def test_before_leaves_a_comment_that_is_not_adjacent():
    source = "def f():\n    # far\n\n    g()\n"
    out = apply(source, edit("before", "h()", function="f", pattern="g()"))
    assert out == "def f():\n    # far\n\n    h()\n    g()\n"


def test_after_goes_behind_the_whole_statement():
    out = apply(CACHE_SOURCE, edit("after", "note(found)", **_FIND))
    assert "            limit=limit,\n        )\n        note(found)\n        return found\n" in out


def test_after_a_function_without_a_pattern():
    out = apply(CACHE_SOURCE, edit("after", "def other(self):\n    pass", **{"class": "Cache"}, function="match"))
    assert "        return found\n\n    def other(self):\n        pass\n\n\nclass Other" in out


def test_several_lines_are_indented_to_the_statement():
    out = apply(LOOP_SOURCE, edit("before", "if batch:\n    restore(batch)\n", function="step", pattern="run($$$)"))
    assert out == "def step(batch):\n    plan(batch)\n    if batch:\n        restore(batch)\n    run(batch)\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("f()\n", "f(reuse=True)\n"),
        ("f(a)\n", "f(a, reuse=True)\n"),
        ("f(a, b=1)\n", "f(a, b=1, reuse=True)\n"),
        ("f(\n    a,\n    b=1,\n)\n", "f(\n    a,\n    b=1,\n    reuse=True,\n)\n"),
        ("f(\n    a,\n    b=1\n)\n", "f(\n    a,\n    b=1,\n    reuse=True,\n)\n"),
        ("f(\n    a,  # why\n)\n", "f(\n    a,\n    reuse=True,  # why\n)\n"),
        ("f(g(\n    a,\n))\n", "f(g(\n    a,\n), reuse=True)\n"),
    ],
)
def test_keyword(source, expected):
    assert apply(source, edit("keyword", "reuse=True", pattern="f($$$)")) == expected
    ast.parse(expected)


def test_parameter():
    out = apply(CACHE_SOURCE, edit("parameter", "reuse=False", **{"class": "Cache"}, function="match"))
    assert "    def match(self, key, limit=None, reuse=False):\n" in out


def test_callee_keeps_the_arguments():
    out = apply(
        "pool = Pool(\n    size,  # tokens\n    page=page,\n)\n", edit("callee", "kind(size)", pattern="Pool($$$)")
    )
    assert out == "pool = kind(size)(\n    size,  # tokens\n    page=page,\n)\n"


def test_callee_needs_a_call():
    with pytest.raises(BitexactError, match="'a', which is no call"):
        apply("b = a\n", edit("callee", "f", pattern="a"))


def test_replace_an_expression():
    out = apply("gate = not ring(a) or window\n", edit("replace", "exact(a)", pattern="not ring($X)"))
    assert out == "gate = exact(a) or window\n"


def test_edits_are_resolved_against_the_source_and_keep_their_order():
    out = apply(
        LOOP_SOURCE,
        edit("before", "first()", function="step", pattern="run($$$)"),
        edit("before", "second(run)", function="step", pattern="run($$$)"),
    )
    assert "    first()\n    second(run)\n    run(batch)\n" in out


@pytest.mark.parametrize(
    ("at", "matches"),
    [
        ({"function": "step", "pattern": "walk($$$)"}, 0),
        ({"function": "no_such", "pattern": "run($$$)"}, 0),
        ({"class": "Step", "pattern": "run($$$)"}, 0),
        ({"pattern": "$F(batch)"}, 2),
    ],
)
def test_an_anchor_must_match_once_and_the_error_says_everything(at, matches):
    with pytest.raises(BitexactError) as caught:
        apply(LOOP_SOURCE, edit("before", "x()", part=3, **at))
    message = str(caught.value)
    for word in ("sglang/srt/x.py", "part 3", "edit 1", f"matches {matches} times", "0.5.23", "a reason"):
        assert word in message


def test_a_function_anchor_without_a_class_means_a_module_function():
    with pytest.raises(BitexactError, match="matches 0 times"):
        apply(CACHE_SOURCE, edit("parameter", "x=1", function="match"))


def test_a_nested_function_is_not_the_method():
    source = "class A:\n    def f(self):\n        def g():\n            run()\n\n    def g(self):\n        run()\n"
    out = apply(source, edit("after", "more()", **{"class": "A"}, function="g", pattern="run()"))
    assert out == source + "        more()\n"


def test_a_parameter_behind_double_star_is_refused():
    """It has no right place there; an unparsable module must not reach a server."""
    source = "def f(a, **rest):\n    pass\n\n\ndef g(a):\n    pass\n"
    with pytest.raises(BitexactError) as caught:
        apply(source, edit("parameter", "b=1", function="g"), edit("parameter", "b=1", function="f", part=2))
    message = str(caught.value)
    for word in ("sglang/srt/x.py is no Python", "line 1", "Part 2, edit 2 (parameter at function 'f')"):
        assert word in message


def test_edits_that_break_it_only_together_are_refused():
    first = edit("before", "if batch:", function="step", pattern="run($$$)")
    with pytest.raises(BitexactError, match="Part 1, edit 1"):
        apply(LOOP_SOURCE, first)
    both = [edit("keyword", "b=1", pattern="plan($$$)"), edit("keyword", "b=2", pattern="plan($$$)")]
    with pytest.raises(BitexactError, match=r"repeated: b.*together they do"):
        apply(LOOP_SOURCE, *both)


def test_overlapping_edits_are_refused():
    with pytest.raises(BitexactError, match="overlap"):
        apply("a = f(g(1))\n", edit("replace", "x", pattern="f($$$)"), edit("replace", "y", pattern="g($$$)"))


@pytest.mark.parametrize(
    "fields",
    [
        {"do": "keyword", "at": {"class": "A"}},
        {"do": "append", "at": {"pattern": "x"}},
        {"do": "parameter", "at": {"class": "A"}},
        {"do": "before", "at": {"class": "A"}},
        {"do": "append", "at": {"class": "A"}, "part": 6},
        {"do": "append", "at": {"class": "A"}, "unknown": 1},
        {"do": "delete", "at": {"class": "A"}},
    ],
)
def test_malformed_edits_are_refused(fields):
    with pytest.raises(ValidationError):
        Edit.model_validate({"part": 1, "why": "a reason of some length", "text": "x", **fields})


def test_anchor_reads_as_text():
    anchor = Anchor.model_validate({"class": "A", "function": "f", "pattern": "g($$$)"})
    assert str(anchor) == "class 'A', function 'f', pattern 'g($$$)'"


@given(st.lists(st.sampled_from("é日ab_"), min_size=1, max_size=6).map("".join), st.integers(0, 3))
def test_positions_are_right_behind_any_text(name, blank_lines):
    """Offsets count characters, not bytes."""
    source = f"{name} = 'é日'\n" + "\n" * blank_lines + "def f():\n    run()  # ü\n"
    out = apply(source, edit("after", "more()", function="f", pattern="run()"))
    assert out == source + "    more()\n"
