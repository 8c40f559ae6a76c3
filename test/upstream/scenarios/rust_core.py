"""The wheel's Rust tree core below upstream's fixtures, which ask for a build that is not in the wheel.

Upstream's inspector of the Rust core needs an extension compiled for inspection. The wheel has
the production extension only, so that is run: it answers what production code can ask, and a
scenario that looks or reaches deeper is skipped, with the name of what it asked for.
"""

# SGLang is untyped.
# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.test.kits.unified_radix_cache.unified_tree_core_inspection_interface import (
    UnifiedTreeCoreInspectionInterface,
)

_INSPECTOR = "sglang.test.kits.unified_radix_cache.rust_unified_tree_core_inspector"


class _ReadablePart(RustUnifiedTreeCore):
    """Of the inspection interface, what follows from production calls."""

    def get_node_key_length(self, node_id: int) -> int:
        """Tokens of the node's own key; the root's is empty."""
        if self.is_root(node_id):
            return 0
        ((*_, last),) = self.collect_path_info([node_id])
        return int(last.path_end - last.path_start)

    def get_parent_node_id(self, node_id: int) -> int | None:
        if self.is_root(node_id):
            return None
        ((*_, last),) = self.collect_path_info([node_id])
        return int(last.parent_id)

    def build_backup_node_ids(self, node_id: int, write_back: bool = False) -> list[int]:
        """A write-back backs up the node alone, a write-through its unbacked ancestors first."""
        return [node_id] if write_back else list(self.build_backup_kv_action(node_id).node_ids)


def _unanswered(name: str) -> Callable[..., NoReturn]:
    def skip(*args: Any, **kwargs: Any) -> NoReturn:
        raise unittest.SkipTest(f"the wheel's Rust core has no {name}")

    return skip


def provide_rust_inspector() -> None:
    """Put the production core where the fixtures import their inspector of the Rust core from."""
    missing = {
        name: _unanswered(name)
        for name in UnifiedTreeCoreInspectionInterface.__abstractmethods__
        if not hasattr(_ReadablePart, name)
    }
    module: Any = ModuleType(_INSPECTOR)
    module.RustUnifiedTreeCoreInspector = type(
        "ProductionRustTreeCore", (_ReadablePart, UnifiedTreeCoreInspectionInterface), missing
    )
    sys.modules[_INSPECTOR] = module
