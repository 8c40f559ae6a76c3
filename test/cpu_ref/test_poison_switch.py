"""SGLANG_CPU_REF_POISON: on, off, refused; on both trees and in any order of imports."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_bitexact.upstream import download, unpacked

_LINE = "SGLANG_CPU_REF_POISON=1: what is free is overwritten with garbage."


def _python(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that has no other SGLANG_ variables; None: not set."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_") and k != "TRITON_INTERPRET"}
    env |= {k: v for k, v in environment.items() if v is not None}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)


_LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()\n"
_SCHEDULE = "from sglang.srt.managers import schedule_batch\n"
_BOUND = (
    "from sglang.srt.mem_cache import allocation\n"
    "from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache as Tree\n"
    "functions = [schedule_batch.alloc_for_extend, allocation.alloc_for_extend, Tree.reset, Tree.load_back]\n"
    "print([hasattr(function, '__wrapped__') for function in functions])\n"
)


@pytest.mark.parametrize("code", [_LOAD + _SCHEDULE, _SCHEDULE + _LOAD], ids=["plugin first", "SGLang first"])
@pytest.mark.parametrize("tree", ["installed", "stock"])
def test_on_in_any_order_of_imports(code, tree):
    path = str(unpacked(download())) if tree == "stock" else None
    result = _python(code + _BOUND, SGLANG_PLATFORM="cpu_ref", SGLANG_CPU_REF_POISON="1", PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[True, True, True, True]"
    assert _LINE in result.stderr


@pytest.mark.parametrize(
    ("platform", "value"),
    [("cpu_ref", "0"), ("cpu_ref", None), (None, "1")],
    ids=["0", "unset", "another platform"],
)
def test_off(platform, value):
    result = _python(_LOAD + _SCHEDULE + _BOUND, SGLANG_PLATFORM=platform, SGLANG_CPU_REF_POISON=value)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[False, False, False, False]"
    assert _LINE not in result.stderr


@pytest.mark.parametrize("value", ["yes", ""])
def test_another_value_is_refused(value):
    result = _python(_LOAD + "print('went on')", SGLANG_PLATFORM="cpu_ref", SGLANG_CPU_REF_POISON=value)
    assert result.returncode == 1
    assert "went on" not in result.stdout and "Traceback" not in result.stderr
    assert f"SGLANG_CPU_REF_POISON is {value!r}; it takes 0 or 1." in result.stderr
