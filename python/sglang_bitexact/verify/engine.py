"""Cold runs, priming, other traffic, hits: the requests behind every comparison."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sglang_bitexact.errors import BitexactError
from sglang_bitexact.verify.answer import Answer, compare
from sglang_bitexact.verify.cases import Case, stream
from sglang_bitexact.verify.client import Client, Sampling
from sglang_bitexact.verify.record import COLD, Log, Record
from sglang_bitexact.verify.rounds import filler_lengths, rounds

Request = Callable[[], Answer]

# More rows than a window has: such a request leaves no row of its slot as it was.
_DIRT_TOKENS = 132
_MOST_DIRT = 64
_SAMPLING_SEED = 1


class Progress(Protocol):
    """Is told what comes next, and how many comparisons are done."""

    def step(self, text: str) -> None: ...
    def advance(self, comparisons: int) -> None: ...


@dataclass(frozen=True)
class Settings:
    """device_tokens: capacity of the device tier, needed for host hits only; longest: prompt that the
    server takes, slots: requests that it runs at a time, None if not known. settle waits until storage is written;
    empty empties device and host (None: the server's flush)."""

    vocab: int
    page_size: int
    settle: Callable[[], None]
    new_tokens: int = 8
    concurrency: int = 4
    device_tokens: int | None = None
    slots: int | None = None
    longest: int | None = None
    empty: Callable[[], None] | None = None


class Engine:
    """Asks ``client`` and adds a record per comparison to ``log``; what is there is not done again.

    retractions: how often the server began a request of ours again, hits and cold runs together.

    cold: answers of cold runs by prompt and sampling; may be handed on to an engine of the
    same model and kernels. ``close`` it: it holds threads.
    """

    def __init__(
        self,
        client: Client,
        settings: Settings,
        log: Log,
        progress: Progress,
        cold: dict[str, Answer] | None = None,
    ) -> None:
        self.client, self.settings, self.log, self.progress = client, settings, log, progress
        self._cold = {} if cold is None else cold
        self._pool = ThreadPoolExecutor(settings.concurrency)
        # Nothing that an earlier run left in a cache or in storage has a name of this run.
        self.retractions = 0
        self._run = secrets.token_hex(8)
        self._names = 0
        self._sampled = False

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def namespace(self) -> str:
        """A name that no request had before."""
        self._names += 1
        return f"verify {self._run} {self._names}"

    def all(self, requests: Iterable[Request]) -> list[Answer]:
        """Answers in order; ``concurrency`` requests at a time, begun in order."""
        answers = list(self._pool.map(lambda request: request(), requests))
        self.retractions += sum(answer.retractions for answer in answers)
        return answers

    def request(self, prompt: Sequence[int], namespace: str, new_tokens: int | None = None) -> Request:
        """A request of the kind under way; ``new_tokens`` None: as many as in the settings."""
        return partial(self.client.generate, prompt, namespace, self._sampling(self._sampled, new_tokens))

    def other_traffic(self, lengths: Iterable[int]) -> list[Request]:
        """Requests of these lengths that share nothing with any other."""
        names = [(self.namespace(), length) for length in lengths]
        return [self.request(stream(name, length, self.settings.vocab), name, 1) for name, length in names]

    def dirt(self, requests: int | None = None) -> list[Request]:
        """Requests that overwrite the rows of as many slots (None: of half of those in use)."""
        count = max(2, self.settings.concurrency // 2) if requests is None else requests
        return self.other_traffic([_DIRT_TOKENS] * count)

    def dirty_all(self) -> None:
        """Let every slot, at most 64, have had an owner."""
        self.all(self.dirt(min(self.settings.slots or _MOST_DIRT, _MOST_DIRT)))

    def cold_again(self, prompt: Sequence[int], sampled: bool = False) -> Answer:
        """A run under a fresh name.

        Raises:
            BitexactError: it was answered from a cache all the same.
        """
        answer = self.client.generate(prompt, self.namespace(), self._sampling(sampled))
        if answer.cached_tokens:
            raise BitexactError(
                f"a request under a fresh extra_key reused {answer.cached_tokens} tokens: the server does not keep "
                "extra_key namespaces apart, so there is no cold run to compare with."
            )
        return answer

    def cold(self, prompt: Sequence[int], sampled: bool = False) -> Answer:
        """The cold answer to ``prompt``, asked once."""
        key = hashlib.sha256(repr((self._sampling(sampled), list(prompt))).encode()).hexdigest()
        if key not in self._cold:
            self._cold[key] = self.cold_again(prompt, sampled)
        return self._cold[key]

    def _sampling(self, sampled: bool, new_tokens: int | None = None) -> Sampling:
        return Sampling(new_tokens or self.settings.new_tokens, _SAMPLING_SEED if sampled else None)

    def only(self, cases: Sequence[Case]) -> None:
        """From now on all requests are of the kind of ``cases``, greedy or sampled.

        SGLang 0.5.23 draws another token for the same seed when a greedy request is in the
        batch: it sorts the vocabulary of all of them first.
        """
        kinds = {case.sampled for case in cases} or {False}
        assert len(kinds) == 1, "greedy and sampled cases are compared one after the other"
        (self._sampled,) = kinds

    def cold_against_cold(self, cases: Iterable[Case], *, record: bool = True) -> bool:
        """Each prompt cold and alone, then again among other requests; True if nothing differs.

        record: False to leave no record of it.
        """
        self.progress.step("cold against cold")
        cases = list(cases)
        self.only(cases)
        chosen = {case.prompt_key: case for case in cases}.values()
        prompts = [case.prompt(self.settings.vocab) for case in chosen]
        alone = [self.cold(prompt, case.sampled) for case, prompt in zip(chosen, prompts, strict=True)]
        mixed: list[Request] = []
        for case, prompt in zip(chosen, prompts, strict=True):
            mixed += [partial(self.cold_again, prompt, case.sampled), *self.dirt(1)]
        equal = True
        for case, first, second in zip(chosen, alone, self.all(mixed)[::2], strict=True):
            difference = compare(first, second)
            equal = equal and difference is None
            place = (None, case.seed, case.length, 0, 0, 0)
            if record:
                self.log.add(Record(f"cold {case.prompt_key}", COLD, COLD, *place, difference, case.repeat()))
        return equal

    def hits(self, tier: str, cases: Sequence[Case]) -> None:
        """A record per case: primed, then asked so that the hit should be in ``tier``."""
        self.only(cases)
        left = [case for case in cases if _key(tier, case) not in self.log]
        self.progress.advance(len(cases) - len(left))
        settings = self.settings
        for part in rounds(tier, left, settings.concurrency, settings.device_tokens, settings.page_size):
            self.progress.step(f"{tier}: {len(part)} prompts")
            self._round(tier, part)
            self.progress.advance(len(part))

    def _round(self, tier: str, cases: Sequence[Case]) -> None:
        prompts = [case.prompt(self.settings.vocab) for case in cases]
        names: dict[str, str] = {}
        cold: dict[str, Request] = {}
        prime: list[Request] = []
        hits: list[Request] = []
        for number, (case, prompt) in enumerate(zip(cases, prompts, strict=True)):
            cold[case.prompt_key] = partial(self.cold, prompt, case.sampled)
            # On the way from host or storage, one case's hit would bring the other's prefix along.
            shared = case.shared if tier == "device" else f"{case.shared} {number}"
            if shared not in names:
                names[shared] = self.namespace()
                prime.append(self.request(prompt[: case.depth], names[shared], 1))
            hits.append(partial(self.client.generate, prompt, names[shared], self._sampling(case.sampled)))
        # Other traffic last: it owns the slots when the hits come.
        self.all([*cold.values(), *prime, *self.dirt()])
        self.empty(tier, cases)
        for case, prompt, warm in zip(cases, prompts, self.all(hits), strict=True):
            difference = compare(self.cold(prompt, case.sampled), warm)
            place = (tier, warm.tier, case.seed, case.length, case.depth)
            reuse = (warm.cached_tokens, case.nominal_tokens(self.settings.page_size))
            self.log.add(Record(_key(tier, case), case.kind, *place, *reuse, difference, case.repeat()))

    def empty(self, tier: str, cases: Sequence[Case]) -> None:
        """Take what was primed for ``cases`` out of the tiers above ``tier``."""
        if tier == "host":
            known = self.settings
            lengths = filler_lengths(cases, known.device_tokens or 0, known.page_size, known.longest)
            self.progress.step(f"{tier}: {sum(lengths)} tokens of other traffic")
            self.all(self.other_traffic(lengths))
        elif tier == "storage":
            self.settings.settle()
            (self.settings.empty or self.client.flush)()


def _key(tier: str, case: Case) -> str:
    return f"{tier} {case.kind} {case.prompt_key} {case.depth}"
