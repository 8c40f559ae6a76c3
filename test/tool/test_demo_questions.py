"""The demo's questions about a text, asked to a server that answers like SGLang."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from kit.fake_sglang import FakeSglang, serving
from sglang_bitexact.demo.questions import HANDBOOK, QUESTIONS, Asked, ask_questions, common_tokens, prompt_of
from sglang_bitexact.verify.client import Client, Sampling
from sglang_bitexact.verify.engine import Engine, Settings
from sglang_bitexact.verify.record import Log
from sglang_bitexact.verify.report import NoProgress
from sglang_cpu_ref.tiny_tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer().tokenizer


def _ask(tokenizer: Tokenizer, fault: Callable[[str | None, int], float] = lambda tier, reused: 0.0) -> list[Asked]:
    fake = FakeSglang()
    fake.fault = fault
    settings = Settings(512, 256, lambda: None, concurrency=1, device_tokens=fake.device_tokens, slots=4)
    with serving(fake) as url:
        engine = Engine(Client(url), settings, Log(), NoProgress())
        try:
            return ask_questions(engine, tokenizer)
        finally:
            engine.close()


def test_every_question_has_a_hit_in_every_tier(tokenizer):
    asked = _ask(tokenizer)
    assert [each.question for each in asked] == 3 * list(QUESTIONS)
    assert [(each.tier, each.hit) for each in asked] == [
        (tier, tier) for tier in ("device", "host", "storage") for _ in QUESTIONS
    ]
    for each in asked:
        assert each.prompt_tokens == len(tokenizer.encode(prompt_of(each.question)).ids)
        # The handbook's whole pages, and nothing of the question.
        assert (each.cached_tokens, each.nominal_tokens) == (1024, 1024)
        assert each.tokens == each.cold_tokens and len(each.tokens) == 20
        assert each.differs_at is None
        assert each.first_token_s > 0 and each.cold_first_token_s > 0


def test_a_hit_that_is_wrong_is_told_with_its_place(tokenizer):
    asked = _ask(tokenizer, lambda tier, reused: 0.5 if tier == "host" else 0.0)
    # The fake's fault is in the last log probability.
    assert [each.differs_at for each in asked] == 3 * [None] + 3 * [19] + 3 * [None]


def test_a_streamed_answer_is_the_whole_one():
    with serving(FakeSglang()) as url:
        client = Client(url)
        whole = client.generate(range(300), "one", Sampling(4))
        streamed, seconds = client.generate_timed(range(300), "two", Sampling(4))
    assert streamed == whole and len(streamed.tokens) == 4
    assert seconds > 0


def test_the_questions_share_whole_pages_and_differ_behind_them(tokenizer):
    prompts = [tokenizer.encode(prompt_of(question)).ids for question in QUESTIONS]
    handbook = tokenizer.encode(HANDBOOK).ids
    for one, other in [(0, 1), (1, 2), (0, 2)]:
        shared = common_tokens(prompts[one], prompts[other])
        assert 4 * 256 <= len(handbook) <= shared < min(len(prompts[one]), len(prompts[other]))
    # Three of them fit on the demo's device beside each other.
    assert 3 * max(map(len, prompts)) < 4096
    assert common_tokens([1, 2, 3], [1, 2, 4, 5]) == 2


def test_the_report_has_text_and_number_of_each_token():
    asked = Asked("?", "host", "host", 300, 256, 256, (5, 6), (5, 7), 1.0, 0.5, 1)
    content = asked.as_json({5: "a", 6: "b", 7: "c"}.__getitem__)
    assert content["cold_tokens"] == [[5, "a"], [6, "b"]] and content["tokens"] == [[5, "a"], [7, "c"]]
    assert (content["hit"], content["differs_at"], content["first_token_s"]) == ("host", 1, 0.5)
