"""Sums over comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_bitexact.verify.record import COLD, Record

# Differences that a report names.
SHOWN = 10


@dataclass
class Tally:
    """differing_outputs: comparisons in which a token, a logprob or a top logprob is another one.

    nominal_cached_tokens: whole pages of what was cached before, over all runs, those without a
    hit (``no_hit``) too; reported_cached_tokens: what was reused of it.
    """

    comparisons: int = 0
    differing_outputs: int = 0
    max_abs_logprob_diff: float = 0.0
    nominal_cached_tokens: int = 0
    reported_cached_tokens: int = 0
    no_hit: int = 0

    def add(self, record: Record) -> None:
        self.nominal_cached_tokens += record.nominal_tokens
        self.reported_cached_tokens += record.cached_tokens
        if record.tier is None and record.asked != COLD:
            self.no_hit += 1
        else:
            self.compare(record)

    def compare(self, record: Record) -> None:
        self.comparisons += 1
        if record.difference is not None:
            self.differing_outputs += 1
            self.max_abs_logprob_diff = max(self.max_abs_logprob_diff, record.difference.logprob)


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum; of the logprob differences the largest."""
    out = Tally()
    for tally in tallies:
        out.comparisons += tally.comparisons
        out.differing_outputs += tally.differing_outputs
        out.max_abs_logprob_diff = max(out.max_abs_logprob_diff, tally.max_abs_logprob_diff)
        out.nominal_cached_tokens += tally.nominal_cached_tokens
        out.reported_cached_tokens += tally.reported_cached_tokens
        out.no_hit += tally.no_hit
    return out


@dataclass
class Summary:
    """rows: per tier and kind of prompt. cold: cold runs against cold runs, among them those
    that were meant to be hits and were none. differing: every record with a difference."""

    rows: dict[tuple[str, str], Tally] = field(default_factory=dict)
    cold: Tally = field(default_factory=Tally)
    differing: list[Record] = field(default_factory=list)

    def of(self, *, tier: str | None = None, kind: str | None = None) -> Tally:
        """The rows of a tier, of a kind, or of both."""
        return total(
            tally for (t, k), tally in self.rows.items() if (tier is None or t == tier) and (kind is None or k == kind)
        )

    def missing(self, tiers: Sequence[str]) -> list[str]:
        """Those of ``tiers`` in which nothing was compared."""
        return [tier for tier in tiers if self.of(tier=tier).comparisons == 0]

    def as_json(self) -> dict[str, Any]:
        cold = asdict(self.cold)
        return {
            **asdict(self.of()),
            "rows": [{"tier": tier, "kind": kind, **asdict(tally)} for (tier, kind), tally in self.rows.items()],
            "cold_against_cold": {k: cold[k] for k in ("comparisons", "differing_outputs", "max_abs_logprob_diff")},
            "differences": [
                {**r._asdict(), "difference": r.difference and r.difference._asdict()} for r in self.differing[:SHOWN]
            ],
        }


def summarize(records: Iterable[Record]) -> Summary:
    """A run without a hit counts in the row of the tier that was meant, and as a cold run."""
    summary = Summary()
    for record in records:
        if record.asked == COLD:
            summary.cold.add(record)
        else:
            summary.rows.setdefault((record.tier or record.asked, record.kind), Tally()).add(record)
            if record.tier is None:
                summary.cold.compare(record)
        if record.difference is not None:
            summary.differing.append(record)
    return summary
