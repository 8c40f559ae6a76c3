"""Entry points: ``sglang.srt.platforms`` -> activate, ``sglang.srt.plugins`` -> register."""

from __future__ import annotations

import ctypes
import os
import sys

PLATFORM_NAME = "cpu_ref"


def chosen() -> bool:
    """The platform has no effect unless SGLANG_PLATFORM names it."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME


def activate() -> str | None:
    """Dotted path of the platform class, or None if the platform is not chosen."""
    return "sglang_cpu_ref.platform.CpuRefPlatform" if chosen() else None


def register() -> None:
    """Attach the leaf kernels. SGLang calls it in each of its processes.

    SGLang's loader logs an exception of a plugin and goes on, which would serve wrong
    kernels or fail far away; SystemExit passes it by and ends the process.
    """
    if not chosen():
        return
    _return_freed_memory()
    from sglang_cpu_ref import hooks

    try:
        hooks.attach()
    except Exception as error:
        sys.exit(f"SGLANG_PLATFORM={PLATFORM_NAME} cannot start: {type(error).__name__}: {error}")


def _return_freed_memory() -> None:
    """Let glibc map blocks from 128 KiB on by themselves, so that freeing them returns them.

    By default that size grows with what is freed, up to 32 MiB; activations of all sizes then
    stay in fragmented arenas, and a server grows by gigabytes within hundreds of requests.
    """
    m_mmap_threshold = -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_threshold, 1 << 17)
