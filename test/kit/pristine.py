"""Upstream modules as released, beside the ones whose functions the platform replaced."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType


@functools.cache
def pristine(name: str) -> ModuleType:
    """A second copy of the module ``name``: its own functions and kernels are upstream's."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
