"""Restoring tiles into the rings of request slots (bit-exact reuse series, part 3): the same bytes."""

from __future__ import annotations

import os
import random
import unittest
from typing import NamedTuple

# Before triton is imported: without an accelerator its kernels are interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from sglang.kernels.ops.kvcache import dsv4_tile_scatter_kernels as kernels
from sglang.kernels.ops.kvcache.dsv4_tiles import RingTable, TileTable, scatter_tables
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

_BF16, _FP32, _FP8, _U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8
_DTYPES = (_U8, _BF16, _FP32, _FP8, torch.float8_e4m3fnuz, torch.float16, torch.float64)


class _Stream(NamedTuple):
    layers: int
    width: int
    dtype: torch.dtype


# What shares a launch in V4-Flash and V4-Pro, which differ in layers only: rows, streams.
_TABLES = {
    "window": (128, _Stream(2, 512, _BF16)),
    "window under fp8": (128, _Stream(2, 512, _FP8), _Stream(2, 64, _BF16)),
    "states": (4, _Stream(2, 2048, _FP32), _Stream(2, 512, _FP32)),
    "states in bf16": (4, _Stream(2, 2048, _BF16), _Stream(2, 512, _BF16)),
    "odd widths": (3, _Stream(1, 7, _U8), _Stream(2, 130, _BF16), _Stream(3, 1025, _FP32), _Stream(1, 1, _U8)),
    "one row of one byte": (1, _Stream(1, 1, _U8)),
}


class _Memory:
    """Buffers of noise inside one storage of noise, so that a stray write is seen."""

    def __init__(self, rng: random.Random, align: int):
        self.rng, self.align, self.storages = rng, align, []

    def buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A block of the kernel before and behind it; aligned to ``align`` elements."""
        before, behind = 8192 + self.align * self.rng.randint(0, 16) * dtype.itemsize, 8192
        inner = torch.Size(shape).numel() * dtype.itemsize
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        storage = torch.randint(256, (before + inner + behind,), dtype=_U8, generator=generator)
        self.storages.append(storage)
        return storage[before : before + inner].view(dtype).view(shape)


class _Case(NamedTuple):
    memory: _Memory
    table: TileTable
    tile_ids: torch.Tensor
    addresses: torch.Tensor


def _case(rng: random.Random, rows: int, *streams: _Stream, count: int = 2, align: int = 8) -> _Case:
    memory = _Memory(rng, align)
    num_tiles = rng.randint(1, count + 1)  # of fewer than count, one is named twice
    ring_rows = count * rows + rng.randint(0, 9)
    return _Case(
        memory,
        TileTable(
            tuple(
                (
                    memory.buffer(layers, num_tiles + 1, rows, width, dtype=dtype),
                    RingTable(
                        tuple(memory.buffer(ring_rows + rng.randint(0, 3), width, dtype=dtype) for _ in range(layers))
                    ),
                )
                for layers, width, dtype in streams
            )
        ),
        torch.tensor([rng.randint(1, num_tiles) for _ in range(count)]),
        torch.tensor(rng.sample(range(ring_rows), count * rows)).view(count, rows),
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_U8)


class TestBytes(CustomTestCase):
    """Triton, torch and the definition, row by row, leave the same bytes in the whole memory."""

    def check(self, case: _Case):
        before = [storage.clone() for storage in case.memory.storages]
        expected = self.expected(case)
        for run in (kernels.scatter_tables_triton, scatter_tables, self.by_layer_triton, self.by_layer):
            for storage, content in zip(case.memory.storages, before, strict=True):
                storage.copy_(content)
            run(case.table, case.tile_ids, case.addresses)
            for found, content in zip(case.memory.storages, expected, strict=True):
                self.assertTrue(torch.equal(found, content), run)

    def expected(self, case: _Case):
        rows = [
            (_bytes(ring[address]), _bytes(tiles[layer, tile, row]))
            for tiles, rings in case.table.streams
            for layer, ring in enumerate(rings.buffers)
            for tile, addresses in zip(case.tile_ids.tolist(), case.addresses.tolist(), strict=True)
            for row, address in enumerate(addresses)
        ]
        for to, source in rows:
            to.copy_(source)
        return [storage.clone() for storage in case.memory.storages]

    def by_layer_triton(self, table, tile_ids, addresses):
        self.by_layer(table, tile_ids, addresses, kernels.scatter_tables_triton)

    def by_layer(self, table, tile_ids, addresses, run=scatter_tables):
        """As while a load goes layer by layer: a table of each."""
        for tiles, rings in table.streams:
            for layer, ring in zip(tiles.split(1), rings.buffers, strict=True):
                run(TileTable(((layer, RingTable((ring,))),)), tile_ids, addresses)

    def test_the_documented_rows(self):
        for run in (scatter_tables, kernels.scatter_tables_triton, self.by_layer, self.by_layer_triton):
            tiles = torch.arange(12.0).view(1, 6, 2, 1).expand(2, -1, -1, 1) + torch.tensor([0, 100]).view(2, 1, 1, 1)
            wide, rings = tiles.repeat(1, 1, 1, 3), [torch.full((9, n), -1.0) for n in (1, 1, 3, 3)]
            streams = ((tiles.contiguous(), RingTable(tuple(rings[:2]))), (wide, RingTable(tuple(rings[2:]))))
            run(TileTable(streams), torch.tensor([5]), torch.tensor([[7, 0]]))
            self.assertEqual(rings[0].flatten().tolist(), [11, -1, -1, -1, -1, -1, -1, 10, -1])
            self.assertEqual(rings[1].flatten().tolist(), [111, -1, -1, -1, -1, -1, -1, 110, -1])
            self.assertEqual(rings[3].tolist(), rings[1].repeat(1, 3).tolist())

    def test_what_shares_a_launch(self):
        for name, (rows, *streams) in _TABLES.items():
            for count in (1, 3):
                with self.subTest(name, count=count):
                    self.check(_case(random.Random(name), rows, *streams, count=count))

    def test_random_tables(self):
        for seed in range(24):
            rng = random.Random(seed)
            streams = [
                _Stream(rng.randint(1, 3), rng.choice([rng.randint(1, 40), rng.randint(1, 1200)]), rng.choice(_DTYPES))
                for _ in range(rng.randint(1, 4))
            ]
            with self.subTest(seed=seed):
                self.check(_case(rng, rng.randint(1, 9), *streams, count=rng.randint(1, 4), align=1))

    def test_a_tile_may_be_named_twice(self):
        case = _case(random.Random(2), 4, _Stream(2, 512, _FP32), count=3)
        self.check(case._replace(tile_ids=case.tile_ids[:1].expand(3)))

    def test_ids_and_addresses_may_be_strided(self):
        case = _case(random.Random(1), 5, _Stream(2, 130, _BF16))
        ids = torch.stack([case.tile_ids, torch.full_like(case.tile_ids, 10**6)], dim=1)[:, 0]
        addresses = case.addresses.t().contiguous().t()
        self.assertFalse(ids.is_contiguous() or addresses.is_contiguous())
        self.check(case._replace(tile_ids=ids, addresses=addresses))

    def test_rows_beyond_32_bits(self):
        """2^31 bytes and more, of which a few pages exist: int32 offsets would wrap."""
        far = 2**31 // 7 + 11
        ring, tiles = torch.empty(far + 1, 7, dtype=_U8), torch.empty(1, far + 1, 1, 7, dtype=_U8)
        table = TileTable(((tiles, RingTable((ring,))),))
        ids, addresses = torch.tensor([far - 2]), torch.tensor([[far]])
        tiles[0, far - 2, 0], ring[far] = torch.arange(7), 0
        kernels.scatter_tables_triton(table, ids, addresses)
        self.assertEqual(ring[far].tolist(), list(range(7)))


if __name__ == "__main__":
    unittest.main()
