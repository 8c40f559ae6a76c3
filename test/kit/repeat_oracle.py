"""Requests that come again, at the lengths where windows, pages and prefixes meet, against cold runs.

    python -m kit.repeat_oracle     (in test/; prints one JSON object)

Device, host and storage in one process; the switch is on. A cold run is the same prompt in a
namespace of its own. Answers are token ids and the log probability of each, compared exactly.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "1"

import torch

# Before anything else of SGLang: it chooses the platform, which SGLang's modules read.
from kit.scheduler_run import SchedulerRun, Script, request

PAGE = 256
# Below, at and beyond the window (128), a page, their sum and two pages.
LENGTHS = (*range(127, 131), *range(255, 258), *range(383, 386), *range(511, 514))
NEW_TOKENS = 4
SLOTS = 8
Answer = tuple[list[int], list[float]]


def prompt(seed: int, length: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(16, 512, (length,), generator=source).tolist()


class Asker:
    """Asks one scheduler, and keeps what was answered differently than cold."""

    def __init__(self, directory: str) -> None:
        self.run = SchedulerRun(
            max_total_tokens=16_384,
            max_running_requests=SLOTS,
            chunked_prefill_size=512,
            hicache_swa_device_tile_fraction=0.8,
            enable_hierarchical_cache=True,
            hicache_ratio=4.0,
            hicache_write_policy="write_through",
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_storage_backend="file",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config='{"prefetch_threshold": 1}',
            file_storage_path=directory,
        )
        self.count = 0
        self.cold_answers: dict[tuple[int, ...], Answer] = {}
        self.cached: dict[str, list[int]] = {}
        self.different: list[str] = []

    def ask(self, prompts: Sequence[list[int]], namespaces: Sequence[str], new: int) -> list[tuple[Answer, int]]:
        """The answers, of ``new`` tokens, of prompts that come at once, and how many tokens of each were reused."""
        made = []
        for tokens, namespace in zip(prompts, namespaces, strict=True):
            self.count += 1
            made.append(request(f"{self.count}", tokens, new))
            made[-1].extra_key, made[-1].return_logprob = namespace, True
        self.run.outputs.clear()
        self.run.run(self._all_at_once(made))
        found: dict[str, tuple[Answer, int]] = {}
        for output in self.run.outputs:
            for i, rid in enumerate(output.rids):
                (ids, values), cached = found.get(rid, (([], []), 0))
                ids = ids + list(output.output_ids[i])
                values = values + list(output.output_token_logprobs_val[i])
                found[rid] = (ids, values), max(cached, output.cached_tokens[i])
        assert all(len(ids) == len(values) == new for (ids, values), _ in found.values())
        return [found[each.rid] for each in made]

    def _all_at_once(self, made: list[Any]) -> Script:
        def script(iteration: int) -> list[Any] | None:
            if iteration == 0:
                return made
            # The event loop does not wait for storage; without a pause its threads get no turn.
            time.sleep(0.001)
            return None if self.run.idle else []

        return script

    def cold(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """The answers of prompts that find nothing: each is asked once, in a namespace of its own."""
        unknown = [tokens for tokens in prompts if tuple(tokens) not in self.cold_answers]
        if unknown:
            namespaces = [f"cold {len(self.cold_answers) + n}" for n in range(len(unknown))]
            for tokens, (answer, cached) in zip(unknown, self.ask(unknown, namespaces, NEW_TOKENS), strict=True):
                assert cached == 0
                self.cold_answers[tuple(tokens)] = answer
        return [self.cold_answers[tuple(tokens)] for tokens in prompts]

    def warm(self, name: str, *prompts: list[int]) -> None:
        """Ask in the shared namespace, compare with cold, note what was reused under ``name``."""
        expected = self.cold(prompts)
        answers = self.ask(prompts, ["warm"] * len(prompts), NEW_TOKENS)
        for tokens, cold, (answer, cached) in zip(prompts, expected, answers, strict=True):
            self.cached.setdefault(name, []).append(cached)
            if answer != cold:
                self.different.append(f"{name}, {len(tokens)} tokens, {cached} reused: {answer} is not {cold}")

    def dirty(self) -> None:
        """Other traffic in every request slot, longer than the window."""
        prompts = [prompt(10_000 + self.count + n, 150 + n) for n in range(SLOTS)]
        self.ask(prompts, ["other"] * SLOTS, 1)

    def settle(self) -> None:
        """Until everything is backed up, to the host and to storage."""
        tree = self.run.scheduler.tree_cache
        for _ in range(3_000):
            tree.check_hicache_events()
            if not (tree.ongoing_write_through or tree.ongoing_backup):
                return
            time.sleep(0.01)
        raise AssertionError("backups are still under way after 30 s")

    def empty_device(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.settle()
        self.run.scheduler.tree_cache.evict(EvictParams(num_tokens=1 << 20, swa_num_tokens=1 << 20))

    def empty_memory(self) -> None:
        """Nothing but storage is left."""
        self.settle()
        assert self.run.scheduler.flush_cache()


def lengths(asker: Asker) -> None:
    """Each length cold, then again from its own prefix: on the device, from the host, from storage."""
    prompts = [prompt(length, length) for length in LENGTHS]
    asker.warm("first", *prompts)
    asker.dirty()
    asker.warm("device", *prompts)
    asker.empty_device()
    asker.warm("host", *prompts)
    asker.empty_memory()
    asker.warm("storage", *prompts)


def repeats(asker: Asker) -> None:
    """One prompt three times more, with other traffic between; another prompt's tail behind the same pages."""
    a, b = prompt(1, 700), prompt(1, 512) + prompt(2, 150)
    for _ in range(4):
        asker.warm("repeated", a)
        asker.dirty()
    asker.warm("another tail", b)
    asker.warm("again after it", a)


def extended(asker: Asker) -> None:
    """A prompt shorter than the window, then longer and longer ones that begin with it."""
    for length in (100, 200, 300, 560, 1_100):
        asker.dirty()
        asker.warm("extended", prompt(3, 1_100)[:length])


def concurrent(asker: Asker) -> None:
    """Prefixes of exactly one, two and three pages, reused by four requests at once."""
    for pages in (1, 2, 3):
        prefix = prompt(20 + pages, pages * PAGE)
        asker.warm("whole pages", prefix)
        tails = [prompt(30 + 4 * pages + n, 1 + 40 * n) for n in range(4)]
        asker.dirty()
        asker.warm(f"behind {pages} pages", *(prefix + tail for tail in tails))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        asker = Asker(directory)
        for scenario in (lengths, repeats, extended, concurrent):
            scenario(asker)
        asker.run.scheduler.tree_cache.sanity_check()
        publisher = asker.run.scheduler.tree_cache.tile_publisher
        found = {"different": asker.different, "cached": asker.cached, "refused": publisher.refused}
    print(json.dumps(found), file=sys.__stdout__)


if __name__ == "__main__":
    main()
