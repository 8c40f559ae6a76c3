#!/usr/bin/env python3.11
"""Each part on its own: build the series up to it, and run the tests of the parts that are in it.

    tools/test_parts.py [--part N ...]      (by the environment's python; see `make test-parts`)

Exit code 0: all pass; 1: a part's tests fail.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang_bitexact.series import Series
from sglang_bitexact.upstream import Wheel, download, unpacked
from sglang_bitexact.wheel import build

_TESTS = Path(__file__).resolve().parent.parent / "test/registered/mem_cache"
_PREFIX = "test_swa_bitexact_"

# The first part with which a file's tests pass. test/tool/test_parts.py finds one that is missing.
FIRST_PART = {
    1: ("extension_points",),
    2: (
        *("allocator", "budget", "enabled", "guard_messages", "guards", "host_stack", "host_transfers"),
        *("identity", "model_identity", "weight_update"),
    ),
    3: (
        *("capture", "padding", "placement", "planner", "ranks", "rows", "writer"),
        *("tile_calls", "tile_kernels", "tile_restore", "tile_restore_calls", "tile_runs"),
    ),
    4: (
        "digests",
        "evict",
        "faults_memory",
        "faults_storage",
        "faults_storage_writes",
        "kinds_ranks",
        "kinds_speculative",
        "kinds_storage",
        "kinds_tree",
        "late_windows",
        "oracle",
        "publish",
        "publish_traps",
        "receipt",
        "restore_queue",
        "reuse_points",
        "tile_reader",
        "tiers",
    ),
    5: ("aborts", "checksum", "coupling", "kinds_lengths", "metrics", "stored_rows"),
}


def files(through: int) -> list[Path]:
    """The test files of parts 1 to ``through``."""
    return [_TESTS / f"{_PREFIX}{name}.py" for part, names in FIRST_PART.items() if part <= through for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, nargs="+", choices=FIRST_PART, default=list(FIRST_PART))
    failed = []
    for part in parser.parse_args().part:
        with tempfile.TemporaryDirectory() as folder:
            tree = unpacked(Wheel(build(Series.default(), download(), part, Path(folder))))
        print(f"> parts 1 to {part}: {tree}", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        command = [sys.executable, "-m", "pytest", "-q", *map(str, files(part))]
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(part)
    print(f"> parts that fail: {failed}" if failed else "> every part passes its tests")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
