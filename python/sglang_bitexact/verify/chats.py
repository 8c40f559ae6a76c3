"""Chats of several turns: each prompt contains the answers before it."""

from __future__ import annotations

from functools import partial

from sglang_bitexact.verify.answer import Answer, compare
from sglang_bitexact.verify.cases import nominal_tokens, stream
from sglang_bitexact.verify.engine import Engine
from sglang_bitexact.verify.record import Record

KIND = "chat"


def message_length(turn: int, held: int, new_tokens: int, page_size: int) -> int:
    """How long the message of a turn is, with ``held`` tokens of the chat before it.

    Every second turn's prompt ends in front of a page's end, so that the page ends inside the
    answer: what is reused there was written by decode steps. Never below 16 tokens.

    Examples, pages of 256, 8 new tokens: turn 0, 0 held -> 330; turn 1, 338 held -> 170
    (508 = 512 - 4); turn 2, 516 held -> 110.
    """
    if turn % 2 == 0:
        return 330 if turn == 0 else 70 + 20 * turn
    ends = page_size - new_tokens // 2
    return 16 + (ends - held - 16) % page_size


def compare_chats(engine: Engine, chats: int, turns: int, seed: int) -> None:
    """Hold ``chats`` chats, all at a time turn by turn; each turn but the first is compared with a cold run."""
    numbers = [n for n in range(chats) if any(_key(seed + n, t) not in engine.log for t in range(1, turns))]
    engine.progress.advance((chats - len(numbers)) * (turns - 1))
    prompts: dict[int, list[int]] = {n: [] for n in numbers}
    names = {n: engine.namespace() for n in numbers}
    settings = engine.settings
    for turn in range(turns):
        engine.progress.step(f"chats: turn {turn + 1} of {turns}")
        held = {n: len(prompts[n]) for n in numbers}
        for n in numbers:
            length = message_length(turn, held[n], settings.new_tokens, settings.page_size)
            prompts[n] += stream(f"{seed + n} turn {turn}", length, settings.vocab)
        # Other traffic between two turns, and no cold run: it would leave the right rows in a slot.
        engine.all(engine.dirt())
        warm = engine.all([engine.request(prompts[n], names[n]) for n in numbers])
        if turn:
            cold = engine.all([partial(engine.cold, prompts[n]) for n in numbers])
            for n, first, second in zip(numbers, cold, warm, strict=True):
                _add(engine, seed + n, turn, len(prompts[n]), held[n], first, second)
            engine.progress.advance(len(numbers))
        for n, answer in zip(numbers, warm, strict=True):
            prompts[n] += answer.tokens


def _add(engine: Engine, seed: int, turn: int, length: int, held: int, cold: Answer, warm: Answer) -> None:
    # The last token of an answer was not computed yet.
    nominal = nominal_tokens(held - 1, length, engine.settings.page_size)
    repeat = f"--lengths none --suffixes none --chats 1 --turns {turn + 1} --seed {seed}"
    place = ("device", warm.tier, seed, length, held - 1)
    engine.log.add(
        Record(_key(seed, turn), KIND, *place, warm.cached_tokens, nominal, compare(cold, warm), repeat),
    )


def _key(seed: int, turn: int) -> str:
    return f"{KIND} {seed} {turn}"
