"""The tiny checkpoint of this process: one, because SGLang's globals take one model."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from sglang_cpu_ref.tiny_checkpoint import write_checkpoint


@functools.cache
def shared_checkpoint() -> Path:
    """Written on first use, deleted when the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="tiny-v4-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_checkpoint(directory)
    return directory
