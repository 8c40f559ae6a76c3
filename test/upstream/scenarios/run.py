"""``python -m upstream.scenarios.run OUT [LABEL ...]``: run all scenarios, write their results as JSON.

LABELs choose among upstream's cache configurations; none means all. OUT holds
    tree    where sglang is
    flag    the feature's switch, null where there is none
    unused  fixture classes that no scenario builds on
    tests   by core and name: outcome, last line of the error or reason of the skip, what was recorded
"""

# unittest's names, and imports behind load_plugins().
# ruff: noqa: E402, N802

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from sglang.srt.plugins import load_plugins

load_plugins()

import sglang
from sglang.srt.environ import envs
from sglang.srt.mem_cache.pool_host import base as pool_host_base
from sglang.srt.mem_cache.unified_radix_cache import UnifiedTreeNode
from sglang.test.kits.unified_radix_cache import (
    config,
    core,
    fixtures,
    hicache,
    insert_walk,
    kv_events,
    load_back,
    mixins,
    storage,
)

from upstream.scenarios.rust_core import provide_rust_inspector

_KITS = (core, hicache, insert_walk, kv_events, load_back, mixins, storage)
_SCENARIOS = ("device", "host", "stored", "special", "pools")
_CORES = ("python", "rust")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


class _Results(unittest.TestResult):
    def __init__(self, core_name: str) -> None:
        super().__init__()
        self.tests: dict[str, list[Any]] = {}
        self._core = core_name

    def _add(self, test: Any, outcome: str, text: str = "") -> None:
        name = test.id().removeprefix(f"{__package__}.") if __package__ else test.id()
        self.tests[f"{self._core}/{name}"] = [outcome, _ADDRESS.sub("0x", text), getattr(test, "recorded", [])]

    def startTest(self, test: Any) -> None:
        # Numbered per process: a test that fails early would otherwise shift those of the rest.
        UnifiedTreeNode.counter = 0

    def addSuccess(self, test: Any) -> None:
        self._add(test, "pass")

    def addSkip(self, test: Any, reason: str) -> None:
        self._add(test, "skip", reason)

    def addFailure(self, test: Any, err: Any) -> None:
        self._add(test, "fail", _last_line(err[1]))

    def addError(self, test: Any, err: Any) -> None:
        self._add(test, "fail", _last_line(err[1]))


def _last_line(error: BaseException) -> str:
    # CustomTestCase wraps what failed in the exception of its retry loop.
    while "retry() exceed" in str(error) and error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"


def _direct_copies(module: Any) -> Any:
    """The fixtures ask for the GPU's copy kernels; a CPU has the direct ones."""

    @functools.wraps(module.ServerArgs)
    def arguments(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("hicache_io_backend") == "kernel":
            kwargs.update(hicache_io_backend="direct", hicache_mem_layout="page_first_direct")
        return original(*args, **kwargs)

    original = module.ServerArgs
    return mock.patch.object(module, "ServerArgs", arguments)


def _cases(labels: list[str]) -> Iterator[Any]:
    """The plain test cases, and for each chosen configuration one per mixin."""
    for name in _SCENARIOS:
        module = importlib.import_module(f"upstream.scenarios.{name}")
        for value in vars(module).values():
            if not (inspect.isclass(value) and value.__module__ == module.__name__):
                continue
            if issubclass(value, unittest.TestCase):
                yield value
            elif any(attribute.startswith("test_") for attribute in vars(value)):
                namespace: dict[str, Any] = {"__name__": f"{__package__}.{name}.{value.__name__}"}
                config.define_config_test_classes(value, namespace)
                chosen = {f"Test_{label}" for label in labels} or namespace.keys()
                yield from (item for key, item in namespace.items() if key in chosen and inspect.isclass(item))


def _unused(cases: list[Any]) -> list[str]:
    used = {base for case in cases for base in case.__mro__}
    offered = {
        value
        for kit in _KITS
        for value in vars(kit).values()
        if inspect.isclass(value) and value.__module__ == kit.__name__ and value.__name__.endswith("Fixtures")
    }
    return sorted(value.__name__ for value in offered - used)


def main(out: Path, labels: list[str]) -> None:
    provide_rust_inspector()
    tests: dict[str, list[Any]] = {}
    cases = list(_cases(labels))
    # What other processes hold of the machine's memory must not decide a result.
    no_reserve = mock.patch.object(pool_host_base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    with _direct_copies(mixins), _direct_copies(kv_events), no_reserve:
        for name in _CORES:
            fixtures.TREE_CORE_TEST_BACKEND = name
            results = _Results(name)
            with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(name):
                for case in cases:
                    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(results)
            tests |= results.tests
    assert sglang.__file__ is not None
    flag = getattr(envs, "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE", None)
    found = {
        "tree": str(Path(sglang.__file__).parents[1]),
        "flag": None if flag is None else flag.get(),
        "unused": _unused(cases),
        "tests": tests,
    }
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
