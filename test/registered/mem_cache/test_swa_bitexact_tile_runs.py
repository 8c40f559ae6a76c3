"""Tiles on a CPU move in runs of neighbouring rows (bit-exact reuse series, part 3): which runs, and refusals."""

from __future__ import annotations

import itertools
import unittest

import torch
from sglang.kernels.ops.kvcache.dsv4_tile_rows import Run, runs
from sglang.kernels.ops.kvcache.dsv4_tiles import (
    RingTable,
    TileTable,
    capture_layer,
    gather_tiles,
    scatter_tables,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def _run(tile, rows, there, in_ring):
    return Run(tile, slice(*rows), slice(*there), in_ring)


class TestRuns(CustomTestCase):
    def test_the_documented_runs(self):
        found = runs(torch.tensor([5, 7]), torch.tensor([[-29, -30, 100, 101], [4, 5, 6, 9]]), coded=True)
        self.assertEqual(
            found,
            [
                _run(5, (0, 2), (28, 30), True),
                _run(5, (2, 4), (100, 102), False),
                _run(7, (0, 3), (4, 7), False),
                _run(7, (3, 4), (9, 10), False),
            ],
        )

    def test_a_run_ends_with_its_tile(self):
        found = runs(torch.tensor([3, 1]), torch.tensor([[0, 1], [2, 3]]))
        self.assertEqual(found, [_run(3, (0, 2), (0, 2), False), _run(1, (0, 2), (2, 4), False)])

    def test_a_window_is_one_run_or_two(self):
        """A ring of 256 rows and the 128 before a boundary; then where the ring's end is in the middle."""
        whole = torch.arange(7 * 256 + 128, 8 * 256)[None]
        self.assertEqual(runs(torch.tensor([1]), whole), [_run(1, (0, 128), (1920, 2048), False)])
        wrapped = 3 * 200 + torch.arange(384, 512)[None] % 200
        self.assertEqual(
            runs(torch.tensor([1]), wrapped),
            [_run(1, (0, 16), (784, 800), False), _run(1, (16, 128), (600, 712), False)],
        )

    def test_no_tile_is_no_run(self):
        self.assertEqual(runs(torch.empty(0, dtype=torch.int64), torch.empty(0, 4, dtype=torch.int64)), [])

    def test_every_combination_of_three_rows(self):
        """Flat rows 0 to 2 and ring rows 0 to 2 in any order: -1 and 0 are a step of one apart, and no neighbours."""
        flat, ring = torch.arange(3.0)[:, None], 10 + torch.arange(3.0)[:, None]
        for addresses in itertools.product(range(-3, 3), repeat=3):
            tiles = torch.zeros(2, 3, 1)
            capture_layer(tiles, torch.tensor([1]), flat, ring, torch.tensor([addresses]))
            self.assertEqual(tiles[1, :, 0].tolist(), [a if a >= 0 else 9 - a for a in addresses], addresses)
            self.assertEqual(tiles[0].count_nonzero(), 0)


class TestOutOfRange(CustomTestCase):
    """A slice would be cut short without a word: nothing is written instead."""

    def setUp(self):
        self.tiles = torch.ones(1, 3, 2, 4)
        self.ring, self.flat = torch.ones(6, 4), torch.ones(5, 4)
        self.rings = RingTable((self.ring,))
        self.table = TileTable(((self.tiles, self.rings),))

    def test_refusals(self):
        calls = {
            "capture": lambda i, a: capture_layer(self.tiles[0], i, self.flat + 1, self.ring, a),
            "gather": lambda i, a: gather_tiles(self.tiles, i, self.rings, a),
            "scatter": lambda i, a: scatter_tables(self.table, i, a),
        }
        flat_or_ring = {"capture": ("flat row 5; expected 0 to 4", [4, 5])}
        for name, call in calls.items():
            message, addresses = flat_or_ring.get(name, ("ring row 6; expected 0 to 5", [5, 6]))
            cases = [
                (message, [1], addresses),
                ("tile id 3; expected 0 to 2", [3], [0, 1]),
                ("tile id -1; expected 0 to 2", [-1], [0, 1]),
            ]
            if name == "capture":
                cases.append(("ring row 6; expected 0 to 5", [1], [-6, -7]))
            else:
                cases.append(("ring row -2; expected 0 or more", [1], [-2, -1]))
            for expected, ids, rows in cases:
                self.tiles.fill_(1)
                self.ring.fill_(3)
                with self.subTest(name, ids=ids, rows=rows), self.assertRaises(IndexError) as raised:
                    call(torch.tensor([2, *ids]), torch.tensor([[0, 1], rows]))
                self.assertEqual(str(raised.exception), expected)
                self.assertTrue(self.tiles.eq(1).all() and self.ring.eq(3).all())


if __name__ == "__main__":
    unittest.main()
