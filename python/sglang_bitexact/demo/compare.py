"""Runs of one prompt, and how two of them differ."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from sglang_bitexact.demo.server import Server

PAGE_SIZE = 256
TIERS = ("device", "host", "storage")


class Run(NamedTuple):
    """What a greedy request answered. tier: where its longest cached part came from, or None."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    tier: str | None


def run(server: Server, prompt: list[int], *, new_tokens: int, namespace: str) -> Run:
    """One greedy request. Requests of different ``namespace`` never share a prefix."""
    answer = server.post(
        "/generate",
        {
            "input_ids": prompt,
            "extra_key": namespace,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": True,
        },
    )
    meta = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    tiers = {tier: int(details.get(tier) or 0) for tier in TIERS}
    longest = max(TIERS, key=lambda tier: tiers[tier])
    return Run(
        tuple(answer["output_ids"]),
        tuple(entry[0] for entry in meta["output_token_logprobs"]),
        int(meta["cached_tokens"]),
        longest if tiers[longest] else None,
    )


def prompt_of(seed: int, length: int) -> list[int]:
    """``length`` random token ids of the tiny vocabulary, the same for the same seed.

    Ids below 16 are marks and controls and are left out.
    """
    source = random.Random(seed)
    return [source.randrange(16, 512) for _ in range(length)]


def nominal_cached_tokens(length: int) -> int:
    """What the cache holds of a prompt seen before: whole pages, less the last token.

    Example: 700 -> 512; 768 -> 512, because one token must be computed.
    """
    return (length - 1) // PAGE_SIZE * PAGE_SIZE


@dataclass
class Tally:
    """Sums over comparisons with a cold run.

    Log probabilities are compared up to the first token that differs, and there: behind
    it the two runs continue different texts.
    """

    comparisons: int = 0
    differing_outputs: int = 0
    max_abs_logprob_diff: float = 0.0

    def add(self, cold: Run, other: Run) -> None:
        self.comparisons += 1
        self.differing_outputs += cold.tokens != other.tokens
        common = next((i for i, (a, b) in enumerate(zip(cold.tokens, other.tokens, strict=True)) if a != b), None)
        end = None if common is None else common + 1
        pairs = zip(cold.logprobs[:end], other.logprobs[:end], strict=True)
        self.max_abs_logprob_diff = max(self.max_abs_logprob_diff, *(abs(a - b) for a, b in pairs))


@dataclass
class TierTally(Tally):
    """The same for hits of one tier, and how much they reused."""

    nominal_cached_tokens: int = 0
    reported_cached_tokens: int = 0


@dataclass
class ModeReport:
    """One mode of the demo: cold runs against each other, and hits of each tier against cold runs."""

    cold: Tally = field(default_factory=Tally)
    tiers: dict[str, TierTally] = field(default_factory=lambda: {tier: TierTally() for tier in TIERS})

    def add_hit(self, length: int, cold: Run, warm: Run) -> None:
        """Count ``warm`` under the tier that it reported; a run without a hit is no comparison."""
        if warm.tier is None:
            return
        tally = self.tiers[warm.tier]
        tally.add(cold, warm)
        tally.nominal_cached_tokens += nominal_cached_tokens(length)
        tally.reported_cached_tokens += warm.cached_tokens

    @property
    def missing_tiers(self) -> tuple[str, ...]:
        return tuple(tier for tier, tally in self.tiers.items() if tally.comparisons == 0)

    def as_json(self) -> dict[str, Any]:
        """Sums over the tiers, then the tiers, then cold against cold."""
        total = _sum(self.tiers.values())
        tiers = {name: asdict(tally) for name, tally in self.tiers.items()}
        return {**asdict(total), "tiers": tiers, "cold_against_cold": asdict(self.cold)}


def _sum(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.comparisons += tally.comparisons
        total.differing_outputs += tally.differing_outputs
        total.max_abs_logprob_diff = max(total.max_abs_logprob_diff, tally.max_abs_logprob_diff)
    return total
