"""What digests cost: hashing a tile against copying it, and what the thread that hashes takes from another.

    python benchmark/digests.py [--rounds 40] [--json]

Buffers of V4-Flash's sizes in page-first host memory, each larger than what a cache holds in all.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import xxhash

from paired import peak_memory, script

# Bytes of one tile and of one page's compressed rows: V4-Flash, bf16 rows, float32 state.
_SIZES = {"tile": 6_496_256, "page": 1_594_624}
_BUFFERS = 40


def measure(rounds: int) -> dict[str, Any]:
    """Hash and copy in turns; medians."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"rounds": rounds}
    for name, size in _SIZES.items():
        source, target = (torch.randint(0, 256, (_BUFFERS, size), dtype=torch.uint8) for _ in range(2))
        hashing, copying = [], []
        for number in range(rounds):
            read, written = source[number % _BUFFERS], target[number % _BUFFERS]
            hashing.append(_seconds(_hash, read))
            copying.append(_seconds(written.copy_, read))
        figures[name] = {
            "bytes": size,
            "hash_over_copy": statistics.median(hashing) / statistics.median(copying),
            "hash_bytes_per_second": size / statistics.median(hashing),
            "copy_bytes_per_second": size / statistics.median(copying),
        }
    figures["other_thread_ratio"] = _other_thread(source)
    figures["peak_memory_bytes"] = peak_memory()
    return figures


def _hash(rows: torch.Tensor) -> None:
    content: Any = rows.numpy()
    xxhash.xxh3_64_intdigest(content)


def _seconds(call: Callable[..., Any], *arguments: Any) -> float:
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def _other_thread(source: torch.Tensor) -> float:
    """Python work beside a thread that hashes without a pause, over the same work alone."""

    def work() -> float:
        return statistics.median(_seconds(sum, range(100_000)) for _ in range(200))

    alone = work()
    end = threading.Event()

    def hash_on() -> None:
        while not end.is_set():
            _hash(source[0])

    thread = threading.Thread(target=hash_on)
    thread.start()
    beside = work()
    end.set()
    thread.join()
    return beside / alone


def show(result: dict[str, Any]) -> None:
    for name in _SIZES:
        r = result[name]
        print(
            f"{name}, {r['bytes']:,} B: hash / copy = {r['hash_over_copy']:.2f}; "
            f"{r['hash_bytes_per_second'] / 1e9:.1f} GB/s (copy {r['copy_bytes_per_second'] / 1e9:.1f} GB/s)"
        )
    print(f"Python in another thread meanwhile: {result['other_thread_ratio']:.2f} of its time alone")
    print(f"peak memory {result['peak_memory_bytes'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    script(__doc__, measure, show, rounds=40)
