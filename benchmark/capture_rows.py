"""What the copies of a capture cost against a plain copy of as many bytes, in V4-Flash's geometry.

    python benchmark/capture_rows.py [--rounds 12] [--json]

As restore.py, without a model: TileWriter takes, layer by layer, the windows and overlap states of
eight boundaries out of a chunk's flat rows, as a prefill of 2,048 tokens does at stride 1; and out of
the rings those of one slot, as a chunk that ends on the grid does, and of four, as a decode step does
in which four requests reach a boundary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from geometry import FLASH
from paired import alternate, peak_memory, ratio, script, text
from restore import Pools, plain_copy

_PAGE, _TILES, _SLOTS = 256, 8, 4


def _captures(boundaries: list[int], slots: list[int], *, start: int, at_end: bool) -> Any:
    from sglang.srt.mem_cache.swa_bitexact.tile_table import CapturePlan, RequestTiles, TileCapture

    owner = RequestTiles()
    captures = tuple(TileCapture(owner, b, s, start, 0, at_end, False) for b, s in zip(boundaries, slots, strict=True))
    return CapturePlan(captures, torch.arange(1, len(captures) + 1))


def _prefill(pools: Pools) -> Callable[[int], None]:
    writer, streams = pools.kvcache.tile_writer, pools.capture_pool.layout.streams
    flat = {name: torch.ones(_TILES * _PAGE, s.width, dtype=s.dtype) for name, s in streams.items()}
    boundaries = [_PAGE * (k + 1) for k in range(_TILES)]

    def step(number: int) -> None:
        plan = _captures(boundaries, [1 + number % _SLOTS] * _TILES, start=0, at_end=False)
        for layer, ratio_of in enumerate(FLASH.ratios):
            writer.window_rows(layer, flat["window"], None, plan)
            if ratio_of == 4:
                writer.state_rows(layer, flat["c4_state"], plan, is_indexer=False)
                writer.state_rows(layer, flat["indexer_state"], plan, is_indexer=True)

    return step


def _at_end(pools: Pools, slots: int) -> Callable[[int], None]:
    writer = pools.kvcache.tile_writer

    def step(number: int) -> None:
        plan = _captures([2 * _PAGE] * slots, list(range(1, slots + 1)), start=2 * _PAGE - 1, at_end=True)
        writer.windows_at_end(plan)
        writer.states_at_end(plan)

    return step


def measure(rounds: int) -> dict[str, Any]:
    """Alternate captures and copies, and return the figures."""
    torch.set_num_threads(1)
    pools = Pools()
    figures: dict[str, Any] = {"rounds": rounds, "tile_bytes": pools.tile_bytes}
    for name, tiles, step in (
        ("prefill", _TILES, _prefill(pools)),
        ("chunk_end", 1, _at_end(pools, 1)),
        ("decode", _SLOTS, _at_end(pools, _SLOTS)),
    ):
        print(f"capture of V4-Flash's tiles, {name}: {rounds} rounds", file=sys.stderr)
        times = alternate({"capture": step, "copy": plain_copy(pools.tile_bytes, tiles)}, rounds)
        figure = ratio(times["capture"], times["copy"])
        figures[name] = {
            **figure,
            "tiles": tiles,
            "bytes_per_second": tiles * pools.tile_bytes / figure["seconds"],
            "plain_copy_bytes_per_second": tiles * pools.tile_bytes / figure["base_seconds"],
        }
    figures["peak_memory_bytes"] = peak_memory()
    return figures


def show(result: dict[str, Any]) -> None:
    for name in ("prefill", "chunk_end", "decode"):
        r = result[name]
        print(
            f"{name}: capture of {r['tiles']} tiles / plain copy = {text(r)}; {r['bytes_per_second'] / 1e9:.1f} GB/s "
            f"(copy {r['plain_copy_bytes_per_second'] / 1e9:.1f} GB/s)"
        )
    print(f"peak memory {result['peak_memory_bytes'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    script(__doc__, measure, show, rounds=12)
