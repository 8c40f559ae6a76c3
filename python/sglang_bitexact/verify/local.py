"""One configuration on a server of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sglang_bitexact.demo.server import Server
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.verify.answer import Answer
from sglang_bitexact.verify.cases import stream
from sglang_bitexact.verify.client import Client, Facts, Sampling
from sglang_bitexact.verify.engine import Engine, Progress, Settings
from sglang_bitexact.verify.matrix import Configuration
from sglang_bitexact.verify.plan import Plan, execute
from sglang_bitexact.verify.record import Log
from sglang_bitexact.verify.tally import Summary, summarize

NEW_TOKENS = 8


def run_configuration(
    configuration: Configuration,
    plans: Sequence[Plan],
    *,
    tree: Path,
    checkpoint: Path,
    folder: Path,
    cold: dict[str, Answer],
    log: Log,
    progress: Progress,
) -> Summary:
    """Start the server, compare what ``plans`` ask for, stop it. ``folder`` takes its log and storage.

    Raises:
        BitexactError: it did not start, ended, or left a traceback in its log.
    """
    storage = folder / "l3"
    storage.mkdir(parents=True, exist_ok=True)
    log_file = folder / "server.log"
    server = Server(
        checkpoint,
        configuration.arguments(str(storage.resolve())),
        log_file,
        tree=tree,
        environment=configuration.environment(),
    )
    try:
        server.start()
        client = Client(server.url)
        settings = _settings(configuration, client.facts(), server, storage)
        engine = Engine(client, settings, log, progress, cold)
        try:
            with _other_clients(client, settings.vocab, configuration.pressure):
                for plan in plans:
                    outcome = execute(engine, plan, server_is_deterministic=configuration.sampled)
                    if outcome.sampled is not None:
                        raise BitexactError(f"{configuration.name}: sampled runs were not compared: {outcome.sampled}")
        finally:
            engine.close()
    finally:
        server.stop()
    text = log_file.read_text(errors="replace")
    if "Traceback" in text:
        raise BitexactError(f"{log_file} has a traceback:\n{text[text.index('Traceback') :][:2000]}")
    if configuration.pressure == "retract" and not engine.retractions:
        raise BitexactError(f"{configuration.name}: no request was retracted, so nothing was shown.")
    return summarize(log.records)


def _settings(configuration: Configuration, facts: Facts, server: Server, storage: Path) -> Settings:
    assert facts.vocab is not None, "the checkpoint is on this machine"

    def restart() -> None:
        server.kill()
        server.start()

    return Settings(
        vocab=facts.vocab,
        page_size=facts.page_size,
        settle=lambda: wait_until_written(storage),
        new_tokens=NEW_TOKENS,
        concurrency=configuration.concurrency,
        device_tokens=facts.device_tokens,
        slots=facts.slots,
        longest=facts.longest,
        empty=restart if configuration.restart else None,
    )


def wait_until_written(storage: Path, quiet_s: float = 1.0, limit_s: float = 60.0) -> None:
    """Wait until no file has appeared in ``storage`` for a moment: backups are asynchronous."""
    end = time.monotonic() + limit_s
    count, since = -1, time.monotonic()
    while time.monotonic() < end and time.monotonic() - since < quiet_s:
        found = sum(1 for _ in storage.rglob("*"))
        if found != count:
            count, since = found, time.monotonic()
        time.sleep(0.1)


@contextmanager
def _other_clients(client: Client, vocab: int, pressure: str) -> Iterator[None]:
    """Meanwhile, for abort: clients that hang up before the first token, or behind it. For retract:
    one long answer after the other, because the last running request is never retracted."""
    done = threading.Event()

    def ask(number: int) -> None:
        name = number % 5
        if pressure == "abort":
            prompt = stream(f"abandoned {name}", 200 + 100 * name, vocab)
            client.abandon(prompt, "abandoned", Sampling(64), after_first=number % 2 == 0)
            done.wait(0.3)
        else:
            client.generate(stream(f"long {name}", 150, vocab), f"long {name}", Sampling(100))

    def loop() -> None:
        number = 0
        while not done.is_set():
            number += 1
            # It cannot be reached while it is restarted.
            with suppress(BitexactError):
                ask(number)

    thread = threading.Thread(target=loop, daemon=True)
    if pressure != "none":
        thread.start()
    try:
        yield
    finally:
        done.set()
        if pressure != "none":
            thread.join()


def summary_json(configuration: Configuration, summary: Summary) -> dict[str, Any]:
    settings: Mapping[str, Any] = vars(configuration)
    return {**settings, **summary.as_json()}
