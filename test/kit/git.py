"""git in a test's own repository, without this machine's settings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_ENVIRONMENT = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
_ENVIRONMENT |= {
    f"GIT_{role}_{field}": "someone@example.org" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")
}


def git(repository: Path, *arguments: str) -> str:
    """What it prints."""
    # Nothing of it is kept: compressing SGLang would be most of the time.
    command = ["git", "-c", "core.compression=0", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=_ENVIRONMENT).stdout
