"""The child process of demo and serve, without a server in it; the demo's verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_bitexact import cli
from sglang_bitexact.demo import run
from sglang_bitexact.demo.run import curl_line, problems
from sglang_bitexact.demo.server import Server
from sglang_bitexact.errors import BitexactError


@pytest.mark.parametrize("arguments", [["--port", "31555"], ["--dp-size", "1", "--port=31555", "--host", "0.0.0.0"]])
def test_a_port_among_the_servers_arguments_is_where_it_is_asked(tmp_path: Path, arguments: list[str]):
    """As in `make serve SERVE="--port 31555"`."""
    assert Server(tmp_path, arguments, tmp_path / "server.log", port=30000).url == "http://127.0.0.1:31555"
    assert Server(tmp_path, [], tmp_path / "server.log", port=30000).url == "http://127.0.0.1:30000"


def test_a_server_that_ends_by_itself_is_an_error_with_the_end_of_its_log(tmp_path: Path):
    log = tmp_path / "server.log"
    log.write_text("loading\nout of memory\n")
    server = Server(tmp_path, [], log)
    server._process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True)
    with pytest.raises(BitexactError, match=r"(?s)ended with code 3.*out of memory"):
        server.wait()
    server.stop()


@pytest.mark.parametrize(
    ("stock", "on", "cold", "chat", "asked", "expected"),
    [
        (3, 0, 0, 512, None, []),
        (3, 0, 0, 768, None, []),
        (0, 0, 0, 512, None, ["stock: no hit differs from its cold run, so a fault would not have shown"]),
        (3, 1, 0, 512, None, ["on: 1 of 9 hits differ from their cold run"]),
        (3, 0, 1, 512, None, ["on: two cold runs differ"]),
        (3, 0, 0, 256, None, ["on: the chat reused 256 tokens, fewer than stock's 512"]),
        (3, 0, 0, 512, 0, ["on: 1 of 2 answers about the text differ from their cold run"]),
    ],
)
def test_the_demo_says_what_it_did_not_show(stock, on, cold, chat, asked, expected):
    def mode(differing, cold, chat, asked=0):
        return {
            "comparisons": 9,
            "differing_outputs": differing,
            "cold_against_cold": {"differing_outputs": cold},
            "chat": {"reported_cached_tokens": chat},
            "questions": [{"differs_at": None}, {"differs_at": asked}],
        }

    assert problems({"modes": {"stock": mode(stock, 0, 512), "on": mode(on, cold, chat, asked)}}) == expected


def test_a_killed_server_leaves_no_process(tmp_path: Path):
    server = Server(tmp_path, [], tmp_path / "server.log")
    # It would outlive a request to end, and so would its child.
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {ignore!r}]).wait()"
    server._process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    stdout = server._process.stdout
    assert stdout is not None and stdout.readline() == b"\n"
    server.kill()
    # The end of the pipe is there once nobody can write to it.
    assert stdout.read() == b""


def test_the_curl_line_of_serve_asks_for_a_receipt_of_a_prompt_of_some_pages():
    shell = 'curl() { printf "%s\\n" "$@"; }; ' + curl_line("http://127.0.0.1:30000")
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    url, *header, flag, data = done.stdout.splitlines()
    assert (url, header) == (
        "http://127.0.0.1:30000/v1/chat/completions",
        ["-H", "Content-Type: application/json"],
    )
    assert flag == "-d"
    assert json.loads(data) == {
        "model": "tiny",
        "max_tokens": 32,
        "temperature": 0,
        "return_cached_tokens_details": True,
        "messages": [{"role": "user", "content": "the cache keeps " * 150}],
    }


@pytest.mark.parametrize(("command", "called"), [("demo", "run_demo"), ("serve", "serve")])
def test_without_the_cpu_environment_it_says_where_that_is(monkeypatch, capsys, command, called):
    def fail(*arguments, **keywords):
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(run, called, fail)
    assert cli.main([command]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sglang-bitexact: No module named 'torch'. ") and f"`make {command}`" in error
