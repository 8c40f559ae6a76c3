"""A server under poison: a cold run reads nothing free, a device hit of stock does."""

from __future__ import annotations

import pytest

from sglang_bitexact.demo.compare import Run, prompt_of, run
from sglang_bitexact.demo.scenario import SERVER_ARGUMENTS, measure
from sglang_bitexact.demo.server import Server
from sglang_bitexact.upstream import download, unpacked

pytestmark = pytest.mark.ci

_POISON = {"SGLANG_CPU_REF_POISON": "1"}
# Chunks: behind the first one the request's own slot and pages are there to be spared.
_CHUNKS = ("--chunked-prefill-size", "512")
_ARGUMENTS = ("--max-total-tokens", "8192", "--max-running-requests", "4", *_CHUNKS)
# The last one has more compressed rows than the indexer chooses, 512: its choice reads index keys.
_PROMPTS = [prompt_of(k, n) for k, n in enumerate((1, 127, 300, 700, 2600))]
_LINE = "SGLANG_CPU_REF_POISON=1: what is free is overwritten with garbage."


def _ask(server: Server, number: int, name: str) -> Run:
    return run(server, _PROMPTS[number], new_tokens=12, namespace=f"{name}.{number}")


def _cold(server: Server, name: str) -> list[Run]:
    answers = [_ask(server, number, name) for number in range(len(_PROMPTS))]
    assert all(answer.cached_tokens == 0 for answer in answers)
    return answers


@pytest.fixture(scope="module")
def cold(checkpoint, tmp_path_factory) -> list[Run]:
    """The answers without poison."""
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with Server(checkpoint, _ARGUMENTS, log) as server:
        answers = _cold(server, "plain")
    assert _LINE not in log.read_text()
    return answers


def test_stock_s_cold_runs_are_the_same_and_its_device_hits_differ(checkpoint, cold, tmp_path):
    """Stock re-prefills a hit's tail over the window rows of the slot's previous owner: here, garbage."""
    log = tmp_path / "server.log"
    with Server(checkpoint, _ARGUMENTS, log, tree=unpacked(download()), environment=_POISON) as server:
        assert _cold(server, "first") == cold
        # Slots and pages have had owners by now.
        assert _cold(server, "second") == cold
        first, *hits = [_ask(server, 3, "hits") for _ in range(3)]
        server.flush()
        assert _cold(server, "third") == cold
    assert first == cold[3]
    assert [hit.cached_tokens for hit in hits] == [512, 512]
    assert all(hit.logprobs != cold[3].logprobs for hit in hits)
    # The garbage of each call is another one.
    assert hits[0].logprobs != hits[1].logprobs
    assert _LINE in log.read_text()


def test_cold_runs_are_the_same_with_hicache(checkpoint, cold, tmp_path):
    """Hits from host and storage come and go in between: what they move is not free."""
    storage, log = tmp_path / "l3", tmp_path / "server.log"
    storage.mkdir()
    arguments = [*SERVER_ARGUMENTS, *_CHUNKS, "--file-storage-path", str(storage)]
    with Server(checkpoint, arguments, log, environment=_POISON) as server:
        assert _cold(server, "first") == cold
        report = measure(server, storage, lambda text: None)
        server.flush()
        assert _cold(server, "second") == cold
    assert (report.cold.comparisons, report.cold.differing_outputs, report.cold.max_abs_logprob_diff) == (3, 0, 0.0)
    assert report.missing_tiers == ()
    text = log.read_text()
    assert "Traceback" not in text, text[text.index("Traceback") :][:2000]
