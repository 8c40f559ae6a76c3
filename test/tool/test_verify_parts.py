"""The decisions of ``verify``: what is compared, in which rounds, and what counts as a difference."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from sglang_bitexact.errors import BitexactError
from sglang_bitexact.verify.answer import Answer, Difference, compare, parse
from sglang_bitexact.verify.cases import (
    Case,
    depths,
    length_cases,
    nominal_tokens,
    parse_numbers,
    random_lengths,
    stream,
    suffix_cases,
)
from sglang_bitexact.verify.chats import message_length
from sglang_bitexact.verify.matrix import FACTORS, long_configurations, long_plans, short_configurations, short_plans
from sglang_bitexact.verify.pairwise import all_pairs, pairs_of
from sglang_bitexact.verify.rounds import filler_lengths, rounds


def _answer(tokens, logprobs, top=None) -> Answer:
    return Answer(tuple(tokens), tuple(logprobs), tuple(top or [((x, t),) for t, x in zip(tokens, logprobs)]), 0, None)  # noqa: B905


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (_answer((5, 6, 7), (-1.0, -2.0, -3.0)), None),
        (_answer((5, 9, 7), (-1.0, -2.5, -9.0)), Difference(1, 0.5)),
        (_answer((5, 6, 7), (-1.0, -2.0, -3.0000001)), Difference(2, pytest.approx(1e-7))),
        (_answer((5, 6), (-1.0, -2.0)), Difference(2, 0.0)),
    ],
)
def test_answers_are_compared_exactly_up_to_the_first_differing_token(other, expected):
    assert compare(_answer((5, 6, 7), (-1.0, -2.0, -3.0)), other) == expected


def test_an_unlikely_token_of_the_top_counts_as_well():
    cold = _answer((5,), (-1.0,), [((-1.0, 5), (-2.0, 6))])
    assert compare(cold, _answer((5,), (-1.0,), [((-1.0, 5), (-2.25, 6))])) == Difference(0, 0.25)
    assert compare(cold, _answer((5,), (-1.0,), [((-1.0, 5), (-2.0, 8))])) == Difference(0, 0.0)


@pytest.mark.parametrize(
    ("details", "tier"),
    [
        ({"device": 512, "host": 0}, "device"),
        ({"device": 0, "host": 512, "storage": 0, "storage_backend": "HiCacheFile"}, "host"),
        ({"device": 256, "host": 0, "storage": 256}, "device+storage"),
        (None, "device"),
    ],
)
def test_the_tier_is_what_the_server_reports(details, tier):
    meta = {"output_token_logprobs": [], "cached_tokens": 512, "cached_tokens_details": details}
    assert parse({"output_ids": [], "meta_info": meta}).tier == tier
    assert parse({"output_ids": [], "meta_info": {**meta, "cached_tokens": 0}}).tier is None


def test_examples_of_the_docstrings():
    assert parse_numbers("1-4,127,255-257") == [1, 2, 3, 4, 127, 255, 256, 257] and parse_numbers("none") == []
    assert nominal_tokens(700, 1100, 256) == 512 and nominal_tokens(768, 768, 256) == 512
    assert depths(700, 256, 6) == (256, 512, 700) and depths(6000, 256, 4) == (256, 3072, 5888, 6000)
    assert depths(200, 256, 6) == (200,) and depths(512, 256, 1) == (512,) and depths(1100, 256, 2) == (1024, 1100)
    assert [message_length(*turn, 8, 256) for turn in ((0, 0), (1, 338), (2, 516))] == [330, 170, 110]
    primed = [Case("boundary", 0, length, 0, length) for length in (1024, 700, 900)]
    assert filler_lengths(primed, 4096, 256) == [1024, 1024, 1024, 256] and filler_lengths(primed * 9, 4096, 256) == []
    assert filler_lengths(primed, 4096, 256, longest=800) == [768, 768, 768, 768, 256]


def test_a_longer_stream_begins_with_a_shorter_one_and_stays_in_the_vocabulary():
    assert stream(3, 900, 40)[:300] == stream(3, 300, 40)
    assert set(stream(3, 900, 40)) == set(range(16, 40))
    assert stream(3, 50, 512) != stream(4, 50, 512)


def test_a_case_of_a_longer_list_is_found_again_by_its_own_seed():
    (alone,) = length_cases("boundary", [700], 12, 256, only=[512])
    assert alone in length_cases("boundary", [300, 400, 700], 10, 256)
    assert alone.repeat() == "--lengths 700 --depths 512 --suffixes none --seed 12"


def test_suffixes_share_their_base_only():
    one, four = suffix_cases([512], [1, 4], 0)
    assert one.prompt(512)[:512] == four.prompt(512)[:512] == stream(0, 512, 512)
    assert one.prompt(512)[512] != four.prompt(512)[512] or one.suffix == four.suffix
    assert one.shared == four.shared and (one.length, four.length) == (513, 516)


def test_random_lengths_are_the_same_every_time():
    assert random_lengths(4, 2048, 0) == random_lengths(4, 2048, 0) != random_lengths(4, 2048, 1)
    assert set(random_lengths(2000, 4, 0)) == {1, 2, 3, 4}


def test_rounds_stay_in_the_device_push_out_of_it_and_flush_seldom():
    cases = [Case("boundary", seed, 1000, 0, 1000) for seed in range(70)]
    parts = {tier: [len(part) for part in rounds(tier, cases, 4, 8192, 256)] for tier in ("device", "host", "storage")}
    # 4 x 1,000 tokens are within 0.6 of 8,192; 12 x 768 behind any one are beyond 1.1 of it.
    assert set(parts["device"]) == {4, 2} and parts["host"] == [13, 13, 13, 13, 13, 5] and parts["storage"] == [64, 6]
    assert all(sum(part) == 70 for part in parts.values())
    suffixes = suffix_cases([512, 700], [1] * 30, 0)
    assert [len(part) for part in rounds("device", suffixes, 4, None, 256)] == [30, 30]
    with pytest.raises(BitexactError, match="max_total_num_tokens"):
        list(rounds("host", cases, 4, None, 256))


def test_every_two_values_meet():
    rows = all_pairs(FACTORS)
    met = {pair for row in rows for pair in pairs_of(row, list(FACTORS))}
    expected = {((a, x), (b, y)) for a, b in combinations(FACTORS, 2) for x, y in product(FACTORS[a], FACTORS[b])}
    assert met == expected
    # No fewer than the two largest factors need, and not many more.
    assert 15 <= len(rows) <= 20
    assert len(all_pairs({"a": (0, 1), "b": (0, 1), "c": (0, 1)})) == 4


def test_the_long_run_is_long_enough():
    configurations = long_configurations()
    assert len({c.name for c in configurations}) == len(configurations) >= 24
    on = [vars(c) for c in configurations if c.mode == "on"]
    met = {pair for row in on for pair in pairs_of(row, list(FACTORS))}
    every = {((a, x), (b, y)) for a, b in combinations(FACTORS, 2) for x, y in product(FACTORS[a], FACTORS[b])}
    assert every - met == set()
    assert {c.mode for c in configurations} == {"stock", "off", "on"}
    planned = sum(p.comparisons(256) for i, c in enumerate(configurations) for p in long_plans(c, i))
    assert planned >= 6000


def test_the_short_run_has_every_value_in_eight_starts():
    configurations = short_configurations()
    starts = sum(2 if c.restart and c.cache != "none" else 1 for c in configurations)
    assert starts <= 8 and [c.mode for c in configurations].count("stock") == 1
    on = [c for c in configurations if c.mode == "on"]
    for name in set(FACTORS) - {"concurrency", "stride"}:
        assert {getattr(c, name) for c in on} == set(FACTORS[name]), name
    assert len({c.stride for c in on}) >= 4
    planned = sum(plan.comparisons(256) for c in on for plan in short_plans(c))
    assert planned >= 500


def test_a_stock_server_gets_no_argument_of_the_series():
    for configuration in long_configurations():
        text = " ".join(configuration.arguments("/l3"))
        assert ("--hicache-swa" in text) == (configuration.mode != "stock")
        assert configuration.environment()["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] == str(
            int(configuration.mode == "on")
        )
