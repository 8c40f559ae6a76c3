"""The environment variables and the platform that decide what an SGLang does."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from sglang_bitexact.series import SWITCH

VARIABLES = (
    SWITCH,
    "SGLANG_SWA_VERIFY_HOST",
    "SGLANG_SWA_DBG_CHECKSUM",
    "SGLANG_HACK_FLASHMLA_BACKEND",
    "SGLANG_DSV4_UNIFIED_KV_FP8",
    "SGLANG_DSV4_COMPRESS_STATE_DTYPE",
    "SGLANG_OPT_USE_ONLINE_COMPRESS",
    "SGLANG_EXACT_CHUNK_FILL",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK",
    "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
    "SGLANG_PLATFORM",
)
_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


class Environment(NamedTuple):
    """of: whose it is. variables: those of VARIABLES that are set; None if they cannot be known."""

    of: str
    variables: dict[str, str] | None

    @property
    def switch(self) -> bool | None:
        """Whether the feature is turned on, as SGLang reads it; None if that cannot be known."""
        if self.variables is None:
            return None
        return self.variables.get(SWITCH, "").lower() in ("true", "1", "yes", "y")


class Platform(NamedTuple):
    """kind: "rocm", "cuda", "cpu", or a platform plugin's name. torch: its version, None without it."""

    kind: str
    torch: str | None
    device: bool


def of_shell() -> Environment:
    return Environment("this shell", _known(os.environ))


def of_server(url: str) -> Environment:
    """Of the process that listens at ``url``, if it is an SGLang of this machine that we may look at."""
    address = urlsplit(url)
    if address.hostname in _LOCAL:
        try:
            for connection in psutil.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == address.port and connection.pid:
                    process = psutil.Process(connection.pid)
                    if "sglang" in " ".join(process.cmdline()):
                        return Environment(f"process {process.pid}", _known(process.environ()))
        except psutil.Error:
            pass
    return Environment("the server, which cannot be seen from here", None)


def _known(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: variables[name] for name in VARIABLES if name in variables}


def platform(root: Path | None, environment: Environment) -> Platform:
    """By the torch that lies beside the tree at ``root``, or else this Python's; it is not imported."""
    version = _torch(root)
    text = version.read_text() if version is not None else ""
    torch = _assigned(text, "__version__")
    kinds = [("rocm", "hip", "/dev/kfd"), ("cuda", "cuda", "/dev/nvidiactl")]
    kind, device = "cpu", True
    for name, variable, file in kinds:
        if _assigned(text, variable):
            kind, device = name, Path(file).exists()
            break
    plugin = (environment.variables or {}).get("SGLANG_PLATFORM")
    return Platform(plugin, torch, True) if plugin else Platform(kind, torch, device)


def _torch(root: Path | None) -> Path | None:
    beside = root / "torch/version.py" if root else None
    if beside is not None and beside.is_file():
        return beside
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    return file if file.is_file() else None


def _assigned(text: str, name: str) -> str | None:
    """Example: "cuda: Optional[str] = '13.0'", "cuda" -> "13.0"; where None is assigned, None."""
    match = re.search(rf"^{name}(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
    return match[1] if match else None
