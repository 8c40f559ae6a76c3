"""A real server says what it reuses: receipts, metrics, one line in the log."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from sglang_bitexact.demo.compare import prompt_of
from sglang_bitexact.demo.server import Server, hicache_arguments
from sglang_bitexact.series import SWITCH
from sglang_bitexact.verify.local import wait_until_written

pytestmark = pytest.mark.ci

_PREFIX = "sglang:bitexact_"
_ARGUMENTS = (
    *("--max-total-tokens", "4096", "--max-running-requests", "4", "--enable-metrics"),
    # Reuse points at 1,024, 2,048, ... and at the ends of prompts.
    *("--hicache-swa-offload-page-stride", "4"),
    *hicache_arguments("page_first_direct"),
)
_PROMPT = prompt_of(1, 1300)
_TILE_BYTES = 606_208


class Observed(NamedTuple):
    """Answers by what is asked; our metrics by name and label; the log."""

    answers: dict[str, Any]
    metrics: dict[str, float]
    log: str


def _body(prompt: list[int], **others: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 2}, **others}


def _completion(server: Server, **others: Any) -> dict[str, Any]:
    return server.post("/v1/completions", {"model": "tiny", "prompt": _PROMPT, "max_tokens": 2, **others})


def _streamed(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = requests.post(server.url + path, json={**body, "stream": True}, timeout=300).text.splitlines()
    chunks = [line.removeprefix("data: ") for line in lines if line]
    return [json.loads(chunk) for chunk in chunks if chunk != "[DONE]"]


def _metrics(server: Server) -> dict[str, float]:
    """Ours, by name and the one label that is ours: "tiles device"."""
    found = {}
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(_PREFIX):
            series, value = line.removeprefix(_PREFIX).rsplit(" ", 1)
            name, _, labels = series.partition("{")
            ours = re.search(r'\b(?:tier|mode|reason|way)="(\w+)"', labels)
            found[f"{name} {ours[1]}" if ours else name] = float(value)
    return found


def _published(server: Server, restores: int) -> dict[str, float]:
    """The metrics once so many restores are in them; an idle server publishes soon."""
    for _ in range(120):
        found = _metrics(server)
        if found.get("restore_host_seconds_count") == restores:
            return found
        time.sleep(0.5)
    raise AssertionError(f"{restores} restores are not in the metrics after a minute: {found}")


@pytest.fixture(scope="module")
def observed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder = tmp_path_factory.mktemp("observing")
    storage = folder / "l3"
    storage.mkdir()
    log = folder / "server.log"
    arguments = [*_ARGUMENTS, "--file-storage-path", str(storage)]
    with Server(checkpoint, arguments, log, environment={SWITCH: "1"}) as server:
        answers: dict[str, Any] = {
            "cold": server.post("/generate", _body(_PROMPT)),
            "device": server.post("/generate", _body(_PROMPT)),
            # Shares two pages of rows, and no reuse point.
            "off grid": server.post("/generate", _body(_PROMPT[:600] + prompt_of(2, 100))),
            "openai": _completion(server, return_cached_tokens_details=True),
            "openai, not asked for": _completion(server),
            "streamed": _streamed(server, "/generate", _body(_PROMPT)),
            "openai, streamed": _streamed(
                server,
                "/v1/completions",
                {"model": "tiny", "prompt": _PROMPT, "max_tokens": 2, "return_cached_tokens_details": True},
            ),
        }
        wait_until_written(storage)
        server.flush()
        answers["storage"] = server.post("/generate", _body(_PROMPT))
        metrics = _published(server, 6)
    return Observed(answers, metrics, log.read_text())


def _receipt(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["meta_info"]["cached_tokens_details"]["reuse_receipt"]


def test_the_receipt_of_a_cold_request(observed):
    assert observed.answers["cold"]["meta_info"]["cached_tokens"] == 0
    assert observed.answers["cold"]["meta_info"]["cached_tokens_details"] == {
        "device": 0,
        "host": 0,
        "reuse_receipt": {
            "mode": "cold",
            "nominal_hit": 0,
            "effective_hit": 0,
            "restored_boundary": 0,
            "recomputed_tokens": 1300,
        },
    }


def test_the_receipt_of_a_hit(observed):
    assert observed.answers["device"]["meta_info"]["cached_tokens"] == 1280
    assert observed.answers["device"]["meta_info"]["cached_tokens_details"] == {
        "device": 1280,
        "host": 0,
        "storage": 0,
        "storage_backend": "VerifiedStorage",
        "reuse_receipt": {
            "mode": "exact",
            "nominal_hit": 1280,
            "effective_hit": 1280,
            "restored_boundary": 1280,
            "recomputed_tokens": 20,
            "tile_tier": "device",
        },
    }


def test_the_receipt_of_a_cut(observed):
    assert observed.answers["off grid"]["meta_info"]["cached_tokens"] == 0
    assert _receipt(observed.answers["off grid"]) == {
        "mode": "clipped",
        "nominal_hit": 512,
        "effective_hit": 0,
        "restored_boundary": 0,
        "recomputed_tokens": 700,
        "reason": "off_grid",
    }


def test_the_receipt_of_a_hit_in_storage(observed):
    receipt = _receipt(observed.answers["storage"])
    assert (receipt["mode"], receipt["effective_hit"], receipt["tile_tier"]) == ("exact", 1280, "storage")


def test_openai_clients_get_it_if_they_ask(observed):
    receipt = _receipt(observed.answers["device"])
    details = observed.answers["device"]["meta_info"]["cached_tokens_details"]
    assert observed.answers["openai"]["sglext"]["cached_tokens_details"] == details
    assert "reuse_receipt" not in json.dumps(observed.answers["openai, not asked for"])
    chunks = [chunk["sglext"] for chunk in observed.answers["openai, streamed"] if chunk.get("sglext")]
    assert [chunk["cached_tokens_details"]["reuse_receipt"] for chunk in chunks] == [receipt]


def test_every_piece_of_a_stream_has_it(observed):
    assert observed.answers["streamed"]
    assert all(_receipt(chunk) == _receipt(observed.answers["device"]) for chunk in observed.answers["streamed"])


def test_metrics_say_what_the_receipts_say(observed):
    """Beside ours there are the server's own requests at its start: they are cold, and shorter than a page."""
    expected = {
        "requests_total exact": 6,
        "requests_total clipped": 1,
        "cuts_total off_grid": 1,
        "cuts_total tile_evicted": 0,
        "cuts_total pool_full": 0,
        "restores_total device": 5,
        "restores_total host": 0,
        "restores_total storage": 1,
        "nominal_tokens_total": 6 * 1280 + 512,
        "effective_tokens_total": 6 * 1280,
        "restore_host_seconds_count": 6,
        "tiles_dropped_total": 0,
        "quarantined_total storage": 0,
    }
    assert {name: observed.metrics[name] for name in expected} == expected
    assert observed.metrics["requests_total cold"] >= 1


def test_bytes_are_those_of_tiles(observed):
    """Tiles at 1,024 and 1,280; of the cut prompt at 512, which is its last page and a branch."""
    ways = {
        "capture": 3,
        "restore": 6,
        "device_to_host": 3,
        "host_to_storage": 3,
        "storage_to_host": 1,
        "host_to_device": 1,
    }
    assert {way: observed.metrics[f"tile_moved_bytes_total {way}"] / _TILE_BYTES for way in ways} == ways
    assert observed.metrics["tile_size_bytes"] == _TILE_BYTES


def test_one_line_says_what_is_exact(observed):
    lines = [line for line in observed.log.splitlines() if "Bit-exact reuse is on." in line]
    assert len(lines) == 1
    tiles = {tier: int(observed.metrics[f"tiles {tier}"]) for tier in ("device", "host")}
    assert f"Device: {tiles['device']} reuse points, " in lines[0]
    assert f"Host: {tiles['host']} reuse points, " in lines[0]
    assert f"at every 4th page of 256 tokens. It costs {_TILE_BYTES} B; 1 GB holds 1649." in lines[0]
    assert "Storage: file, identity bitexact1-" in lines[0]
    assert "Traceback" not in observed.log


def test_a_pool_that_is_short_says_so(checkpoint, tmp_path):
    """Four tiles: an answer gives up its tile at 768 for the one at 1,280; the next prompt evicts the one at 1,024."""
    arguments = (
        *("--max-total-tokens", "4096", "--max-running-requests", "1", "--chunked-prefill-size", "256"),
        *("--enable-metrics", "--hicache-swa-device-tile-fraction", "0.6"),
    )
    with Server(checkpoint, arguments, tmp_path / "server.log", environment={SWITCH: "1"}) as server:
        prompt = prompt_of(1, 760)
        answer = server.post(
            "/generate",
            {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 530, "ignore_eos": True}},
        )
        whole = prompt + answer["output_ids"]
        receipts = [
            _receipt(server.post("/generate", _body(whole[:length] + prompt_of(2, 20)))) for length in (800, 1100)
        ]
        metrics = _published(server, 2)
    cuts = [(found["nominal_hit"], found["effective_hit"], found["reason"]) for found in receipts]
    assert cuts == [(768, 512, "pool_full"), (1024, 768, "tile_evicted")]
    expected = {
        "tiles device": 4,
        "tiles_superseded_total": 1,
        "tiles_dropped_total": 0,
        "tiles_evicted_total device": 2,
        "cuts_total pool_full": 1,
        "cuts_total tile_evicted": 1,
        "cuts_total off_grid": 0,
    }
    assert {name: metrics[name] for name in expected} == expected
