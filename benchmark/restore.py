"""What a restore costs against a plain copy of as many bytes, in one process.

    python benchmark/restore.py [--rounds 60] [--json]

Real pools of V4-Flash's geometry (43 layers, tiles of 6,496,256 B) without a model, more tiles than
a processor's cache holds. TileReader restores a tile into one slot, into four slots at a time, and
layer by layer as behind a HiCache load; each takes turns with a copy of as many bytes between buffers
of the same number. Times are this thread's processor time.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["SGLANG_PLATFORM"] = "cpu_ref"
os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test"))

import torch

from geometry import FLASH
from paired import alternate, peak_memory, ratio, script, text

# Together larger than a processor's cache, as the tiles of a server are.
_TILES = 24
# Request slots of kit's pools, and so the most restores of one step.
_SLOTS = 4
_PAGE = 256


class Pools:
    """Pools of V4-Flash's geometry with noise in every tile."""

    def __init__(self) -> None:
        from sglang.srt.mem_cache.swa_bitexact.attach import attach_capture
        from sglang.srt.mem_cache.swa_bitexact.receipt import ReuseReceipts
        from sglang.srt.mem_cache.swa_bitexact.restore import RestoreQueue, TileReader

        from kit.tile_cache import server_context
        from kit.tile_pools import tile_pools

        with server_context():
            self.allocator = tile_pools(tiles=_TILES, ratios=FLASH.ratios)
            attach_capture(self.allocator)
        self.kvcache = self.allocator.get_kvcache()
        self.capture_pool = self.allocator.capture_pool
        self.reader = TileReader(self.kvcache.tile_writer)
        cache: Any = SimpleNamespace(cache_controller=None)
        self.queue = RestoreQueue(self.allocator, self.allocator._req_to_token_pool, ReuseReceipts(cache))
        for buffer in self.capture_pool.buffers.values():
            raw = buffer.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape[2:], dtype=torch.uint8).expand_as(raw))

    @property
    def tile_bytes(self) -> int:
        return int(self.capture_pool.layout.nbytes)

    def plan(self, number: int, slots: int, *, layer_wise: bool = False) -> Any:
        """The restores of one step: ``slots`` slots, each from another tile; other ones every round."""
        from sglang.srt.mem_cache.swa_bitexact.restore import RestorePlan

        first = 1 + number * slots
        ids = torch.tensor([1 + (first + k) % _TILES for k in range(slots)])
        return RestorePlan([1 + (number + k) % _SLOTS for k in range(slots)], [2 * _PAGE] * slots, ids, layer_wise)


def _whole(pools: Pools, slots: int, rounds: int) -> Callable[[int], None]:
    # The scheduler makes the plan: that is the queue's time, below.
    plans = {number: pools.plan(number, slots) for number in range(-1, rounds)}
    return lambda number: pools.reader.restore(plans[number])


def _layer_wise(pools: Pools, rounds: int) -> Callable[[int], None]:
    streams = pools.capture_pool.layout.streams
    plans = {number: pools.plan(number, 1, layer_wise=True) for number in range(-1, rounds)}

    def restore(number: int) -> None:
        pools.reader.restore(plans[number])
        for layer in range(FLASH.layers):
            for name in streams:
                pools.reader.restore_layer(layer, name)

    return restore


def plain_copy(size: int, slots: int) -> Callable[[int], None]:
    """Copies of ``slots`` times ``size`` bytes, between buffers as numerous as tiles and slots."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8).repeat(_TILES, 1)
    target = torch.zeros(_SLOTS, size, dtype=torch.uint8)

    def copy(number: int) -> None:
        for k in range(slots):
            target[(number + k) % _SLOTS].copy_(source[(number * slots + k) % _TILES])

    return copy


def _calls_counted(pools: Pools, run: Callable[[int], None]) -> int:
    """Tile calls of one run: each would be a launch on an accelerator."""
    module = importlib.import_module("sglang.srt.mem_cache.swa_bitexact.restore")
    with mock.patch.object(module, "scatter_tables", wraps=module.scatter_tables) as counted:
        # The round that is not kept: a plan is executed once.
        run(-1)
        return counted.call_count


def _queue(pools: Pools) -> Callable[[int], None]:
    """The scheduler's side of one request with a prefix: which tile, into which slot."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult

    slots, prefix = torch.tensor([1]), 2 * _PAGE
    match = MatchResult(prefix, 1, 1, 1, full_kv_hit_length=prefix)
    fields = {"rid": "1", "prefix_len": prefix, "full_untruncated_fill_ids": range(prefix + 1)}

    def queue(_: int) -> None:
        req: Any = SimpleNamespace(**fields, swa_match=match, swa_receipt=None, storage_hit_start=None)
        pools.queue.queue([req], slots)
        pools.queue.take(layer_wise=False)

    return queue


def measure(rounds: int) -> dict[str, Any]:
    """Alternate restores and copies, and return the figures."""
    torch.set_num_threads(1)
    pools = Pools()
    figures: dict[str, Any] = {"rounds": rounds, "tile_bytes": pools.tile_bytes}
    cases = {
        "one_slot": (1, _whole(pools, 1, rounds)),
        "four_slots": (_SLOTS, _whole(pools, _SLOTS, rounds)),
        "layer_wise": (1, _layer_wise(pools, rounds)),
    }
    for name, (slots, run) in cases.items():
        print(f"restore, {name}: {rounds} rounds", file=sys.stderr)
        calls = _calls_counted(pools, run)
        times = alternate({"restore": run, "copy": plain_copy(pools.tile_bytes, slots)}, rounds)
        figure = ratio(times["restore"], times["copy"])
        size = slots * pools.tile_bytes
        figures[name] = {
            **figure,
            "tile_calls": calls,
            "bytes_per_second": size / figure["seconds"],
            "plain_copy_bytes_per_second": size / figure["base_seconds"],
        }
    times = alternate({"queue": _queue(pools)}, rounds)
    figures["queue_seconds"] = ratio(times["queue"], times["queue"])["seconds"]
    figures["peak_memory_bytes"] = peak_memory()
    return figures


def show(result: dict[str, Any]) -> None:
    for name in ("one_slot", "four_slots", "layer_wise"):
        r = result[name]
        print(
            f"{name}: restore / plain copy = {text(r)}; {r['bytes_per_second'] / 1e9:.1f} GB/s "
            f"(copy {r['plain_copy_bytes_per_second'] / 1e9:.1f} GB/s), {r['tile_calls']} tile calls"
        )
    print(f"queueing one restore: {result['queue_seconds'] * 1e6:.0f} us of the scheduler")
    print(f"peak memory {result['peak_memory_bytes'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    script(__doc__, measure, show, rounds=60)
