"""The Triton tile kernels on an NVIDIA GPU, against copies of as many bytes; without one it says so.

    python benchmark/gpu_tiles.py [--rounds 30] [--json]

Tiles and rings of V4-Flash's geometry: restore of one and of eight tiles, decode capture, prefill
capture of one layer's windows, each against Tensor.copy_ on the device; and a tile to pinned host
memory and back, in the pieces that HiCache copies, against one piece. Times are of CUDA events.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test"))

import torch

from geometry import FLASH
from paired import ratio, script

_TILES, _SLOTS, _RING, _STATE_RING = 32, 16, 128, 8
_STREAMS = {"window": (128, 512, torch.bfloat16), "c4_state": (4, 2048, torch.float32)}
_STREAMS["indexer_state"] = (4, 512, torch.float32)


def why_not() -> str | None:
    """Why there is nothing to measure here; None if there is a GPU."""
    if torch.version.hip is not None:
        return "this torch is built for ROCm; the script's times and copies were written for CUDA"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False: no NVIDIA GPU"
    return None


class Buffers:
    """Tiles and rings on ``device``."""

    def __init__(self, device: str) -> None:
        from sglang.kernels.ops.kvcache.dsv4_tiles import RingTable, TileTable

        layers = {"window": FLASH.layers, "c4_state": FLASH.overlapping, "indexer_state": FLASH.overlapping}
        self.device = device
        self.tiles = {
            name: torch.ones(layers[name], _TILES + 1, rows, width, dtype=dtype, device=device)
            for name, (rows, width, dtype) in _STREAMS.items()
        }
        self.rings = {
            name: RingTable(
                tuple(
                    torch.ones(_SLOTS * self.ring_rows(name), width, dtype=dtype, device=device)
                    for _ in range(layers[name])
                )
            )
            for name, (_, width, dtype) in _STREAMS.items()
        }
        states = ("c4_state", "indexer_state")
        self.tables = {
            "window": TileTable(((self.tiles["window"], self.rings["window"]),)),
            "c4_state": TileTable(tuple((self.tiles[name], self.rings[name]) for name in states)),
        }
        self.tile_bytes = sum(t[:, 0].nbytes for t in self.tiles.values())

    def ring_rows(self, name: str) -> int:
        return _RING if name == "window" else _STATE_RING

    def named(self, name: str, number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``count`` tile ids and the last rows of as many slots; other ones every round."""
        rows, ring = _STREAMS[name][0], self.ring_rows(name)
        ids = 1 + (number * count + torch.arange(count)) % _TILES
        slots = (number + torch.arange(count)) % _SLOTS
        addresses = slots[:, None] * ring + torch.arange(ring - rows, ring)
        return ids.to(self.device), addresses.to(self.device)


def _kernels(buffers: Buffers) -> dict[str, tuple[int, Callable[[int], Callable[[], None]]]]:
    """By name: bytes of one call, and what makes a call ready whose inputs are on the device."""
    from sglang.kernels.ops.kvcache.dsv4_tiles import capture_layer, gather_tiles, scatter_tables

    def restore(count: int) -> Callable[[int], Callable[[], None]]:
        def ready(number: int) -> Callable[[], None]:
            named = [(table, *buffers.named(name, number, count)) for name, table in buffers.tables.items()]

            def run() -> None:
                for call in named:
                    scatter_tables(*call)

            return run

        return ready

    def decode(number: int) -> Callable[[], None]:
        named = {name: buffers.named(name, number, 8) for name in buffers.tiles}

        def run() -> None:
            for name, (ids, addresses) in named.items():
                gather_tiles(buffers.tiles[name], ids, buffers.rings[name], addresses)

        return run

    flat = torch.ones(_TILES * 256, 512, dtype=torch.bfloat16, device=buffers.device)

    def prefill(number: int) -> Callable[[], None]:
        ids = torch.arange(1, _TILES + 1, device=buffers.device)
        rows = torch.arange(_TILES)[:, None] * 256 + torch.arange(128, 256)
        layer, addresses = number % FLASH.layers, rows.to(buffers.device)
        tiles, ring = buffers.tiles["window"][layer], buffers.rings["window"].buffers[layer]
        return lambda: capture_layer(tiles, ids, flat, ring, addresses)

    return {
        "restore_1": (buffers.tile_bytes, restore(1)),
        "restore_8": (8 * buffers.tile_bytes, restore(8)),
        "decode_capture_8": (8 * buffers.tile_bytes, decode),
        "prefill_capture_layer_32": (_TILES * 131_072, prefill),
    }


def _seconds(call: Callable[..., Any], *arguments: Any) -> float:
    make_event: Any = torch.cuda.Event
    begin, end = (make_event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call(*arguments)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def measure(rounds: int) -> dict[str, Any]:
    """The figures, or ``{"skipped": why}``."""
    if (why := why_not()) is not None:
        return {"skipped": why}
    buffers = Buffers("cuda")
    figures: dict[str, Any] = {"rounds": rounds, "gpu": torch.cuda.get_device_name(), "tile_bytes": buffers.tile_bytes}
    for name, (size, ready) in _kernels(buffers).items():
        source, target = (torch.ones(4, size, dtype=torch.uint8, device="cuda") for _ in range(2))
        ours, copies = [], []
        for number in range(-3, rounds):
            call, k = ready(number % 64), number % 4
            pair = _seconds(call), _seconds(target[k].copy_, source[k])
            if number >= 0:
                ours.append(pair[0])
                copies.append(pair[1])
        figures[name] = {**ratio(ours, copies), "bytes_per_second": size / statistics.median(ours)}
    figures["host"] = _host_copies(buffers, rounds)
    figures["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    return figures


def _host_copies(buffers: Buffers, rounds: int) -> dict[str, Any]:
    """A tile to pinned memory and back, one piece per layer and stream, against one piece."""
    pinned = torch.ones(buffers.tile_bytes, dtype=torch.uint8).pin_memory()
    whole = torch.ones(buffers.tile_bytes, dtype=torch.uint8, device="cuda")
    pieces = [layer[1].view(torch.uint8).flatten() for tiles in buffers.tiles.values() for layer in tiles]
    ends = [0, *itertools.accumulate(piece.numel() for piece in pieces)]
    places = [pinned[a:b] for a, b in itertools.pairwise(ends)]

    def in_pieces(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    out = {}
    ways = {"device_to_host": (places, pieces, pinned, whole), "host_to_device": (pieces, places, whole, pinned)}
    for name, (targets, sources, target, source) in ways.items():
        ours, one = [], []
        for _ in range(rounds):
            ours.append(_seconds(in_pieces, targets, sources))
            one.append(_seconds(target.copy_, source, True))
        out[name] = {**ratio(ours, one), "bytes_per_second": buffers.tile_bytes / statistics.median(ours)}
    return out


def show(result: dict[str, Any]) -> None:
    if "skipped" in result:
        print(f"skipped: {result['skipped']}")
    else:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    script(__doc__, measure, show, rounds=30)
