"""A launch with a wrong argument ends with one message that says what to change, and with no worker left."""

from __future__ import annotations

import subprocess

import pytest

from sglang_bitexact.demo.server import Server, hicache_arguments
from sglang_bitexact.errors import BitexactError
from sglang_bitexact.series import SWITCH

_POOLS = ("--max-total-tokens", "16384", "--max-running-requests", "8")


def refused(checkpoint, log, *arguments: str) -> str:
    """What the server printed."""
    server = Server(checkpoint, [*_POOLS, *arguments], log, environment={SWITCH: "1"})
    with pytest.raises(BitexactError, match=r"the server ended with code [-1-9]"):
        server.start()
    text = log.read_text()
    assert "Traceback" not in text
    assert subprocess.run(["pgrep", "-f", server.url.rpartition(":")[2]], capture_output=True, text=True).stdout == ""
    return text


def test_everything_that_is_wrong_with_the_arguments(checkpoint, tmp_path):
    """From the launching process: a file where the storage directory should be, and two numbers."""
    directory = tmp_path / "l3"
    directory.touch()
    text = refused(
        checkpoint,
        tmp_path / "server.log",
        *hicache_arguments("page_first_direct"),
        *("--file-storage-path", str(directory), "--hicache-swa-offload-page-stride", "-1"),
        *("--hicache-swa-device-tile-fraction", "2"),
    )
    message = text[text.index(f"{SWITCH} is on, and this launch cannot be bit-exact:") :].rstrip().splitlines()
    assert [line.split(",")[0] for line in message[1:]] == [
        "- --hicache-swa-offload-page-stride is -1",
        "- --hicache-swa-device-tile-fraction is 2.0",
        f"- --file-storage-path is {directory} (File exists)",
        "Change these",
    ]


@pytest.mark.ci
def test_too_few_tiles(checkpoint, tmp_path):
    """From a worker, which knows its memory."""
    text = refused(checkpoint, tmp_path / "server.log", "--hicache-swa-device-tile-fraction", "0.000001")
    assert text.count("The capture pool holds 0 tiles of 0.58 MiB (1e-06 of KV memory), but ") == 1


@pytest.mark.ci
def test_more_host_memory_than_there_is(checkpoint, tmp_path):
    arguments = [*hicache_arguments("page_first_direct"), "--hicache-ratio", "1000000"]
    text = refused(checkpoint, tmp_path / "server.log", *arguments, "--file-storage-path", str(tmp_path / "l3"))
    assert text.count("GB of host memory per rank (1 ranks on this host), but ") == 1
