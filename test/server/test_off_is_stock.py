"""Off is stock: the same requests to a stock server, to part 1 (flag off and on) and to all parts (off)."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_bitexact.demo.compare import Run, prompt_of, run
from sglang_bitexact.demo.server import Server
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.series import Series
from sglang_bitexact.upstream import Wheel, download, unpacked
from sglang_bitexact.wheel import build

_ARGUMENTS = (
    *("--max-total-tokens", "4096", "--max-running-requests", "4", "--chunked-prefill-size", "512"),
    *("--enable-metrics", "--enable-hierarchical-cache", "--hicache-ratio", "2"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first", "--random-seed", "1"),
)
_FLAG = {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "1"}
# What depends on the clock, the process or the machine, and the polling of the test itself.
_VARIES = re.compile(
    r"seconds(_sum|_bucket|_total|\{|$)|latency.*(_sum|_bucket)|throughput|startup_|_gb(\{|$)|_created|occupancy"
    r"|^python_|^process_|endpoint=\"/(health|metrics)\"|utilization"
)


class Observed(NamedTuple):
    answers: list[Run]
    metrics: dict[str, float]


def _observe(tree: Path, checkpoint: Path, folder: Path, **environment: str) -> Observed:
    """Cold runs, repeats, a shared prefix, an extension and a multi-turn continuation, one by one."""
    with Server(checkpoint, _ARGUMENTS, folder / "server.log", tree=tree, environment=environment) as server:
        first = prompt_of(1, 700)
        prompts = [first, first, prompt_of(2, 1300), first[:400] + prompt_of(3, 300), first + prompt_of(4, 200)]
        prompts += [prompt_of(5, 256), prompt_of(5, 256), prompt_of(6, 1)]
        answers = [run(server, prompt, new_tokens=9, namespace="") for prompt in prompts]
        answers.append(run(server, [*first, *answers[0].tokens, *prompt_of(7, 100)], new_tokens=40, namespace=""))
        # Counters of the last request are published with the next idle report.
        time.sleep(2)
        return Observed(answers, _metrics(server.get("/metrics").text))


def _metrics(text: str) -> dict[str, float]:
    """Series name with labels -> value; the process id is not a label of interest."""
    out = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            out[re.sub(r'pid="\d+"', 'pid=""', name)] = float(value)
    return out


@pytest.fixture(scope="module")
def observed(checkpoint, tmp_path_factory) -> dict[str, Observed]:
    folder = tmp_path_factory.mktemp("inert")
    return {
        "stock": _observe(unpacked(download()), checkpoint, folder / "stock"),
        "part 1, off": _observe(_built(1, folder), checkpoint, folder / "off"),
        "part 1, on": _observe(_built(1, folder), checkpoint, folder / "on", **_FLAG),
        "all parts, off": _observe(_built(None, folder), checkpoint, folder / "all"),
    }


def _built(through: int | None, folder: Path) -> Path:
    series = Series.default()
    return unpacked(Wheel(build(series, download(), series.check_part(through), folder / "dist")))


_MODES = pytest.mark.parametrize("mode", ["part 1, off", "part 1, on", "all parts, off"])


@_MODES
def test_answers_are_equal(observed, mode):
    """Tokens, log probabilities, cached-token counts and the tier of each hit."""
    assert observed[mode].answers == observed["stock"].answers


def test_the_requests_reuse_prefixes(observed):
    assert sum(answer.cached_tokens > 0 for answer in observed["stock"].answers) >= 4


@_MODES
def test_metrics_have_the_same_names(observed, mode):
    assert observed[mode].metrics.keys() == observed["stock"].metrics.keys()
    assert not any("bitexact" in name for name in observed[mode].metrics)


@_MODES
def test_metrics_have_the_same_values(observed, mode):
    ours, theirs = observed[mode].metrics, observed["stock"].metrics
    compared = [name for name in theirs if not _VARIES.search(name)]
    assert len(compared) > 100
    assert {name: (ours[name], theirs[name]) for name in compared if ours[name] != theirs[name]} == {}


def test_with_the_flag_on_the_first_parts_refuse_to_start(checkpoint, tmp_path):
    """One message, from the launching process: no worker was started that could hang."""
    server = Server(checkpoint, _ARGUMENTS, tmp_path / "server.log", tree=_built(4, tmp_path), environment=_FLAG)
    with pytest.raises(BitexactError, match="the server ended with code 1"):
        server.start()
    log = (tmp_path / "server.log").read_text()
    assert log.rstrip().splitlines()[-1] == (
        "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE is on, and this build holds the first parts of the series "
        "only: it would capture windows, and not restore them. Build with all parts, or unset "
        "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE."
    )
    assert "Traceback" not in log
