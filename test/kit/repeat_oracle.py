"""Requests that come again, at the lengths where windows, pages and prefixes meet, against cold runs.

    python -m kit.repeat_oracle     (in test/; prints one JSON object)

Device, host and storage in one process; the switch is on. A cold run is the first one of a
prompt in a namespace. Answers are token ids and the log probability of each, compared exactly.
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
SLOTS = 4
Answer = tuple[list[int], list[float]]


def prompt(seed: int, length: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(16, 512, (length,), generator=source).tolist()


class Asker:
    """Asks one scheduler, and keeps what was answered differently than cold."""

    def __init__(self, directory: str, **arguments: Any) -> None:
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
            **arguments,
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

    def cold(self, prompts: Sequence[list[int]], namespaces: Sequence[str]) -> None:
        """Ask prompts in namespaces that are new to them: these answers are the right ones."""
        answers = self.ask(prompts, namespaces, NEW_TOKENS)
        for tokens, (answer, cached) in zip(prompts, answers, strict=True):
            assert cached == 0
            self.cold_answers[tuple(tokens)] = answer

    def warm(self, name: str, prompts: Sequence[list[int]], namespace: str) -> None:
        """Ask again, compare with cold, note what was reused under ``name``."""
        answers = self.ask(prompts, [namespace] * len(prompts), NEW_TOKENS)
        for tokens, (answer, cached) in zip(prompts, answers, strict=True):
            self.cached.setdefault(name, []).append(cached)
            cold = self.cold_answers[tuple(tokens)]
            if answer != cold:
                self.different.append(f"{name}, {len(tokens)} tokens, {cached} reused: {answer} is not {cold}")

    def dirty(self) -> None:
        """Other traffic in every request slot, longer than the window."""
        prompts = [prompt(10_000 + self.count + n, 130 + n) for n in range(SLOTS)]
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
    """Each length cold, then again: on the device, and those with a whole page from the host and from storage."""
    prompts = [prompt(length, length) for length in LENGTHS]
    asker.cold(prompts, ["lengths"] * len(prompts))
    asker.dirty()
    asker.warm("device", prompts, "lengths")
    with_pages = [tokens for tokens in prompts if len(tokens) > PAGE]
    asker.empty_device()
    asker.warm("host", with_pages, "lengths")
    asker.empty_memory()
    asker.warm("storage", with_pages, "lengths")


def repeats(asker: Asker) -> None:
    """One prompt three times more, with other traffic between; another prompt's tail behind the same pages."""
    a = prompt(1, 700)
    b = a[: 2 * PAGE] + prompt(2, 150)
    asker.cold([a, b], ["repeats", "another's"])
    for _ in range(3):
        asker.warm("repeated", [a], "repeats")
        asker.dirty()
    asker.warm("another tail", [b], "repeats")
    asker.warm("again after it", [a], "repeats")


def extended(asker: Asker) -> None:
    """A prompt shorter than the window, then longer and longer ones that begin with it."""
    prompts = [prompt(3, 600)[:length] for length in (100, 200, 300, 600)]
    asker.cold(prompts, [f"extended {len(tokens)}" for tokens in prompts])
    for tokens in prompts:
        asker.warm("extended", [tokens], "extended")


def concurrent(asker: Asker) -> None:
    """Prefixes of exactly one and two pages, reused by three requests at once."""
    for pages in (1, 2):
        prefix = prompt(20 + pages, pages * PAGE)
        prompts = [prefix + prompt(30 + 4 * pages + n, 1 + 40 * n) for n in range(3)]
        asker.cold([prefix, *prompts], [f"pages {pages}"] + [f"pages {pages} {n}" for n in range(3)])
        asker.warm(f"behind {pages} pages", prompts, f"pages {pages}")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        asker = Asker(directory)
        for scenario in (lengths, repeats, extended, concurrent):
            scenario(asker)
        asker.settle()
        asker.run.scheduler.tree_cache.sanity_check()
        publisher = asker.run.scheduler.tree_cache.tile_publisher
        found = {"different": asker.different, "cached": asker.cached, "refused": publisher.refused}
    print(json.dumps(found), file=sys.__stdout__)


if __name__ == "__main__":
    main()
