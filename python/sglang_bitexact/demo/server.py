"""A real SGLang server as a child process."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import requests

from sglang_bitexact.errors import BitexactError

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 15.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _port(command: Sequence[str]) -> int:
    """The last ``--port`` of ``command``, as the server reads it: ("--port", "1", "--port=2") -> 2."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--port", type=int)
    return int(parser.parse_known_args(command)[0].port)


# Process groups of the servers that run, for whoever has to end them from another thread.
_RUNNING: set[int] = set()


def stop_all() -> None:
    """End every server of this process at once; who waits for an answer of one gets an error."""
    for group in list(_RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def hicache_arguments(layout: str) -> tuple[str, ...]:
    """Server arguments for HiCache with all three tiers, but for ``--file-storage-path``."""
    return (
        *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-write-policy", "write_through"),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", layout),
        *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
        # Prefixes of any length are looked for.
        *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 1}'),
    )


class Server:
    """``python -m sglang.launch_server`` on the CPU platform; use as a context manager.

    arguments: of the server; ``--port`` among them wins over ``port``, and that over a free one.
    tree: directory that holds the ``sglang`` to run (None: the installed one). log: receives stdout
    and stderr, of all starts. environment: added to this process's.
    """

    def __init__(
        self,
        checkpoint: Path,
        arguments: Sequence[str],
        log: Path,
        *,
        tree: Path | None = None,
        environment: dict[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self._command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint.resolve())),
            *("--host", "127.0.0.1", "--port", str(port or free_port())),
            *arguments,
        ]
        self.url = f"http://127.0.0.1:{_port(self._command)}"
        self._log = log
        self._environment = {**os.environ, "SGLANG_PLATFORM": "cpu_ref", **(environment or {})}
        if tree is not None:
            tree = tree.resolve()
            self._environment["PYTHONPATH"] = str(tree)
            # What SGLang compiles at its start is kept under a name without the tree: servers of two trees
            # would compile it over and over, for 20 seconds each.
            self._environment.setdefault("TORCH_EXTENSIONS_DIR", str(tree.with_name(f"{tree.name}.extensions")))
        self._process: subprocess.Popen[bytes] | None = None
        self._started = False

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> float:
        """Start and wait until it answers; returns the seconds that took.

        Raises:
            BitexactError: the server ended or did not answer in time; holds the end of its log.
                Then, and after any other exception, no process of it is left.
        """
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> float:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab" if self._started else "wb") as log:
            self._started = True
            # A session of its own: the whole family of processes can be stopped.
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._log.parent,
                start_new_session=True,
            )
        _RUNNING.add(self._process.pid)
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < _START_TIMEOUT_S:
            if self._process.poll() is not None:
                raise BitexactError(f"the server ended with code {self._process.returncode}:\n{self.log_end()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return elapsed
            time.sleep(0.5)
        raise BitexactError(f"the server did not answer within {_START_TIMEOUT_S:.0f} s:\n{self.log_end()}")

    @property
    def pid(self) -> int:
        """Of the process that started all others."""
        assert self._process is not None, "start() first"
        return self._process.pid

    def wait(self) -> NoReturn:
        """Wait for a signal's exception, or for the server to end by itself, which is an error.

        Raises:
            BitexactError: the server ended; holds the end of its log.
        """
        assert self._process is not None, "start() first"
        raise BitexactError(f"the server ended with code {self._process.wait()}:\n{self.log_end()}")

    def stop(self) -> None:
        """End the server and all its processes; safe to call again."""
        process, self._process = self._process, None
        if process is None:
            return
        for sign, patience in ((signal.SIGTERM, _STOP_TIMEOUT_S), (signal.SIGKILL, _STOP_TIMEOUT_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        process.wait()
        _RUNNING.discard(process.pid)

    def kill(self) -> None:
        """End it as a power failure would: no process of it gets a word in."""
        process, self._process = self._process, None
        assert process is not None, "start() first"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _RUNNING.discard(process.pid)

    def log_end(self, lines: int = 15) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def post(self, path: str, body: dict[str, Any], timeout: float = 300.0) -> dict[str, Any]:
        """POST json, return json; BitexactError with the server's words on an error status."""
        response = requests.post(self.url + path, json=body, timeout=timeout)
        if response.status_code != 200:
            raise BitexactError(f"{path} answered {response.status_code}: {response.text[:500]}")
        answer: dict[str, Any] = response.json()
        return answer

    def get(self, path: str, timeout: float = 60.0) -> requests.Response:
        return requests.get(self.url + path, timeout=timeout)

    def flush(self) -> None:
        """Empty the device and the host tier, once nothing runs; storage keeps its files."""
        response = requests.post(f"{self.url}/flush_cache?timeout=60", timeout=90)
        if response.status_code != 200:
            raise BitexactError(f"flush_cache answered {response.status_code}: {response.text[:200]}")
