"""Questions about one text: the text is cached, a question is not. Answers, and the time to their first tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sglang_bitexact.verify.answer import TIERS, compare
from sglang_bitexact.verify.cases import Case, nominal_tokens
from sglang_bitexact.verify.client import Sampling
from sglang_bitexact.verify.engine import Engine

HANDBOOK = Path(__file__).with_name("handbook.txt").read_text()
QUESTIONS = (
    "Which water is the glass washed with?",
    "How often is the bell struck in fog?",
    "When does the boat come, and what must be ready?",
)
# Asked before, by somebody else: it brings the handbook into the cache.
_EARLIER = "May a guest turn the wheel?"
_NEW_TOKENS = 20


class Tokenizer(Protocol):
    """What is used of a ``tokenizers.Tokenizer``."""

    def encode(self, sequence: str) -> Any: ...
    def decode(self, ids: list[int]) -> str: ...


class Asked(NamedTuple):
    """One question, asked cold and with the handbook cached.

    tier: which one was meant; hit: where the server found it, None without a hit. cached_tokens:
    what was reused; nominal_tokens: whole pages that both questions have in common. first_token_s:
    seconds until the first piece of the second answer. differs_at: the first token whose id,
    log probability or likeliest alternatives differ, None if none does.
    """

    question: str
    tier: str
    hit: str | None
    prompt_tokens: int
    cached_tokens: int
    nominal_tokens: int
    cold_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    cold_first_token_s: float
    first_token_s: float
    differs_at: int | None

    def as_json(self, text_of: Callable[[int], str]) -> dict[str, Any]:
        """Every field; of each token its id and its text."""
        answers = {name: [[t, text_of(t)] for t in getattr(self, name)] for name in ("cold_tokens", "tokens")}
        return {**self._asdict(), **answers}


def prompt_of(question: str) -> str:
    return f"{HANDBOOK}\nQuestion: {question}\nAnswer:"


def common_tokens(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with. Example: [1, 2, 3], [1, 2, 4, 5] -> 2."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def ask_questions(engine: Engine, tokenizer: Tokenizer) -> list[Asked]:
    """Every question cold, then in each tier behind an earlier one; each in a namespace of its own."""
    client, page_size = engine.client, engine.settings.page_size
    sampling = Sampling(_NEW_TOKENS)
    earlier = tokenizer.encode(prompt_of(_EARLIER)).ids
    prompts = {question: tokenizer.encode(prompt_of(question)).ids for question in QUESTIONS}
    engine.progress.step("questions: cold")
    cold = {q: client.generate_timed(prompt, engine.namespace(), sampling) for q, prompt in prompts.items()}
    asked = []
    for tier in TIERS:
        engine.progress.step(f"questions: {tier}")
        names = {question: engine.namespace() for question in QUESTIONS}
        engine.all([*(engine.request(earlier, name, 1) for name in names.values()), *engine.dirt()])
        engine.empty(tier, [Case("question", number, len(earlier), 0, len(earlier)) for number in range(len(names))])
        for question, prompt in prompts.items():
            nominal = nominal_tokens(common_tokens(earlier, prompt), len(prompt), page_size)
            first, cold_s = cold[question]
            second, warm_s = client.generate_timed(prompt, names[question], sampling)
            difference = compare(first, second)
            asked.append(
                Asked(
                    question,
                    tier,
                    second.tier,
                    len(prompt),
                    second.cached_tokens,
                    nominal,
                    first.tokens,
                    second.tokens,
                    cold_s,
                    warm_s,
                    None if difference is None else difference.position,
                )
            )
    return asked
