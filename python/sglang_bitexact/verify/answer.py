"""One answer of a server, and how two answers to one prompt differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

TIERS = ("device", "host", "storage")
TOP_LOGPROBS = 20


class Answer(NamedTuple):
    """What a request answered.

    logprobs: of each chosen token. top: per token the most likely ones, as (logprob, token id).
    cached_tokens: of the prompt, as the server reports it. tier: where these came from, one of
    ``TIERS`` or several joined by ``+``; None without a hit. retractions: how often the server
    took the request's memory away and began again.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[float, int], ...], ...]
    cached_tokens: int
    tier: str | None
    retractions: int = 0


class Difference(NamedTuple):
    """position: the first one whose token, logprob or top logprobs differ. logprob: the largest
    absolute difference up to and including the first differing token: behind it, the two
    answers continue different texts."""

    position: int
    logprob: float


def parse(answer: Mapping[str, Any]) -> Answer:
    """An answer of ``/generate`` to a request with ``return_logprob``.

    Raises:
        KeyError, TypeError: a field is missing or has another form.
    """
    meta = answer["meta_info"]
    return Answer(
        tuple(answer["output_ids"]),
        tuple(entry[0] for entry in meta["output_token_logprobs"]),
        tuple(tuple((e[0], e[1]) for e in entries or ()) for entries in meta.get("output_top_logprobs") or ()),
        int(meta["cached_tokens"]),
        _tier(int(meta["cached_tokens"]), meta.get("cached_tokens_details") or {}),
        int(meta.get("num_retractions") or 0),
    )


def _tier(cached_tokens: int, details: Mapping[str, Any]) -> str | None:
    """Example: 768, {"device": 256, "host": 512, "storage": 0} -> "device+host"."""
    if cached_tokens == 0:
        return None
    return "+".join(tier for tier in TIERS if details.get(tier)) or "device"


def compare(cold: Answer, other: Answer) -> Difference | None:
    """Where ``other`` is not the same as ``cold``, exactly; None if it is the same everywhere.

    Example: tokens (5, 6, 7) and (5, 9, 7), logprobs (-1.0, -2.0, -3.0) and (-1.0, -2.5, -9.0)
        -> Difference(position=1, logprob=0.5)
    """
    ours, theirs = _steps(cold), _steps(other)
    position = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if position is None:
        if len(ours) == len(theirs):
            return None
        position = min(len(ours), len(theirs))
    largest = 0.0
    for a, b in zip(ours, theirs, strict=False):
        theirs_by_token = {token: logprob for logprob, token in b.top}
        pairs = [(logprob, theirs_by_token.get(token, logprob)) for logprob, token in a.top]
        largest = max(largest, *(abs(x - y) for x, y in [(a.logprob, b.logprob), *pairs] if x != y), 0.0)
        if a.token != b.token:
            break
    return Difference(position, largest)


class _Step(NamedTuple):
    token: int
    logprob: float
    top: tuple[tuple[float, int], ...]


def _steps(answer: Answer) -> list[_Step]:
    """Per output token. A server that leaves out logprobs gets none, for all answers alike."""
    count = len(answer.tokens)
    logprobs = answer.logprobs or (0.0,) * count
    top = answer.top or ((),) * count
    return [_Step(*step) for step in zip(answer.tokens, logprobs, top, strict=True)]
