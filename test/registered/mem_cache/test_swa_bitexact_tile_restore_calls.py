"""Restoring tiles into the rings (bit-exact reuse series, part 3): launches, refusals."""

from __future__ import annotations

import contextlib
import os
import unittest
import unittest.mock
from typing import NamedTuple

# Before triton is imported: without an accelerator its kernels are interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from sglang.kernels.ops.kvcache import dsv4_tile_scatter_kernels as kernels
from sglang.kernels.ops.kvcache.dsv4_tiles import RingTable, TileTable, scatter_tables
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

_BF16, _FP32, _FP8, _U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8


class _Stream(NamedTuple):
    layers: int
    width: int
    dtype: torch.dtype


class _Expected(NamedTuple):
    """word, widths: of the table. blocks: per tile, of the widest entry."""

    word: int
    widths: list[int]
    blocks: int


# Rows, the streams that share a launch, and what that launch is, by hand: windows of 128
# words are 16 blocks of 8 rows; states of 1,024 words are a block per row.
_TABLES = {
    "window": (128, [_Stream(2, 512, _BF16)], _Expected(8, [128] * 2, 16)),
    "window under fp8": (128, [_Stream(2, 512, _FP8), _Stream(2, 64, _BF16)], _Expected(8, [64] * 2 + [16] * 2, 8)),
    "states": (4, [_Stream(3, 2048, _FP32), _Stream(3, 512, _FP32)], _Expected(8, [1024] * 3 + [256] * 3, 4)),
    "states in bf16": (4, [_Stream(2, 2048, _BF16), _Stream(2, 512, _BF16)], _Expected(8, [512] * 2 + [128] * 2, 2)),
    "more than a block": (2, [_Stream(1, 1025, torch.float64)], _Expected(8, [1025], 4)),
    "one byte": (1, [_Stream(1, 1, _U8)], _Expected(1, [1], 1)),
}


def _zeros(rows: int, *streams: _Stream, device: str = "cpu") -> TileTable:
    """A table over aligned buffers: three tiles, and rings of two tiles' rows."""
    return TileTable(
        tuple(
            (
                torch.zeros(layers, 3, rows, width, dtype=dtype, device=device),
                RingTable(tuple(torch.zeros(2 * rows, width, dtype=dtype, device=device) for _ in range(layers))),
            )
            for layers, width, dtype in streams
        )
    )


class _Ops(TorchDispatchMode):
    """Names of the torch operations that run: each may be a launch, or wait for one."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


class TestLaunches(CustomTestCase):
    @contextlib.contextmanager
    def counted(self):
        """(kernel, grid, constants) of every launch of any kernel of the module, none of which runs."""
        launches = []

        class Recorder:
            def __init__(self, name):
                self.name = name

            def __getitem__(self, grid):
                return lambda *_, **constants: launches.append((self.name, grid, constants))

        with contextlib.ExitStack() as stack:
            for name, value in vars(kernels).copy().items():
                if isinstance(value, KernelInterface):
                    stack.enter_context(unittest.mock.patch.object(kernels, name, Recorder(name)))
            yield launches

    def test_one_launch_and_nothing_else(self):
        """Through the public functions, on a device that has no data: no operation of torch, no sync."""
        meta = {"dtype": torch.int64, "device": "meta"}
        for name, (rows, streams, (word, widths, blocks)) in _TABLES.items():
            table = _zeros(rows, *streams)
            self.assertEqual((table.word, table.widths.tolist(), table.rows), (word, widths, rows), name)
            table = _zeros(rows, *streams, device="meta")
            ids, addresses = torch.empty(3, **meta), torch.empty(3, rows, **meta)
            with self.counted() as launches, _Ops() as ops:
                scatter_tables(table, ids, addresses)
            launched = [("_scatter_kernel", (3 * blocks, len(widths)))]
            self.assertEqual(([launch[:2] for launch in launches], ops.names), (launched, []), name)

    def test_pointers_are_those_of_the_layers(self):
        table = _zeros(4, _Stream(2, 2048, _FP32), _Stream(1, 512, _FP32))
        tiles = [layer for tiles, _ in table.streams for layer in tiles]
        rings = [ring for _, rings in table.streams for ring in rings.buffers]
        self.assertEqual(table.tile_pointers.tolist(), [layer.data_ptr() for layer in tiles])
        self.assertEqual(table.ring_pointers.tolist(), [ring.data_ptr() for ring in rings])

    def test_words_are_no_wider_than_the_alignment(self):
        """Of any ring, any tiles, any row of the table, of whichever stream."""
        storage = torch.zeros(200, dtype=_U8)
        aligned = (storage[:16].view(1, 2, 1, 8), RingTable((storage[:32].view(4, 8),)))
        for shift, word in ((0, 8), (1, 1), (2, 2), (4, 4), (6, 2)):
            tiles = storage[shift : shift + 16].view(1, 2, 1, 8)
            rings = RingTable((storage[shift : shift + 32].view(4, 8),))
            for stream in ((tiles, aligned[1]), (aligned[0], rings)):
                for streams in ((stream, aligned), (aligned, stream)):
                    table = TileTable(streams)
                    self.assertEqual((table.word, table.widths.tolist()), (word, [8 // word] * 2))
                with self.counted() as launches:
                    kernels.scatter_tables_triton(TileTable((stream,)), torch.tensor([1]), torch.tensor([[0]]))
                self.assertEqual(str(launches[0][2]["WORD"]), f"uint{8 * word}")
        for width, word in ((12, 4), (6, 2), (5, 1)):
            odd = (storage[: 2 * width].view(1, 2, 1, width), RingTable((storage[: 4 * width].view(4, width),)))
            table = TileTable((aligned, odd))
            self.assertEqual((table.word, table.widths.tolist()), (word, [8 // word, width // word]))

    def test_no_tile_is_no_launch(self):
        for device in ("cpu", "meta"):
            table = _zeros(4, _Stream(1, 8, _BF16), device=device)
            ids, addresses = (torch.empty(*shape, dtype=torch.int64, device=device) for shape in ((0,), (0, 4)))
            with self.counted() as launches:
                scatter_tables(table, ids, addresses)
            self.assertEqual(launches, [])


class TestErrors(CustomTestCase):
    def setUp(self):
        self.table = _zeros(2, _Stream(2, 8, _BF16))
        ((self.tiles, self.rings),) = self.table.streams
        self.ids, self.addresses = torch.tensor([2, 1]), torch.arange(4).view(2, 2)

    def assert_raises(self, message, function, *arguments):
        before = [ring.clone() for ring in self.rings.buffers]
        self.tiles.fill_(1)
        with self.assertRaises(ValueError) as raised:
            function(*arguments)
        self.assertEqual(str(raised.exception), message)
        for ring, content in zip(self.rings.buffers, before, strict=True):
            self.assertTrue(torch.equal(ring, content))

    def test_ids_and_addresses(self):
        self.assert_raises(
            "(2,) tile ids come with addresses (2, 3); expected [N] ids and [N, 2] addresses, one per row of a tile",
            scatter_tables,
            self.table,
            self.ids,
            torch.zeros(2, 3, dtype=torch.int64),
        )
        self.assert_raises(
            "tile ids are torch.int64 and addresses torch.int32; expected torch.int64",
            scatter_tables,
            self.table,
            self.ids,
            self.addresses.int(),
        )

    def test_tables(self):
        stream, ring = (self.tiles, self.rings), self.rings.buffers[0]
        taller = (torch.zeros(2, 3, 4, 8, dtype=_BF16), self.rings)
        elsewhere = RingTable(tuple(ring.to("meta") for ring in self.rings.buffers))
        addresses = "equal ones, because they share their addresses"
        for message, *streams in (
            ("a table of no streams; expected at least one (tiles, rings)",),
            (f"streams of one table have [2, 4] rows per tile; expected {addresses}", stream, taller),
            (
                "tiles and rings of one table are on ['cpu', 'meta']; expected one device",
                stream,
                (self.tiles, elsewhere),
            ),
            (
                "tiles have 2 layers and the table 1 rings; expected one ring per layer, in the same order",
                stream,
                (self.tiles, RingTable((ring,))),
            ),
            (
                "ring is torch.float16; tiles of torch.bfloat16 take torch.bfloat16. Cast the rows first.",
                (self.tiles, RingTable((ring.half(), ring.half()))),
            ),
        ):
            self.assert_raises(message, TileTable, tuple(streams))
        self.assert_raises(
            "ring is (4, 7), strides (7, 1); expected [rows, 8] with contiguous rows. "
            "Pass ring.contiguous() if only the strides differ.",
            TileTable,
            ((self.tiles, RingTable((torch.zeros(4, 7, dtype=_BF16),) * 2)),),
        )
        self.assert_raises(
            "tiles are (2, 3, 2, 8), strides (54, 18, 9, 1); expected 4 contiguous dimensions, "
            "the last three [tiles, rows, width]",
            TileTable,
            ((torch.zeros(2, 3, 2, 9, dtype=_BF16)[..., :8], self.rings),),
        )
        self.assert_raises(
            "tiles are (3, 2, 8), strides (16, 8, 1); expected 4 contiguous dimensions, "
            "the last three [tiles, rows, width]",
            TileTable,
            ((self.tiles[0], self.rings),),
        )


if __name__ == "__main__":
    unittest.main()
