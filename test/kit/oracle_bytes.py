"""Bytes that stand for what a model computes: each row follows from the tokens up to its own.

Choice c of page i has tokens of its own, but for choice 2, which begins as choice 0 does: two prompts
may part inside a page.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Any

import torch

from kit.oracle_model import PAGE, Path
from kit.tile_cache import TileCache

POISON = 0xA5
_SHARED = 100
STATES = ("c4_state", "indexer_state")


def tokens_of(path: Path, length: int) -> array[int]:
    """The first ``length`` tokens of ``path``; its last page may be cut."""
    tokens: list[int] = []
    for page, choice in enumerate(path):
        own, other = (1 + 1000 * (10 * page + c) for c in (choice, 0 if choice == 2 else choice))
        tokens += range(other, other + _SHARED)
        tokens += range(own + _SHARED, own + PAGE)
    return array("q", tokens[:length])


def _name(path: Path) -> int:
    """A number that stands for the tokens of ``path``."""
    name = 1
    for choice in path:
        name = (name * 1_000_003 + choice + 1) % (1 << 31)
    return name


def _noise(keys: torch.Tensor, width: int, salt: int) -> torch.Tensor:
    """Rows that depend on key, salt and column; uint8 [keys, width]."""
    column = torch.arange(width // 4) * 2_654_435_761 + salt * 40_503
    mixed = (keys[:, None] * 6_364_136_223_846_793_005 + column) * 1_442_695_040_888_963_407
    return (mixed >> 29).to(torch.int32).view(torch.uint8)


@lru_cache(maxsize=8192)
def _rows(path: Path, positions: range, width: int, salt: int) -> torch.Tensor:
    """Rows of positions of ``path``, which ends with the last one's page; not to be written to."""
    at = torch.arange(positions.start, positions.stop)
    first = positions.start // PAGE
    names = torch.tensor([_name(path[: page + 1]) for page in range(first, len(path))], dtype=torch.int64)
    return _noise(names[at // PAGE - first] * PAGE + at % PAGE, width, salt)


@lru_cache(maxsize=4096)
def _page(path: Path, buffer: int, width: int) -> torch.Tensor:
    """The last page of ``path`` in one of the tree's buffers; not to be written to."""
    return _noise(torch.tensor([_name(path)]), width, 1000 + buffer)[0]


class Contents:
    """What the rows, tiles and pages of ``cache`` must be for given tokens."""

    def __init__(self, cache: TileCache) -> None:
        self.kvcache = cache.kvcache
        self.streams = cache.kvcache.capture_pool.layout.streams
        self.tiles = cache.kvcache.capture_pool.buffers
        self.rings = {name: table.buffers for name, table in cache.kvcache.tile_writer.rings.items()}
        self.pages = self._page_buffers()

    # Rows of positions -----------------------------------------------------------

    def rows(self, stream: str, layer: int, path: Path, positions: range) -> torch.Tensor:
        """One stream's rows, in one layer, of positions of ``path``; uint8 [positions, bytes]."""
        shape = self.streams[stream]
        end = -(-positions.stop // PAGE)
        salt = 100 * list(self.streams).index(stream) + layer
        return _rows(path[:end], positions, shape.width * shape.dtype.itemsize, salt)

    def ring(self, stream: str, layer: int, slot: int, positions: range) -> torch.Tensor:
        """The ring's rows of positions of ``slot``; uint8 [positions, bytes]."""
        return self.rings[stream][layer].view(torch.uint8)[self.ring_rows(stream, slot, positions)]

    def ring_rows(self, stream: str, slot: int, positions: range) -> torch.Tensor:
        size = self.streams[stream].ring_rows
        return slot * size + torch.arange(positions.start, positions.stop) % size

    def write_ring(self, path: Path, slot: int, start: int, end: int) -> None:
        """What computing positions [start, end) leaves in the rings of ``slot``."""
        for stream, shape in self.streams.items():
            positions = range(max(start, end - shape.ring_rows), end)
            for layer, ring in enumerate(self.rings[stream]):
                at = self.ring_rows(stream, slot, positions)
                ring.view(torch.uint8)[at] = self.rows(stream, layer, path, positions)

    def flat(self, stream: str, layer: int, parts: list[tuple[Path, int, int]]) -> torch.Tensor:
        """A prefill step's rows of one stream and layer: those that a ring or a tile gets, else poison."""
        shape = self.streams[stream]
        tokens = sum(end - start for _, start, end in parts)
        out = torch.full((tokens, shape.width * shape.dtype.itemsize), POISON, dtype=torch.uint8)
        first = 0
        for path, start, end in parts:
            for stop in [*range(start // PAGE * PAGE + PAGE, end, PAGE), end]:
                positions = range(max(start, stop - shape.rows), stop)
                at = first + positions.start - start
                out[at : at + len(positions)] = self.rows(stream, layer, path, positions)
            first += end - start
        return out.view(shape.dtype)

    # Checks ----------------------------------------------------------------------

    def tile_is(self, tile_id: int, path: Path) -> bool:
        """Whether a tile holds window and states at the end of ``path``."""
        end = len(path) * PAGE
        return all(
            torch.equal(layer[tile_id].view(torch.uint8), self.rows(stream, i, path, range(end - shape.rows, end)))
            for stream, shape in self.streams.items()
            for i, layer in enumerate(self.tiles[stream])
        )

    def ring_is(self, slot: int, path: Path, done: int) -> bool:
        """Whether what the next position reads is there: the window, and the states of the last whole group."""
        for stream, shape in self.streams.items():
            stop = done // 4 * 4
            first = stop - 4 if stream in STATES else done - shape.rows
            positions = range(max(0, first), done)
            for layer in range(len(shape.layers)):
                if not torch.equal(
                    self.ring(stream, layer, slot, positions), self.rows(stream, layer, path, positions)
                ):
                    return False
                if first < 0 and stream in STATES and not self._is_cleared(stream, layer, slot):
                    return False
        return True

    def _is_cleared(self, stream: str, layer: int, slot: int) -> bool:
        """Whether the states before position 0 are SGLang's cleared ones."""
        rows = self.rings[stream][layer][self.ring_rows(stream, slot, range(-4, 0))]
        kv, score = rows.chunk(2, dim=-1)
        return bool((kv == 0).all()) and bool((score == float("-inf")).all())

    # Pages -----------------------------------------------------------------------

    def _page_buffers(self) -> list[torch.Tensor]:
        """What the tree keeps of a page: compressed rows and index keys, each uint8 [pages, bytes]."""
        kvcache = self.kvcache
        ratios = set(kvcache.compression_ratios) - {0}
        buffers: list[Any] = [b for ratio in sorted(ratios) for b in kvcache.unified_region_buffers(ratio)[0]]
        buffers += [
            kvcache.get_index_k_with_scale_buffer(layer_id=layer)
            for layer, ratio in enumerate(kvcache.compression_ratios)
            if ratio == 4
        ]
        return [b.view(torch.uint8).flatten(1) for b in buffers]

    def write_page(self, page: int, path: Path) -> None:
        for i, buffer in enumerate(self.pages):
            buffer[page] = self._page(i, path)

    def page_is(self, page: int, path: Path) -> bool:
        return all(torch.equal(buffer[page], self._page(i, path)) for i, buffer in enumerate(self.pages))

    def _page(self, i: int, path: Path) -> torch.Tensor:
        return _page(path, i, self.pages[i].shape[1])

    # Poison ----------------------------------------------------------------------

    def poison(self, tiles: list[int], pages: list[int]) -> None:
        """Overwrite tiles and pages that nobody owns."""
        for stream in self.tiles.values():
            stream.view(torch.uint8)[:, tiles] = POISON
        for buffer in self.pages:
            buffer[pages] = POISON

    def poison_ring(self, slot: int) -> None:
        """Overwrite the rings of a slot that nobody has."""
        for stream, rings in self.rings.items():
            size = self.streams[stream].ring_rows
            for ring in rings:
                ring.view(torch.uint8)[slot * size : slot * size + size] = POISON
