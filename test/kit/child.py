"""Processes that a test starts, because SGLang's globals take one model per process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_TEST = Path(__file__).resolve().parents[1]


def child_environment(**variables: str) -> dict[str, str]:
    """This process's, with the kit to import, and still the SGLang that this one was told to import."""
    path = [str(_TEST), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def child_result(module: str, *arguments: str, timeout_s: float = 900) -> Any:
    """The JSON object in the last line that ``python -m module`` prints.

    Raises:
        AssertionError: it failed; holds the end of what it said.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
