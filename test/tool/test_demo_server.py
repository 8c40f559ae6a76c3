"""The child process of demo and serve, without a server in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_bitexact.demo.server import Server
from sglang_bitexact.errors import BitexactError


def test_a_server_that_ends_by_itself_is_an_error_with_the_end_of_its_log(tmp_path: Path):
    log = tmp_path / "server.log"
    log.write_text("loading\nout of memory\n")
    server = Server(tmp_path, [], log)
    server._process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True)
    with pytest.raises(BitexactError, match=r"(?s)ended with code 3.*out of memory"):
        server.wait()
    server.stop()
