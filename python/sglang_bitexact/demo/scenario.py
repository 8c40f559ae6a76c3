"""The demo's requests: cold runs, hits in each of the three tiers, a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_bitexact.demo.questions import Asked, Tokenizer, ask_questions
from sglang_bitexact.demo.server import Server, hicache_arguments
from sglang_bitexact.verify.answer import TIERS
from sglang_bitexact.verify.cases import length_cases
from sglang_bitexact.verify.chats import KIND as CHAT
from sglang_bitexact.verify.chats import compare_chats
from sglang_bitexact.verify.client import Client
from sglang_bitexact.verify.engine import Engine, Settings
from sglang_bitexact.verify.local import wait_until_written
from sglang_bitexact.verify.record import Log
from sglang_bitexact.verify.report import NoProgress
from sglang_bitexact.verify.tally import Summary, Tally, summarize, total

_PROMPT_LENGTHS = (700, 900, 1100)
_PROMPT = "boundary"
_TURNS = 4
# Device rows for about three prompts: others push the first ones out to the host.
_DEVICE_TOKENS = 4096

SERVER_ARGUMENTS = (
    *("--max-total-tokens", str(_DEVICE_TOKENS), "--max-running-requests", "4"),
    *hicache_arguments("page_first_direct"),
)


@dataclass
class ModeReport:
    """One mode of the demo: repeated prompts per tier, a chat's later turns, cold runs against cold runs;
    questions about a text."""

    tiers: dict[str, Tally]
    chat: Tally
    cold: Tally
    asked: list[Asked] = field(default_factory=list)

    @classmethod
    def of(cls, summary: Summary) -> ModeReport:
        tiers = {tier: summary.of(tier=tier, kind=_PROMPT) for tier in TIERS}
        return cls(tiers, summary.of(kind=CHAT), summary.cold)

    @property
    def missing_tiers(self) -> tuple[str, ...]:
        return tuple(tier for tier, tally in self.tiers.items() if tally.comparisons == 0)

    @property
    def total(self) -> Tally:
        """Of all hits."""
        return total([*self.tiers.values(), self.chat])

    def as_json(self) -> dict[str, Any]:
        """Sums over all hits, then the tiers, the chat, and cold against cold."""
        tiers = {tier: _numbers(tally) for tier, tally in self.tiers.items()}
        parts = {"tiers": tiers, "chat": _numbers(self.chat), "cold_against_cold": _numbers(self.cold, reuse=False)}
        return {**_numbers(self.total, reuse=False), **parts}


def _numbers(tally: Tally, *, reuse: bool = True) -> dict[str, Any]:
    reused = {"nominal_cached_tokens", "reported_cached_tokens", "no_hit"}
    return {name: value for name, value in asdict(tally).items() if reuse or name not in reused}


def measure(
    server: Server, storage: Path, step: Callable[[str], None], tokenizer: Tokenizer | None = None
) -> ModeReport:
    """Run the scenario on a fresh server whose L3 folder is ``storage``; with ``tokenizer``, questions too.

    ``step`` is told what comes next. Each prompt runs cold twice, under names of its own
    so that nothing is reused; then it, or its last whole page, fills the cache, other requests
    take the slots, and it is asked again.
    """
    client = Client(server.url)
    facts = client.facts()
    assert facts.vocab is not None, "the checkpoint is on this machine"
    settings = Settings(
        vocab=facts.vocab,
        page_size=facts.page_size,
        settle=lambda: wait_until_written(storage),
        # Stock evicts cached pages when its request slots run short; one at a time needs one.
        concurrency=1,
        device_tokens=facts.device_tokens,
        slots=facts.slots,
    )
    log = Log()
    cases = length_cases(_PROMPT, _PROMPT_LENGTHS, 1, facts.page_size, most=2)
    whole = [case for case in cases if case.depth == case.length]
    with _engine(client, settings, log, step) as engine:
        engine.cold_against_cold(whole)
        engine.hits("device", cases)
        engine.hits("host", whole)
        engine.hits("storage", whole)
        compare_chats(engine, 1, _TURNS, 1)
        report = ModeReport.of(summarize(log.records))
        if tokenizer is not None:
            report.asked = ask_questions(engine, tokenizer)
    return report


class _Steps(NoProgress):
    """Tells only what comes next."""

    def __init__(self, step: Callable[[str], None]) -> None:
        self._step = step

    def step(self, text: str) -> None:
        self._step(text)


@contextmanager
def _engine(client: Client, settings: Settings, log: Log, step: Callable[[str], None]) -> Iterator[Engine]:
    engine = Engine(client, settings, log, _Steps(step))
    try:
        yield engine
    finally:
        engine.close()
