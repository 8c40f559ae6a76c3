"""The real server on the CPU platform: one prompt has one answer, however it is served."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_bitexact.demo.compare import prompt_of, run
from sglang_bitexact.demo.scenario import SERVER_ARGUMENTS, measure
from sglang_bitexact.demo.server import Server

_PROMPTS = [prompt_of(k, n) for k, n in enumerate((1, 5, 127, 256, 300, 511, 700, 1300))]
_NEW_TOKENS = 12


def _cold(server: Server, concurrent: int) -> list[tuple]:
    """Answers to all prompts, ``concurrent`` at a time, each under a name of its own."""

    def ask(number: int) -> tuple:
        answer = run(server, _PROMPTS[number], new_tokens=_NEW_TOKENS, namespace=f"{concurrent}.{number}")
        assert answer.cached_tokens == 0
        return answer.tokens, answer.logprobs

    with ThreadPoolExecutor(concurrent) as pool:
        return list(pool.map(ask, range(len(_PROMPTS))))


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory) -> Iterator[Server]:
    """Overlap scheduling on, whole prefills."""
    log = tmp_path_factory.mktemp("alone") / "server.log"
    with Server(checkpoint, ["--max-total-tokens", "8192"], log) as running:
        yield running


@pytest.fixture(scope="module")
def alone(server) -> list[tuple]:
    """The reference: one request at a time."""
    return _cold(server, 1)


def test_concurrent_requests_get_the_same_answers(server, alone):
    """Other batches, other slots."""
    assert _cold(server, 8) == alone


def test_text_goes_in_and_out(server):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "the cache keeps"}], "max_tokens": 8}
    answer = server.post("/v1/chat/completions", {**body, "temperature": 0})
    text = answer["choices"][0]["message"]["content"]
    assert text.isascii() and text.isprintable() and answer["usage"]["completion_tokens"] == 8
    completion = server.post("/v1/completions", {"model": "tiny", "prompt": "the window", "max_tokens": 8})
    assert completion["choices"][0]["text"]


def test_answers_are_varied(alone):
    """The checkpoint does not repeat one token: a wrong row would show."""
    assert all(len(set(tokens)) >= _NEW_TOKENS // 2 for tokens, _ in alone)
    assert len({tokens for tokens, _ in alone}) == len(alone)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--disable-overlap-schedule", "--chunked-prefill-size", "512"),
        ("--chunked-prefill-size", "256", "--enable-mixed-chunk", "--max-running-requests", "3"),
    ],
    ids=["no overlap, chunks of 512", "overlap, mixed chunks of 256, queueing"],
)
def test_scheduling_does_not_change_answers(checkpoint, alone, tmp_path, arguments):
    with Server(checkpoint, ["--max-total-tokens", "8192", *arguments], tmp_path / "server.log") as server:
        assert _cold(server, 8) == alone
        assert _cold(server, 1) == alone


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_hicache_serves_hits_from_every_tier(checkpoint, tmp_path, layout):
    arguments = list(SERVER_ARGUMENTS)
    arguments[arguments.index("--hicache-mem-layout") + 1] = layout
    storage = tmp_path / "l3"
    storage.mkdir()
    log = tmp_path / "server.log"
    with Server(checkpoint, [*arguments, "--file-storage-path", str(storage)], log) as server:
        report = measure(server, storage, lambda text: None)
    # Of 700, 900 and 1,100 tokens the last one and a window of 128 are computed anew: whole
    # pages of 571, 771 and 971 are 512, 768 and 768. Two hits of each on the device, then one
    # of each from the host, and one from storage.
    reused = {tier: (tally.comparisons, tally.reported_cached_tokens) for tier, tally in report.tiers.items()}
    assert reused == {"device": (6, 4096), "host": (3, 2048), "storage": (3, 2048)}
    assert (report.cold.comparisons, report.cold.differing_outputs, report.cold.max_abs_logprob_diff) == (3, 0, 0.0)
    text = log.read_text()
    assert "Traceback" not in text, text[text.index("Traceback") :][:2000]


_ENGINE = """
import json, sys
import sglang

def main():
    checkpoint, prompts = sys.argv[1], json.loads(sys.argv[2])
    engine = sglang.Engine(model_path=checkpoint, max_total_tokens=8192, log_level="error")
    parameters = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts, sampling_params=parameters)
    print("ANSWERS" + json.dumps([answer["output_ids"] for answer in answers]))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def test_engine(checkpoint: Path, alone, tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(_ENGINE)
    arguments = [str(script), str(checkpoint), json.dumps(_PROMPTS)]
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    line = next(line for line in result.stdout.splitlines() if "ANSWERS" in line)
    assert [tuple(a) for a in json.loads(line.split("ANSWERS")[1])] == [tokens for tokens, _ in alone]
