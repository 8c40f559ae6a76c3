"""The environment of a process that a test starts, because SGLang's globals take one model per process."""

from __future__ import annotations

import os
from pathlib import Path

_TEST = Path(__file__).resolve().parents[1]


def child_environment(**variables: str) -> dict[str, str]:
    """This process's, with the kit to import, and still the SGLang that this one was told to import."""
    path = [str(_TEST), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
