"""What one run of ``verify`` compares, and the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_bitexact.verify.answer import TIERS
from sglang_bitexact.verify.cases import Case, length_cases, random_lengths, suffix_cases
from sglang_bitexact.verify.chats import compare_chats
from sglang_bitexact.verify.engine import Engine


@dataclass(frozen=True)
class Plan:
    """lengths and random: prompts that are primed at every depth; depths: only these (empty: ends of
    pages and the whole prompt, at most ``most_depths``); suffixes: of prompts of each of ``bases``;
    cold_checks: prompts whose cold run is repeated."""

    lengths: Sequence[int] = ()
    random: int = 0
    max_length: int = 2048
    depths: Sequence[int] = ()
    most_depths: int = 6
    suffixes: Sequence[int] = ()
    bases: Sequence[int] = (512, 700)
    chats: int = 0
    turns: int = 4
    tiers: Sequence[str] = TIERS[:1]
    sampled: bool = False
    seed: int = 0
    cold_checks: int = 4

    def cases(self, page_size: int) -> list[Case]:
        """Greedy ones, without the chats."""
        lengths = random_lengths(self.random, self.max_length, self.seed)
        seeds = self.seed, self.seed + len(self.lengths), self.seed + len(self.lengths) + len(lengths)
        return [
            *length_cases("boundary", self.lengths, seeds[0], page_size, only=self.depths, most=self.most_depths),
            *length_cases("random", lengths, seeds[1], page_size, only=self.depths, most=self.most_depths),
            *(suffix_cases(self.bases, self.suffixes, seeds[2]) if self.suffixes else ()),
        ]

    @property
    def chat_comparisons(self) -> int:
        return self.chats * max(self.turns - 1, 0) if "device" in self.tiers else 0

    def comparisons(self, page_size: int) -> int:
        """An upper bound: what has no hit is none, and sampling may not be available."""
        return len(self.cases(page_size)) * len(self.tiers) * (2 if self.sampled else 1) + self.chat_comparisons


@dataclass
class Outcome:
    """deterministic: cold runs agreed; else nothing else was compared. sampled: why sampled
    runs were not compared, None if they were or were not asked for."""

    deterministic: bool = True
    sampled: str | None = None


def execute(engine: Engine, plan: Plan, server_is_deterministic: bool) -> Outcome:
    """Cold against cold, then the hits of each tier, then the chats; records go to the engine's log."""
    outcome = Outcome()
    cases = plan.cases(engine.settings.page_size)
    engine.progress.step("other traffic in every request slot")
    engine.dirty_all()
    prompts = list({case.prompt_key: case for case in cases}.values())
    spread = prompts[:: max(1, len(prompts) // max(plan.cold_checks, 1))][: plan.cold_checks]
    if not engine.cold_against_cold(spread):
        return Outcome(deterministic=False)
    kinds = [cases]
    if plan.sampled:
        outcome.sampled = _sampling_problem(engine, spread, server_is_deterministic)
        if outcome.sampled is None:
            kinds.append([case._replace(kind="sampled", sampled=True) for case in cases])
    for tier in plan.tiers:
        for kind in kinds:
            engine.hits(tier, kind)
    if plan.chat_comparisons:
        engine.only(())
        compare_chats(engine, plan.chats, plan.turns, plan.seed)
    return outcome


def _sampling_problem(engine: Engine, prompts: Sequence[Case], server_is_deterministic: bool) -> str | None:
    if not server_is_deterministic:
        return "the server was started without --enable-deterministic-inference and ignores sampling_seed"
    if not engine.cold_against_cold([case._replace(sampled=True) for case in prompts], record=False):
        return "two cold runs with the same sampling_seed differ"
    return None
