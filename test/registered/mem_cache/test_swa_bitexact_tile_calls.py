"""Calls of the tile kernels of the bit-exact reuse series (part 3): dispatch, launches, refusals."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from typing import NamedTuple

# Before triton is imported: without an accelerator its kernels are interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from sglang.kernels.ops.kvcache import dsv4_tile_kernels as kernels
from sglang.kernels.ops.kvcache import dsv4_tile_scatter_kernels as scatter_kernels
from sglang.kernels.ops.kvcache import dsv4_tiles as tiles_module
from sglang.kernels.ops.kvcache.dsv4_tiles import (
    RingTable,
    TileTable,
    capture_layer,
    gather_tiles,
    scatter_tables,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

_BF16, _U8 = torch.bfloat16, torch.uint8
_ON_CPU = ["capture_layer_cpu", "gather_tiles_cpu", "scatter_cpu"]
_ELSEWHERE = ["capture_layer_triton", "gather_tiles_triton", "scatter_tables_triton"]


class _Case(NamedTuple):
    tiles: torch.Tensor
    tile_ids: torch.Tensor
    rings: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    flat: torch.Tensor
    capture_addresses: torch.Tensor


def _case(rows: int, width: int, layers: int = 2) -> _Case:
    """Two of two tiles in bfloat16, and rings and flat rows of which they are filled."""
    addresses = torch.arange(2 * rows).view(2, rows)
    return _Case(
        tiles=torch.zeros(layers, 3, rows, width, dtype=_BF16),
        tile_ids=torch.tensor([2, 1]),
        rings=tuple(torch.ones(2 * rows, width, dtype=_BF16) for _ in range(layers)),
        addresses=addresses,
        flat=torch.ones(rows, width, dtype=_BF16),
        capture_addresses=rows - 1 - addresses,
    )


class _Launches:
    """Stands in for a kernel: keeps grids and keywords of its launches."""

    def __init__(self):
        self.grids, self.keywords = [], []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **kwargs: self.keywords.append(kwargs)


class TestLaunches(CustomTestCase):
    def record(self, name):
        return self.enterContext(unittest.mock.patch.object(kernels, name, _Launches()))

    def words(self, launches):
        return [str(keywords["WORD"]) for keywords in launches.keywords]

    def test_one_launch_for_all_layers(self):
        case = _case(128, 512, layers=3)
        gathers, captures = self.record("_gather_kernel"), self.record("_capture_kernel")
        kernels.gather_tiles_triton(case.tiles, case.tile_ids, RingTable(case.rings), case.addresses)
        # 128 rows of 128 words of 8 bytes are 16 blocks of 1,024, for each of two tiles.
        self.assertEqual(gathers.grids, [(32, 3)])
        self.assertEqual(self.words(gathers), ["uint64"])
        kernels.capture_layer_triton(case.tiles[0], case.tile_ids, case.flat, case.rings[0], case.capture_addresses)
        self.assertEqual(captures.grids, [(32,)])

    def test_words_are_no_wider_than_the_alignment(self):
        storage = torch.zeros(4 * 8 + 8, dtype=_U8)
        tiles, ids, rows = torch.zeros(1, 2, 1, 8, dtype=_U8), torch.tensor([1]), torch.tensor([[0]])
        gathers, captures = self.record("_gather_kernel"), self.record("_capture_kernel")
        for offset, word in ((0, "uint64"), (1, "uint8"), (2, "uint16"), (4, "uint32")):
            shifted = storage[offset : offset + 32].view(4, 8)
            table = RingTable((storage[:32].view(4, 8), shifted))
            self.assertEqual(table.alignment, offset or 8)
            kernels.gather_tiles_triton(tiles.expand(2, -1, -1, -1).contiguous(), ids, table, rows)
            kernels.capture_layer_triton(tiles[0], ids, shifted, storage[:32].view(4, 8), rows)
            kernels.capture_layer_triton(tiles[0], ids, storage[:32].view(4, 8), shifted, rows)
            self.assertEqual((self.words(gathers)[-1:], self.words(captures)[-2:]), ([word], [word] * 2))
        # Rows of a slice are as far apart as those of the whole: 9 bytes.
        kernels.capture_layer_triton(tiles[0], ids, storage[:36].view(4, 9)[:, :8], storage[:32].view(4, 8), rows)
        self.assertEqual(self.words(captures)[-1], "uint8")

    def test_numpy_on_a_cpu_and_triton_elsewhere(self):
        calls = []
        for function in {*_ON_CPU, *_ELSEWHERE}:
            record = functools.partial(lambda function, *_: calls.append(function), function)
            self.enterContext(unittest.mock.patch.object(tiles_module, function, record))
        for device, expected in (("cpu", _ON_CPU), ("meta", _ELSEWHERE)):
            calls.clear()
            self.call_all(_case(2, 8), device)
            self.assertEqual(calls, expected)
            self.call_all(_case(2, 8), device, count=0)
            self.assertEqual(calls, expected)

    def call_all(self, case, device, count=2):
        tiles, flat, ids = case.tiles.to(device), case.flat.to(device), case.tile_ids[:count]
        rings = RingTable(tuple(ring.to(device) for ring in case.rings))
        capture_layer(tiles[0], ids, flat, rings.buffers[0], case.capture_addresses[:count])
        gather_tiles(tiles, ids, rings, case.addresses[:count])
        scatter_tables(TileTable(((tiles, rings),)), ids, case.addresses[:count])

    def test_they_compile_for_accelerators(self):
        """Without an accelerator: to machine code for MI300, MI355 and Hopper, in a fresh process."""
        with tempfile.TemporaryDirectory() as cache:
            environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
            done = subprocess.run(
                [sys.executable, "-c", _COMPILE, kernels.__file__, scatter_kernels.__file__],
                env=environment | {"TRITON_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        self.assertEqual((done.returncode, done.stdout), (0, "cubin 8\nhsaco 8\nhsaco 8\n"), done.stderr)


# The files alone: importing sglang takes longer than compiling.
_COMPILE = """
import importlib.util, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def load(path):
    name = "sglang.kernels.ops.kvcache." + path.rpartition("/")[2].removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]

kernels, scatter_kernels = map(load, sys.argv[1:])
shared = {"ROWS": 128, "BLOCK": 1024}
widths = ((128, tl.uint64), (7, tl.uint8))
gathers = [(kernels._gather_kernel, {"WIDTH": width, "WORD": word}) for width, word in widths]
scatters = [(scatter_kernels._scatter_kernel, {"WORD": word, "BLOCKS_PER_ROW": blocks, "BLOCK_WIDTH": width})
            for word, blocks, width in ((tl.uint64, 1, 128), (tl.uint64, 2, 1024), (tl.uint8, 1, 8))]
captures = [(kernels._capture_kernel, {"WIDTH": 128, "WORD": word, "FLAT_WORD": flat, "CAST": cast})
            for word, flat, cast in ((tl.uint64, tl.uint64, ""), (tl.uint16, tl.uint32, "narrow"),
                                     (tl.uint32, tl.uint16, "widen"))]
kinds = {"tiles_ptr": "*u8", "flat_ptr": "*u8", "ring_ptr": "*u8", "layer_stride": "i64", "flat_stride": "i32"}
for target, binary in ((GPUTarget("cuda", 90, 32), "cubin"), (GPUTarget("hip", "gfx942", 64), "hsaco"),
                       (GPUTarget("hip", "gfx950", 64), "hsaco")):
    made = 0
    for kernel, constants in gathers + captures + scatters:
        constants = constants | shared
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else kinds.get(n, "*i64") for n in names}
        source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()})
        made += len(triton.compile(source, target=target).asm[binary]) > 0
    print(binary, made)
"""


class TestErrors(CustomTestCase):
    def setUp(self):
        self.case = _case(2, 8)

    def assert_raises(self, message, function, **changes):
        case = self.case
        arguments = {"tiles": case.tiles, "tile_ids": case.tile_ids}
        if function is capture_layer:
            arguments["tiles"] = case.tiles[0]
            arguments |= {"flat": case.flat, "ring": case.rings[0], "addresses": case.capture_addresses}
        else:
            arguments |= {"rings": RingTable(case.rings), "addresses": case.addresses}
        before = arguments["tiles"].clone()
        with self.assertRaises(ValueError) as raised:
            function(**arguments | changes)
        self.assertEqual(str(raised.exception), message)
        self.assertTrue(torch.equal(arguments["tiles"], before))

    def test_tiles(self):
        wide = torch.zeros(2, 3, 2, 9, dtype=_BF16)[..., :8]
        self.assert_raises(
            "tiles are (2, 3, 2, 8), strides (54, 18, 9, 1); expected 4 contiguous dimensions, "
            "the last three [tiles, rows, width]",
            gather_tiles,
            tiles=wide,
        )
        self.assert_raises(
            "tiles are (2, 3, 2, 8), strides (48, 16, 8, 1); expected 3 contiguous dimensions, "
            "the last three [tiles, rows, width]",
            capture_layer,
            tiles=wide.contiguous(),
        )

    def test_ids_and_addresses(self):
        for function in (capture_layer, gather_tiles):
            self.assert_raises(
                "(2,) tile ids come with addresses (2, 3); expected [N] ids and [N, 2] addresses, "
                "one per row of a tile",
                function,
                addresses=torch.zeros(2, 3, dtype=torch.int64),
            )
            self.assert_raises(
                "tile ids are torch.int32 and addresses torch.int64; expected torch.int64",
                function,
                tile_ids=self.case.tile_ids.int(),
            )

    def test_flat(self):
        self.assert_raises(
            "flat is (5, 8), strides (1, 5); expected [rows, 8] with contiguous rows. "
            "Pass flat.contiguous() if only the strides differ.",
            capture_layer,
            flat=torch.zeros(8, 5, dtype=_BF16).t(),
        )
        self.assert_raises(
            "flat is torch.float16; tiles of torch.bfloat16 take torch.bfloat16 or torch.float32. Cast the rows first.",
            capture_layer,
            flat=torch.zeros(5, 8, dtype=torch.float16),
        )

    def test_rings(self):
        self.assert_raises(
            "ring is torch.float32; tiles of torch.bfloat16 take torch.bfloat16. Cast the rows first.",
            capture_layer,
            ring=torch.zeros(9, 8),
        )
        self.assert_raises(
            "ring has strides (9, 1); expected a contiguous one",
            capture_layer,
            ring=torch.zeros(9, 9, dtype=_BF16)[:, :8],
        )
        self.assert_raises(
            "tiles have 2 layers and the table 1 rings; expected one ring per layer, in the same order",
            gather_tiles,
            rings=RingTable(self.case.rings[:1]),
        )
        with self.assertRaises(ValueError) as raised:
            RingTable((torch.zeros(4, 8), torch.zeros(4, 9)[:, :8]))
        self.assertEqual(
            str(raised.exception),
            "ring of layer 1 is torch.float32 (4, 8), strides (9, 1); expected contiguous torch.float32 [rows, 8]",
        )


if __name__ == "__main__":
    unittest.main()
