"""Traces of requests, and which page boundaries get a tile under each policy."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from sglang.srt.mem_cache.swa_bitexact import evict, planner
from sglang.srt.mem_cache.swa_bitexact.placement import extend_boundaries, on_grid

from make_trace import BLOCK


class TraceRequest(NamedTuple):
    """One prompt: an id per started block of 512 tokens, and its length in tokens."""

    ids: tuple[int, ...]
    tokens: int

    @property
    def blocks(self) -> int:
        """Whole blocks."""
        return self.tokens // BLOCK


def load_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first ``limit`` requests of a trace in the Mooncake format, plain or .gz.

    Raises:
        ValueError: names the line whose ids are fewer than its blocks.
    """
    requests: list[TraceRequest] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, 1):
            if len(requests) == limit:
                break
            entry = json.loads(line)
            request = TraceRequest(tuple(entry["hash_ids"]), entry["input_length"])
            if len(request.ids) < request.blocks:
                raise ValueError(
                    f"{path}, line {number}: {len(request.ids)} hash_ids for {request.tokens} tokens, "
                    f"expected one per {BLOCK}"
                )
            requests.append(request)
    return requests


def distinct_blocks(trace: list[TraceRequest]) -> int:
    """Whole blocks that a cache without a limit would hold: the dense policy has a tile for each."""
    return len({block for request in trace for block in request.ids[: request.blocks]})


@dataclass(frozen=True)
class Policy:
    """Which boundaries get a tile, from a name of parts joined by "+".

    last: a prompt's last boundary. branch: where another request left this prompt's path beyond the
    last reuse point. grid-N: every N tokens of the trace. dense: every page. oldest: what leaves the
    device is the least recently used tile, as SGLang evicts; without it superseded ones go first.

    Example: last+branch+grid-16384 is the product at stride 32 in pages of 512 trace tokens.
    """

    name: str

    def __post_init__(self) -> None:
        for part in self._parts:
            grid, _, tokens = part.partition("-")
            if part not in ("dense", "last", "branch", "oldest") and not (
                grid == "grid" and tokens.isdecimal() and int(tokens) and int(tokens) % BLOCK == 0
            ):
                raise ValueError(
                    f"policy {self.name}: {part!r} is none of dense, last, branch, oldest and grid-N, N a multiple "
                    f"of {BLOCK}"
                )

    @property
    def _parts(self) -> list[str]:
        return self.name.split("+")

    @property
    def stride(self) -> int:
        """Pages between two tiles of the grid; 0 without one."""
        grids = [int(part.removeprefix("grid-")) // BLOCK for part in self._parts if part.startswith("grid-")]
        return 1 if "dense" in self._parts else min(grids, default=0)

    @property
    def is_product(self) -> bool:
        """Whether the product's placement is this policy, given the stride."""
        return "dense" in self._parts or {"last", "branch"} <= set(self._parts)

    def boundaries(self, *lengths: int, branch_at: int | None = None, **grid: int) -> tuple[int, ...]:
        """In place of the product's extend_boundaries(), which always takes last boundary and branch."""
        branch_at = branch_at if "branch" in self._parts else None
        found: tuple[int, ...] = extend_boundaries(*lengths, branch_at=branch_at, **grid)
        if "last" in self._parts:
            return found
        return tuple(b for b in found if b == branch_at or on_grid(b, **grid))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Capture planners place and evict tiles as this policy says; the product's own code where it can."""
        with contextlib.ExitStack() as stack:
            if not self.is_product:
                stack.enter_context(mock.patch.object(planner, "extend_boundaries", self.boundaries))
            if "oldest" in self._parts:
                in_order = functools.partial(_walk_in_order, evict._walk)
                stack.enter_context(mock.patch.object(evict, "_walk", in_order))
            yield


def _walk_in_order(walk: Callable[..., int], cache: Any, wanted: int, *, take_leaves: bool) -> int:
    """The product's first pass passes leaves; this one takes what comes."""
    return walk(cache, wanted, take_leaves=True)
