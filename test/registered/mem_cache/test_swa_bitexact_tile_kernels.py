"""Tile kernels of the bit-exact reuse series (part 3): Triton and NumPy move the bytes that the definition says."""

from __future__ import annotations

import os
import random
import unittest
from typing import NamedTuple

# Before triton is imported: without an accelerator its kernels are interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from sglang.kernels.ops.kvcache import dsv4_tile_kernels as kernels
from sglang.kernels.ops.kvcache.dsv4_tiles import RingTable, capture_layer, gather_tiles
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

_BF16, _FP32, _U8 = torch.bfloat16, torch.float32, torch.uint8
# Streams of V4-Flash and V4-Pro, which differ in layers only: (rows, width, dtype).
_STREAMS = {
    "window": (128, 512, _BF16),
    "window under fp8": (128, 512, torch.float8_e4m3fn),
    "window under fp8 on gfx94": (128, 512, torch.float8_e4m3fnuz),
    "rope under fp8": (128, 64, _BF16),
    "c4 state": (4, 2048, _FP32),
    "indexer state": (4, 512, _FP32),
    "c4 state in bf16": (4, 2048, _BF16),
    "indexer state in bf16": (4, 512, _BF16),
}
_ODD = {
    f"width {width} {dtype}": (rows, width, dtype)
    for rows, width in ((3, 7), (5, 130), (2, 1024), (1, 1))
    for dtype in (_U8, _BF16, _FP32)
}


def _noise(rng: random.Random, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes: every fp8 code, infinities and NaNs with payloads are among them."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, size, dtype=_U8, generator=generator).view(dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_U8)


class _Case(NamedTuple):
    tiles: torch.Tensor
    tile_ids: torch.Tensor
    rings: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    flat: torch.Tensor
    capture_addresses: torch.Tensor


def _case(
    rng: random.Random,
    rows: int,
    width: int,
    dtype: torch.dtype,
    *,
    layers: int = 2,
    count: int = 2,
    flat_dtype: torch.dtype | None = None,
    offset: int = 0,
    gap: int = 0,
) -> _Case:
    """Buffers of noise; ``offset`` and ``gap`` elements before and behind each flat row."""
    num_tiles = count + rng.randint(0, 2)
    ring_rows = [count * rows + rng.randint(0, 9) for _ in range(layers)]
    tokens = count * rows + rng.randint(1, 9)
    from_ring = torch.tensor([[rng.random() < 0.5 for _ in range(rows)] for _ in range(count)], dtype=torch.bool)
    ring_row = torch.tensor(rng.sample(range(min(ring_rows)), count * rows), dtype=torch.int64).view(count, rows)
    flat_row = torch.tensor([rng.randrange(tokens) for _ in range(count * rows)], dtype=torch.int64)
    flat = _noise(rng, tokens, offset + width + gap, dtype=flat_dtype or dtype)
    return _Case(
        tiles=_noise(rng, layers, num_tiles + 1, rows, width, dtype=dtype),
        tile_ids=torch.tensor(rng.sample(range(1, num_tiles + 1), count), dtype=torch.int64),
        rings=tuple(_noise(rng, n, width, dtype=dtype) for n in ring_rows),
        addresses=ring_row,
        flat=flat[:, offset : offset + width],
        capture_addresses=torch.where(from_ring, -1 - ring_row, flat_row.view(count, rows)),
    )


class _BytesCase(CustomTestCase):
    def assert_same(self, found, expected):
        self.assertEqual(found.dtype, expected.dtype)
        self.assertTrue(torch.equal(_bytes(found), _bytes(expected)))

    def check_capture(self, case: _Case):
        arguments = (case.tile_ids, case.flat, case.rings[0], case.capture_addresses)
        flat, ring = case.flat.clone(), case.rings[0].clone()
        expected = case.tiles[0].clone()
        for tile, addresses in zip(case.tile_ids.tolist(), case.capture_addresses.tolist(), strict=True):
            for row, address in enumerate(addresses):
                source = flat[address].to(expected.dtype) if address >= 0 else ring[-1 - address]
                _bytes(expected[tile, row]).copy_(_bytes(source))
        for capture in (kernels.capture_layer_triton, capture_layer):
            found = case.tiles[0].clone()
            capture(found, *arguments)
            self.assert_same(found, expected)
            self.assert_same(case.flat, flat)
            self.assert_same(case.rings[0], ring)

    def check_gather(self, case: _Case):
        expected = case.tiles.clone()
        rings = [ring.clone() for ring in case.rings]
        for tile, addresses in zip(case.tile_ids.tolist(), case.addresses.tolist(), strict=True):
            for layer, ring in enumerate(rings):
                for row, address in enumerate(addresses):
                    _bytes(expected[layer, tile, row]).copy_(_bytes(ring[address]))
        for gather in (kernels.gather_tiles_triton, gather_tiles):
            found = case.tiles.clone()
            gather(found, case.tile_ids, RingTable(case.rings), case.addresses)
            self.assert_same(found, expected)
            for ring, before in zip(case.rings, rings, strict=True):
                self.assert_same(ring, before)


class TestNumbers(_BytesCase):
    def test_the_documented_rows(self):
        ring = torch.arange(60.0).view(30, 2)
        flat = 1000 + torch.arange(220.0).view(110, 2)
        tiles = torch.zeros(1, 7, 2, 2)
        capture_layer(tiles[0], torch.tensor([5]), flat, ring, torch.tensor([[-30, 100]]))
        self.assertEqual(tiles[0, 5].tolist(), [[58, 59], [1200, 1201]])
        gather_tiles(tiles, torch.tensor([6]), RingTable((ring,)), torch.tensor([[7, 0]]))
        self.assertEqual(tiles[0, 6].tolist(), [[14, 15], [0, 1]])
        self.assertEqual(int(tiles[0, :5].count_nonzero()), 0)


class TestStreams(_BytesCase):
    def test_every_stream_and_odd_width(self):
        for name, (rows, width, dtype) in (_STREAMS | _ODD).items():
            with self.subTest(name):
                case = _case(random.Random(name), rows, width, dtype)
                self.check_capture(case)
                self.check_gather(case)

    def test_flat_may_be_a_slice_of_columns(self):
        for name, (rows, width, dtype) in (_STREAMS | _ODD).items():
            for offset, gap in ((0, 5), (3, 0), (1, 2)):
                with self.subTest(name, offset=offset, gap=gap):
                    case = _case(random.Random(name), rows, width, dtype, layers=1, count=1, offset=offset, gap=gap)
                    self.check_capture(case)

    def test_ids_and_addresses_may_be_strided(self):
        case = _case(random.Random(1), 5, 130, _BF16)
        ids = torch.stack([case.tile_ids, torch.full_like(case.tile_ids, 10**6)], dim=1)[:, 0]
        self.assertFalse(ids.is_contiguous())
        case = case._replace(
            tile_ids=ids,
            addresses=case.addresses.t().contiguous().t(),
            capture_addresses=case.capture_addresses.t().contiguous().t(),
        )
        self.assertFalse(case.addresses.is_contiguous())
        self.check_capture(case)
        self.check_gather(case)

    def test_random_cases(self):
        for seed in range(40):
            rng = random.Random(seed)
            dtype = rng.choice([_U8, _BF16, _FP32, torch.float8_e4m3fn, torch.float16, torch.float64])
            shape = {"layers": rng.randint(1, 3), "count": rng.randint(1, 4)}
            slices = {"offset": rng.randint(0, 8), "gap": rng.randint(0, 8)}
            with self.subTest(seed=seed):
                case = _case(rng, rng.randint(1, 9), rng.randint(1, 300), dtype, **shape, **slices)
                self.check_capture(case)
                self.check_gather(case)

    def test_rows_beyond_32_bits(self):
        """2^31 bytes and more, of which a few pages exist: int32 offsets would wrap."""
        far = 2**31 // 7 + 11
        ring, flat = (torch.empty(far + 1, 7, dtype=_U8) for _ in range(2))
        ring[far], flat[far - 1] = torch.arange(7), torch.arange(7, 14)
        tiles = torch.empty(2, far + 1, 1, 7, dtype=_U8)
        ids = torch.tensor([far - 2])
        for row, expected in ((-1 - far, list(range(7))), (far - 1, list(range(7, 14)))):
            kernels.capture_layer_triton(tiles[1], ids, flat, ring, torch.tensor([[row]]))
            self.assertEqual(tiles[1, far - 2, 0].tolist(), expected)
        for tile in (tiles[0, far - 2], tiles[1, far - 2]):
            tile.zero_()
        kernels.gather_tiles_triton(tiles, ids, RingTable((ring, ring)), torch.tensor([[far]]))
        self.assertEqual(tiles[:, far - 2, 0].tolist(), [list(range(7))] * 2)
        # A layer that is within reach, and the last of several that is not.
        layers = tiles.view(4, (far + 1) // 2, 1, 7)
        kernels.gather_tiles_triton(layers, torch.tensor([9]), RingTable((ring,) * 4), torch.tensor([[far]]))
        self.assertEqual(layers[:, 9, 0].tolist(), [list(range(7))] * 4)


class TestCasts(_BytesCase):
    def test_float32_is_rounded_to_nearest_even(self):
        cases = {
            0x00000000: 0x0000,
            0x80000000: 0x8000,
            0x3F808000: 0x3F80,  # halfway, to the even neighbour below
            0x3F818000: 0x3F82,  # halfway, to the even neighbour above
            0x3F808001: 0x3F81,
            0xBF807FFF: 0xBF80,
            0x00000001: 0x0000,  # subnormal
            0x80018000: 0x8002,
            0x7F7FFFFF: 0x7F80,  # beyond the largest bfloat16: infinite
            0xFF7F7FFF: 0xFF7F,
            0x7F800000: 0x7F80,
            0xFF800000: 0xFF80,
            0x7F800001: 0x7FC0,  # NaNs stay NaN, those that rounding would carry away too
            0x7FFFFFFF: 0x7FC0,
            0xFFFFFFFF: 0x7FC0,
            0x7FC12345: 0x7FC0,
        }
        self.assertEqual(self._narrow(torch.tensor(list(cases))).tolist(), list(cases.values()))

    def test_float32_is_rounded_as_torch_rounds(self):
        """All 2^16 high halves, with the low halves at which rounding changes."""
        low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
        bits = (torch.arange(2**16)[:, None] << 16 | low).flatten()
        found = self._narrow(bits)
        source = bits.to(torch.uint32).view(_FP32)
        number = ~source.isnan()
        expected = source.to(_BF16).view(torch.uint16).to(torch.int64)
        self.assertTrue(torch.equal(found[number], expected[number]))
        self.assertEqual(found[~number].unique().tolist(), [0x7FC0])

    def _narrow(self, bits):
        """Patterns of float32, int64 [n], through flat rows of 16; patterns of bfloat16."""
        flat = bits.to(torch.uint32).view(_FP32).view(-1, 16)
        tiles = torch.zeros(2, len(flat), 16, dtype=_BF16)
        addresses = torch.arange(len(flat))[None]
        kernels.capture_layer_triton(tiles, torch.tensor([1]), flat, tiles[0], addresses)
        self.assertEqual(int(tiles[0].count_nonzero()), 0)
        return tiles[1].flatten().view(torch.uint16).to(torch.int64)

    def test_every_bfloat16_is_widened_exactly(self):
        bits = torch.arange(2**16).to(torch.uint16)
        tiles = torch.zeros(2, 512, 128, dtype=_FP32)
        flat = bits.view(_BF16).view(512, 128)
        kernels.capture_layer_triton(tiles, torch.tensor([1]), flat, tiles[0], torch.arange(512)[None])
        found = tiles[1].flatten().view(torch.uint32).to(torch.int64)
        self.assertTrue(torch.equal(found, torch.arange(2**16) << 16))

    def test_cast_rows_and_ring_rows_in_one_tile(self):
        """Streams whose flat rows have another dtype; ring rows beside them are not touched by a cast."""
        for flat_dtype, dtype in kernels.CASTS:
            for rows, width in ((4, 2048), (4, 512), (128, 512), (128, 64), (3, 7), (5, 130)):
                for offset, gap in ((0, 0), (1, 2)):
                    with self.subTest(flat=flat_dtype, rows=rows, width=width, offset=offset):
                        shape = {"count": 1, "flat_dtype": flat_dtype, "offset": offset, "gap": gap}
                        case = _case(random.Random(width), rows, width, dtype, **shape)
                        # NaNs: which one a cast makes of one is torch's affair, and above.
                        case.flat[case.flat.isnan()] = 1.0
                        self.check_capture(case)


if __name__ == "__main__":
    unittest.main()
