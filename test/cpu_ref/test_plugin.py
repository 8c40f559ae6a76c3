"""The platform attaches wholly or stops the process, and has no effect when it is not chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_cpu_ref import attention

_LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()\n"


def _python(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter; None removes a variable."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_") and k != "TRITON_INTERPRET"}
    env |= {k: v for k, v in environment.items() if v is not None}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)


def test_without_effect_unless_chosen():
    result = _python(
        _LOAD + "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "from sglang.srt.platforms import current_platform\n"
        "import sys\n"
        "assert not HookRegistry._patched, HookRegistry._patched\n"
        "assert type(current_platform).__name__ == 'SRTPlatform', type(current_platform)\n"
        "assert 'sglang_cpu_ref.hooks' not in sys.modules\n"
    )
    assert result.returncode == 0, result.stderr


def test_every_hook_attaches():
    result = _python(
        _LOAD + "from sglang_cpu_ref import hooks\n"
        "from sglang.srt.platforms import current_platform\n"
        "hooks.require_attached()\n"
        "assert type(current_platform).__name__ == 'CpuRefPlatform'\n",
        SGLANG_PLATFORM="cpu_ref",
    )
    assert result.returncode == 0, result.stderr


def test_a_hook_that_does_not_attach_stops_the_process():
    result = _python(
        "from sglang_cpu_ref import hooks\n"
        "hooks.LEAF_KERNELS += (hooks.Hook('sglang.srt.utils.common.no_such_function', print),)\n"
        + _LOAD
        + "print('went on')",
        SGLANG_PLATFORM="cpu_ref",
    )
    assert result.returncode == 1
    assert "went on" not in result.stdout
    assert "SGLANG_PLATFORM=cpu_ref cannot start" in result.stderr
    assert "sglang.srt.utils.common.no_such_function" in result.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_OPT_USE_TILELANG_INDEXER", "true"),
        ("SGLANG_HACK_FLASHMLA_BACKEND", "auto"),
        ("SGLANG_DSV4_UNIFIED_KV_FP8", "1"),
    ],
)
def test_a_switch_that_leaves_the_path_is_refused(name, value):
    result = _python(_LOAD, SGLANG_PLATFORM="cpu_ref", **{name: value})
    assert result.returncode == 1
    assert name in result.stderr and "Unset it" in result.stderr


def _launch(checkpoint: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['launch_server', '--model-path', {str(checkpoint)!r}, *{list(arguments)!r}]\n"
        "runpy.run_module('sglang.launch_server', run_name='__main__')"
    )
    return _python(code, SGLANG_PLATFORM="cpu_ref", **environment)


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("tp_size", 2, "--tp-size is 2"),
        ("pp_size", 2, "--pp-size is 2"),
        ("dp_size", 2, "--dp-size is 2"),
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm is 'EAGLE'"),
        ("quantization", "fp8", "--quantization is 'fp8'"),
        ("disaggregation_mode", "decode", "--disaggregation-mode is 'decode'"),
    ],
)
def test_every_argument_that_cannot_be_served_is_refused(name, value, flag):
    import sglang.srt.utils.common  # noqa: F401  (upstream's own imports go in a circle otherwise)

    from sglang_cpu_ref import platform

    supported = SimpleNamespace(**platform._ONLY)
    platform._require_supported(supported)
    with pytest.raises(ValueError, match=flag):
        platform._require_supported(SimpleNamespace(**{**platform._ONLY, name: value}))


def test_a_context_that_cannot_be_summed_is_refused():
    """128 + max(512, context / 128) rows, at most 4,096: a context of 507,904 tokens."""
    attention.check_context(context_len=507_904, window=128, index_topk=512)
    with pytest.raises(ValueError, match=r"4097 rows.*Start with --context-length 507904"):
        attention.check_context(context_len=508_032, window=128, index_topk=512)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ((), {"SGLANG_PLUGINS": "another_plugin"}, "add cpu_ref to it"),
        (("--tp-size", "2"), {}, "--tp-size is 2"),
    ],
)
def test_the_server_says_what_it_cannot_do(checkpoint, arguments, environment, words):
    result = _launch(checkpoint, *arguments, **environment)
    assert result.returncode != 0
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_the_server_refuses_a_context_that_cannot_be_summed(checkpoint):
    """The backend's process says so, when it knows the model; SGLang's parent process then ends too."""
    longer = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    result = _launch(checkpoint, "--context-length", "600000", **longer)
    assert result.returncode != 0
    assert "SGLANG_PLATFORM=cpu_ref cannot start" in result.stderr and "--context-length 507904" in result.stderr
