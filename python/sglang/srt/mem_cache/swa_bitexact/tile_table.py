"""The tiles of running requests: who owns which tile until it is published or returned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from sglang.kernels.ops.kvcache.dsv4_tile_rows import Runs


@dataclass
class RequestTiles:
    """The tiles of one stay of a request in its slot, by boundary; ids are int64 [1] tensors.

    in_flight: boundaries of steps whose result is not processed yet. Such a step may still
    write its tile, so the tile of a released request is returned when the step is finished.
    """

    tiles: dict[int, torch.Tensor] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)
    # Settled boundaries that decode captured, ascending: of no use once there is a newer one,
    # unless they lie on the grid and tiles are plenty.
    decoded: list[int] = field(default_factory=list)
    # Boundaries that were due a tile and have none since none was free, or gave it up; by
    # boundary, whether decode crossed it.
    dropped: dict[int, bool] = field(default_factory=dict)
    released: bool = False


class StepRows(NamedTuple):
    """Which tiles a step fills or reads, int64 [N], and where their rows are, int64 [N, rows].

    Both on the device. runs: on a CPU, the same as neighbouring rows; else None.
    """

    tile_ids: torch.Tensor
    addresses: torch.Tensor
    runs: Runs | None


class TileCapture(NamedTuple):
    """One tile to fill in one step.

    owner: the request's table. slot: its request slot. chunk_start, first_row: position of
    the request's first token in this step, and the row of that token in the step's flat rows.
    at_end: the boundary is the request's length after this step, so that the rings then hold
    all of its rows. decode: the boundary was crossed by a generated token.
    """

    owner: RequestTiles
    boundary: int
    slot: int
    chunk_start: int
    first_row: int
    at_end: bool
    decode: bool


@dataclass
class CapturePlan:
    """What one step captures; made by the scheduler, executed by the attention backend.

    tile_ids: int64 [len(captures)] on the device. at_end: all captures are, and are taken from
    the rings behind the step, all layers at once; otherwise layer by layer, while the step still
    has its flat rows. rows: where the rows come from, by (rows, ring rows), filled in by the
    first hook that needs them, shared by all layers.
    """

    captures: tuple[TileCapture, ...]
    tile_ids: torch.Tensor
    rows: dict[tuple[int, int], StepRows] = field(default_factory=dict)
    at_end: bool = field(init=False)

    def __post_init__(self) -> None:
        self.at_end = all(capture.at_end for capture in self.captures)
