"""The demo's requests: cold runs, then hits in each of the three tiers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from sglang_bitexact.demo.compare import ModeReport, Run, prompt_of, run
from sglang_bitexact.demo.server import Server

_PROMPT_LENGTHS = (700, 900, 1100)
_NEW_TOKENS = 12
_FILLER_LENGTH = 1200
# Device rows for about three prompts: the fillers push the first ones out to the host.
_DEVICE_TOKENS = 4096

SERVER_ARGUMENTS = (
    *("--max-total-tokens", str(_DEVICE_TOKENS), "--max-running-requests", "4"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-write-policy", "write_through"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
    *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 1}'),
)


def measure(server: Server, storage: Path, step: Callable[[str], None]) -> ModeReport:
    """Run the scenario on a fresh server whose L3 folder is ``storage``.

    ``step`` is told what comes next. Each prompt runs cold twice, under names of its own
    so that nothing is reused; then it fills the cache and comes back from each tier.
    """
    report = ModeReport()
    prompts = {f"prompt of {length} tokens": prompt_of(length, length) for length in _PROMPT_LENGTHS}

    def ask(prompt: list[int], namespace: str) -> Run:
        return run(server, prompt, new_tokens=_NEW_TOKENS, namespace=namespace)

    cold: dict[str, Run] = {}
    for name, prompt in prompts.items():
        step(f"cold, twice: {name}")
        cold[name] = ask(prompt, f"{name}: cold 1")
        ask(prompt_of(1, 400), "other request")
        report.cold.add(cold[name], ask(prompt, f"{name}: cold 2"))

    def hits(namespace: str) -> None:
        for name, prompt in prompts.items():
            report.add_hit(len(prompt), cold[name], ask(prompt, namespace))

    for number, (name, prompt) in enumerate(prompts.items()):
        step(f"device: {name} repeated, then after another request used the slot")
        namespace = f"device {number}"
        ask(prompt, namespace)
        report.add_hit(len(prompt), cold[name], ask(prompt, namespace))
        ask(prompt_of(50 + number, 300), "other request")
        report.add_hit(len(prompt), cold[name], ask(prompt, namespace))

    step("host: all prompts again, after others pushed them out of device memory")
    for prompt in prompts.values():
        ask(prompt, "host")
    for number in range(5):
        ask(prompt_of(100 + number, _FILLER_LENGTH), "filler")
    hits("host")

    step("storage: all prompts again, after a flush of device and host")
    _wait_until_written(storage)
    server.flush()
    hits("host")
    return report


def _wait_until_written(storage: Path, quiet_s: float = 1.0, limit_s: float = 30.0) -> None:
    """Wait until no file has appeared in ``storage`` for a moment: backups are asynchronous."""
    end = time.monotonic() + limit_s
    count, since = -1, time.monotonic()
    while time.monotonic() < end and time.monotonic() - since < quiet_s:
        found = sum(1 for _ in storage.rglob("*"))
        if found != count:
            count, since = found, time.monotonic()
        time.sleep(0.1)
