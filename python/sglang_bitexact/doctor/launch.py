"""Asks the SGLang of a tree, in a process of its own, what it thinks of a launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from sglang_bitexact.doctor.environment import VARIABLES, Environment
from sglang_bitexact.doctor.server import Server

_PROBE = Path(__file__).with_name("probe.py")


class Launch(NamedTuple):
    """fire: start-up guards that would refuse it, in words. unknown: settings that could not be
    looked at. memory: see ``probe.plan_memory``. error: why there is no answer, else None.
    """

    fire: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    memory: dict[str, Any] | None = None
    error: str | None = None


def examine(root: Path, series: Path, environment: Environment, server: Server | None) -> Launch:
    """Of ``server``, or without one of ``environment`` alone. root, series: directories of both."""
    answer = _ask(root, environment, request(series, environment, server))
    if isinstance(answer, str):
        return Launch(error=answer)
    guards = answer["guards"]
    return Launch(tuple(guards["fire"]), tuple(guards["unknown"]), answer["memory"])


def request(series: Path, environment: Environment, server: Server | None) -> dict[str, Any]:
    """What the probe is told: arguments by their names, as far as the server gives them."""
    arguments = dict(server.info) if server else {}
    if server is not None and server.prefill_graph is not None:
        arguments["prefill_graph"] = server.prefill_graph
    state = server.state if server else {}
    running = state.get("effective_max_running_requests_per_dp") or arguments.get("max_running_requests")
    return {
        "series": str(series),
        "arguments": arguments,
        "architectures": server.model.get("architectures") if server else None,
        "model_type": server.model.get("model_type") if server else None,
        "model": server.model_config if server else None,
        # Only then are this machine's variables and devices those of the launch.
        "same_machine": environment.variables is not None,
        "switch": environment.switch,
        "running": running,
    }


def _ask(root: Path, environment: Environment, content: dict[str, Any]) -> Any:
    """The probe's answer, or what went wrong, in a line."""
    variables = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    # A platform is chosen for the process that asks, if the server's is not known.
    known = environment.variables
    variables |= known if known is not None else {n: os.environ[n] for n in ("SGLANG_PLATFORM",) if n in os.environ}
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, "-P", str(_PROBE)], input=json.dumps(content), env=variables, capture_output=True, text=True
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"it ended with code {done.returncode}"
