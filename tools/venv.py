#!/usr/bin/env python3.11
"""Make the CPU environment of this checkout, if needed, and print its directory.

Two layers, both outside the checkout, below ``$XDG_CACHE_HOME/sglang-bitexact``:

- ``base-<key>``: everything in requirements-cpu.lock (7 GB, minutes), keyed by that file
  and shared by all checkouts of this machine.
- ``env-<key>-<checkout>``: a thin environment on top of it (seconds), with the released
  SGLang, this project in editable form, and the series applied with links, so that an
  edit below python/sglang takes effect at once.

Only the standard library: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
LOCK = CHECKOUT / "requirements-cpu.lock"
REQUIREMENTS = CHECKOUT / "requirements-cpu.in"
# Rebuild an environment when one of these changes.
_ENV_INPUTS = ("pyproject.toml", "tools/venv.py", "python/sglang_bitexact/upstream.lock.json")
_DONE = "complete.json"


def cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-bitexact"
    base.mkdir(parents=True, exist_ok=True)
    return base


def digest(*paths: Path) -> str:
    data = b"\0".join(path.read_bytes() for path in paths)
    return hashlib.sha256(data + sys.version.encode()).hexdigest()[:12]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def exclusive(name: str) -> Iterator[None]:
    """One builder at a time per machine; the others wait."""
    with open(cache() / f"{name}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


def base_environment() -> Path:
    """The shared layer; builds it if it is missing or was left unfinished."""
    path = cache() / f"base-{digest(LOCK)}"
    with exclusive(path.name):
        if (path / _DONE).is_file():
            return path
        say(f"building {path} from {LOCK.name}: about 7 GB, a few minutes")
        shutil.rmtree(path, ignore_errors=True)
        run(sys.executable, "-m", "venv", path)
        run(path / "bin/pip", "install", "--no-deps", "--disable-pip-version-check", "-qq", "-r", LOCK)
        (path / _DONE).write_text("{}")
    return path


def checkout_environment(base: Path) -> Path:
    """This checkout's layer; builds it if its inputs changed."""
    where = hashlib.sha256(str(CHECKOUT).encode()).hexdigest()[:12]
    path = cache() / f"env-{base.name.removeprefix('base-')}-{where}"
    inputs = {"inputs": digest(*(CHECKOUT / name for name in _ENV_INPUTS)), "checkout": str(CHECKOUT)}
    with exclusive(path.name):
        done = path / _DONE
        if done.is_file() and json.loads(done.read_text()) == inputs:
            return path
        say(f"building {path}")
        forget_lost_checkouts()
        shutil.rmtree(path, ignore_errors=True)
        run(base / "bin/python", "-m", "venv", "--without-pip", path)
        site = next((path / "lib").glob("python3.*/site-packages"))
        base_site = next((base / "lib").glob("python3.*/site-packages"))
        # addsitedir, so that the .pth files of the base layer count too.
        (site / "base.pth").write_text(f"import site; site.addsitedir({str(base_site)!r})\n")
        pip = (base / "bin/python", "-m", "pip", "--python", path / "bin/python")
        quiet = ("install", "--no-deps", "--disable-pip-version-check", "-qq")
        run(*pip, *quiet, "--no-build-isolation", "-e", CHECKOUT)
        code = "from sglang_bitexact.upstream import download; print(download().path)"
        wheel = subprocess.run([path / "bin/python", "-c", code], check=True, capture_output=True, text=True)
        run(*pip, *quiet, wheel.stdout.strip())
        done.write_text(json.dumps(inputs))
    return path


def forget_lost_checkouts() -> None:
    """Delete thin environments whose checkout is gone."""
    for done in cache().glob(f"env-*/{_DONE}"):
        if not Path(json.loads(done.read_text())["checkout"]).is_dir():
            shutil.rmtree(done.parent, ignore_errors=True)


def apply_series(environment: Path) -> None:
    """Bring the series as it stands in the checkout onto the environment's SGLang."""
    tool = environment / "bin/sglang-bitexact"
    with exclusive(environment.name):
        first = subprocess.run([tool, "apply", "--link"], capture_output=True, text=True)
        if first.returncode == 0:
            return
        # The series was edited since it was applied, or an apply was killed.
        try:
            run(tool, "revert")
            run(tool, "apply", "--link")
        except subprocess.CalledProcessError:
            say(first.stderr.strip())
            raise


def write_lock() -> None:
    """Resolve requirements-cpu.in afresh and write requirements-cpu.lock."""
    path = cache() / "resolve"
    shutil.rmtree(path, ignore_errors=True)
    run(sys.executable, "-m", "venv", path)
    run(path / "bin/pip", "install", "--disable-pip-version-check", "-qq", "-r", REQUIREMENTS)
    frozen = subprocess.run([path / "bin/pip", "freeze"], check=True, capture_output=True, text=True)
    LOCK.write_text(f"# Written by `make lock` from {REQUIREMENTS.name}; do not edit.\n{frozen.stdout}")
    shutil.rmtree(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lock", action="store_true", help="resolve the requirements and write the lock file")
    if parser.parse_args().lock:
        write_lock()
        return
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"tools/venv.py needs Python 3.11 (the lock file is for it), this is {sys.version.split()[0]}")
    try:
        environment = checkout_environment(base_environment())
        apply_series(environment)
    except subprocess.CalledProcessError as error:
        sys.exit(f"the environment could not be built: {error}")
    print(environment)


if __name__ == "__main__":
    main()
