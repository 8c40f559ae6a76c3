"""doctor against a running server: its environment, the guards of the tree, and its tiles."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.swa_bitexact.launch_config import LaunchConfig
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from kit.checkpoint import shared_checkpoint
from kit.child import child_environment
from kit.toy_series import make_series, make_tree
from sglang_bitexact import cli
from sglang_bitexact.doctor.environment import VARIABLES, Environment
from sglang_bitexact.doctor.launch import request
from sglang_bitexact.doctor.probe import check_guards, plan_memory
from sglang_bitexact.doctor.server import Server
from sglang_bitexact.series import SWITCH, Series
from sglang_bitexact.upstream import download, unpacked

_SERVE = """
import json, sys
from kit.fake_sglang import FakeSglang, serving
fake, (info, model) = FakeSglang(), json.loads(sys.argv[1])
fake.server_info, fake.model_info = lambda: info, lambda: model
with serving(fake) as url:
    print(url, flush=True)
    sys.stdin.read()
"""
_V4 = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}


@pytest.fixture(scope="module")
def arguments() -> dict[str, Any]:
    """/server_info of a server on the CPU platform with HiCache, as its arguments resolve."""
    load_plugins()
    args = ServerArgs(model_path=str(shared_checkpoint()), enable_hierarchical_cache=True)
    args.resolve_once()
    config = LaunchConfig.of(args)
    info = json.loads(json.dumps({**args.resolved_dict(), "version": "0.5.23"}, default=str))
    reported = Server("", info, {}, Environment("", None))
    # Every argument that the guards look at is one that a server reports, under its name.
    elsewhere = {"checkpoint", "unified_kv", "unified_kv_fp8", "flashmla_backend", "online_c128", "prefill_graph"}
    # What a launch looks at on its own machine.
    elsewhere.add("unwritable_storage")
    names = vars(config).keys() - elsewhere
    assert {name: info[name] for name in names} == {name: getattr(config, name) for name in names}
    assert reported.prefill_graph == config.prefill_graph
    return info


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a process that answers as an SGLang; its URL."""
    started: list[subprocess.Popen[str]] = []

    def start(info: dict[str, Any], model: dict[str, Any] = _V4, **variables: str) -> str:
        command = [sys.executable, "-c", _SERVE, json.dumps([info, model])]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # The CPU platform sets some in this process.
        environment = {name: value for name, value in child_environment().items() if name not in VARIABLES} | variables
        process = subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload]
        started.append(process)
        return process.stdout.readline().strip()

    yield start
    for process in started:
        process.communicate()


def doctor(capsys, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    code = cli.main(["doctor", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert report.get("exit_code", 2) == code
    return report


def test_a_patched_tree_says_what_it_would_refuse(arguments, serve, capsys):
    """The installed tree, and a server with the switch on; its environment is read from its process."""
    info = {**arguments, "pp_size": 2, "hicache_write_policy": "write_back", "max_total_num_tokens": 8192}
    model = {**_V4, "model_path": str(shared_checkpoint())}
    url = serve(info, model, **{SWITCH: "1", "SGLANG_PLATFORM": "cpu_ref"})
    report = doctor(capsys, "--url", url)
    assert report["environment"]["variables"] == {SWITCH: "1", "SGLANG_PLATFORM": "cpu_ref"}
    assert report["environment"]["of"].startswith("process ") and report["platform"]["kind"] == "cpu_ref"
    assert report["guards"] == {
        "fire": [
            (
                "--pp-size is 2, but must be 1 for bit-exact reuse: stages do not agree yet on the tiles that they "
                "keep. Start with --pp-size 1."
            ),
            (
                "--hicache-write-policy is write_back, but must be write_through for bit-exact reuse: a window that "
                "is evicted before it is written cannot be restored. Start with --hicache-write-policy write_through."
            ),
        ],
        "unknown": [],
        "error": None,
    }
    assert report["wrong"] == report["guards"]["fire"] and report["exit_code"] == 1
    # Four layers, two of them of ratio 4 and one of ratio 128.
    assert (report["memory"]["tile_bytes"], report["memory"]["page_bytes"]) == (606_208, 150_016)
    assert report["server"]["holds_series"] and report["server"]["arguments"]["hicache_write_policy"] == "write_back"


def test_of_a_stock_server_it_is_told_without_a_fault(arguments, serve, capsys, monkeypatch):
    """A stock tree borrows the guards, the server's environment is not to be seen."""
    monkeypatch.setattr("sglang_bitexact.doctor.environment._LOCAL", ())
    stock = {name: value for name, value in arguments.items() if "hicache_swa" not in name}
    url = serve({**stock, "page_size": 64})
    report = doctor(capsys, "--url", url, "--tree", str(unpacked(download())))
    assert [text.split(" is ")[0] for text in report["guards"]["fire"]] == ["--page-size"]
    assert report["guards"]["unknown"] == [
        "SGLANG_HACK_FLASHMLA_BACKEND",
        "SGLANG_DSV4_UNIFIED_KV_FP8",
        "SGLANG_OPT_USE_ONLINE_COMPRESS",
        "--hicache-swa-offload-page-stride",
        "--hicache-swa-device-tile-fraction",
        "--hicache-swa-host-tile-fraction",
    ]
    assert not report["server"]["holds_series"] and report["environment"]["variables"] is None
    assert (report["exit_code"], report["verdict"]) == (0, "healthy: sglang 0.5.23, stock, switch not known")


def flash(**info: Any) -> Server:
    """A server of V4-Flash, whose sizes are those of docs/operating.md."""
    model = {
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
        "num_hidden_layers": 43,
        "head_dim": 512,
        "index_head_dim": 128,
        "sliding_window": 128,
    }
    pages = 59_575
    state = {"effective_max_running_requests_per_dp": 256, "memory_usage": {"token_capacity_swa": 256 * 256}}
    info = {
        "page_size": 256,
        "max_total_num_tokens": pages * 256,
        "chunked_prefill_size": 8192,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 1.0,
        "internal_states": [state],
        **info,
    }

    class Flash(Server):
        model_config = model

    return Flash("", info, _V4, Environment("", {SWITCH: "1"}))


def test_tiles_are_those_of_the_operators_page():
    """They are computed: the window capacity that a server reports is that of its slots' rings."""
    assert plan_memory(request(Path(), Environment("", {SWITCH: "1"}), flash())) == {
        "tile_bytes": 6_496_256,
        "page_bytes": 1_594_624,
        "device_tiles": 768,
        "device_tiles_needed": 320,
        "host_tiles": 14_623,
        "planned": False,
    }
    counted = flash(internal_states=[])
    memory = plan_memory(request(Path(), Environment("", {SWITCH: "1"}), counted))
    assert memory is not None and (memory["device_tiles"], memory["device_tiles_needed"]) == (768, None)


def test_without_the_switch_tiles_are_planned():
    """Of the memory that compressed rows have today: 0.05 of 95 GB, and the padding's tile."""
    asked = request(Path(), Environment("", {}), flash())
    assert (asked["switch"], asked["running"]) == (False, 256)
    memory = plan_memory(asked)
    assert memory is not None and memory["planned"]
    # 95 GB x 0.05 / 6,496,256 B = 731.2, and the host's copy of the other 0.95.
    assert (memory["device_tiles"], memory["host_tiles"]) == (730, 13_892)
    assert plan_memory({**asked, "model": None}) is None


@pytest.mark.parametrize(
    ("model", "fire"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, ["a LlamaForCausalLM checkpoint"]),
        ({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v41"}, ["a DeepSeek-V4.1 checkpoint"]),
        (_V4, ["2", "prefill"]),
    ],
)
def test_another_model_is_the_only_problem(model, fire):
    server = flash()._replace(model=model, info={"pp_size": 2, "disaggregation_mode": "prefill"})
    found = check_guards(request(Series.default().root, Environment("", None), server))
    assert [text.partition(" is ")[2].partition(",")[0] for text in found["fire"]] == fire
    decode = server._replace(info={"pp_size": 2, "disaggregation_mode": "decode"})
    assert check_guards(request(Series.default().root, Environment("", None), decode))["fire"] == []


def test_a_server_that_was_not_restarted_is_wrong(arguments, serve, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sglang_bitexact.doctor.launch._ask", lambda *arguments: "not asked")
    stock = {name: value for name, value in arguments.items() if "hicache_swa" not in name}
    toy = ("--tree", str(make_tree(tmp_path / "site")), "--series", str(make_series(tmp_path / "series")))
    on = doctor(capsys, "--url", serve(stock, **{SWITCH: "1"}), *toy)
    assert on["wrong"] == [
        f"{SWITCH} is on, and this sglang is stock: it has no effect",
        f"{SWITCH} is on, and the server runs without the series: restart it after `apply`",
    ]
    off = doctor(capsys, "--url", serve(stock, **{SWITCH: "0"}), *toy)
    assert (off["exit_code"], off["wrong"], off["guards"]["error"]) == (0, [], "not asked")


def test_without_a_tree_there_is_still_the_server(arguments, serve, capsys, monkeypatch):
    monkeypatch.setattr("sglang_bitexact.tree.importlib.util.find_spec", lambda name: None)
    report = doctor(capsys, "--url", serve(arguments, **{SWITCH: "1"}))
    assert (report["tree"], report["guards"]) == (None, None)
    assert report["verdict"] == "healthy: server sglang 0.5.23, with the series, switch on"


def test_what_does_not_answer_cannot_be_looked_at(capsys, serve):
    toy = serve({"version": "0.5.23"}, ["no", "object"])  # type: ignore[arg-type]
    assert "this is no SGLang server" in doctor(capsys, "--url", toy)["error"]
    assert "cannot be reached" in doctor(capsys, "--url", "http://127.0.0.1:9")["error"]
