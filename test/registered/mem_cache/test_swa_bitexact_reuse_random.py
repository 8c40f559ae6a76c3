"""Random requests, evictions and transfers: what is reused belongs to the prefix that it is reused for.

Equal prefixes get equal bytes, whoever computes them, so every match can be checked on the spot: the
tile at its end, and the compressed rows of each of its pages.
"""

from __future__ import annotations

import random
import sys
from array import array

import pytest
import torch
from sglang.srt.mem_cache.swa_bitexact import integrity
from sglang.srt.mem_cache.swa_bitexact.evict import evict_tiles
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import TileCache, server_context
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest, prefill

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

P = PAGE
TILES, PAGES, SLOTS = 5, 16, 4


def tokens_of(choices):
    """One page per choice; pages of different places or choices have no token in common."""
    return array(
        "q", [t for i, c in enumerate(choices) for t in range(1 + 1000 * (10 * i + c), 1 + 1000 * (10 * i + c) + P)]
    )


def content(tokens):
    """A seed that stands for what is computed from ``tokens``."""
    seed = 0
    for token in tokens[::P]:
        seed = (seed * 1_000_003 + token) % (1 << 31)
    return seed


class Request(TileRequest):
    """Tiles and rows whose bytes follow from the tokens before them."""

    def fill(self, boundary, tile_id):
        self.cache.fill(int(tile_id), content(self.req.full_untruncated_fill_ids[:boundary]))

    def compute(self, start, end):
        """Write the compressed rows of the pages that end in (start, end]."""
        for boundary in range(start // P * P + P, end + 1, P):
            write_page(self.cache, int(self.rows[boundary - 1]) // P, self.req.full_untruncated_fill_ids[:boundary])


def write_page(cache, page, tokens):
    row = cache.kvcache.unified_region_buffers(128)[0][0][page]
    row.copy_(expected_page(row, tokens))


def expected_page(row, tokens):
    generator = torch.Generator().manual_seed(content(tokens))
    return torch.randint(0, 256, row.shape, generator=generator, dtype=torch.uint8)


class World:
    """A cache, the requests that hold a slot, and what is asked of them at random."""

    def __init__(self, cache, rng):
        self.cache, self.rng = cache, rng
        self.planner = cache.allocator.capture_planner
        self.planner.stride = rng.choice([0, 1, 2])
        self.running, self.flying, self.zombies = [], [], []
        self.count = self.reused = 0

    def step(self):
        rng = self.rng
        act = rng.choice(
            [self.start, self.start, self.go_on, self.go_on, self.go_on, self.go_on, self.end, self.evict, self.pause]
        )
        act()
        while len(self.flying) > rng.choice([0, 1]):
            self.planner.finish(self.flying.pop(0))
        self.check()

    def start(self):
        if len(self.running) == SLOTS:
            return
        self.count += 1
        choices = [self.rng.choice([0, 0, 1]) for _ in range(self.rng.randint(1, 5))]
        length = len(choices) * P - self.rng.choice([0, 0, 1, 100])
        request = Request(self.cache, tokens_of(choices)[:length], seed=self.count)
        request.match(for_reuse=False)
        request.admit(loads=self.rng.random() < 0.7)
        request.done, request.length = request.req.prefix_len, length
        self.running.append(request)
        self.go_on(request)

    def go_on(self, request=None):
        """One more chunk of a request, which is published behind it."""
        if not self.running:
            return
        request = request or self.rng.choice(self.running)
        if request.done == request.length:
            self.end(request)
            return
        end = self.rng.choice([request.length, min(request.length, request.done + self.rng.randint(1, 2 * P))])
        held = -(-request.req.kv.kv_allocated_len // P) * P if request.req.kv.holds_kv else request.done
        self.cache.allocator.evict_to_free_tokens(self.cache.tree, max(0, -(-(end - held) // P) * P))
        if self.cache.allocator.full_available_size() < -(-max(0, end - held) // P) * P:
            self.drop(request, Request.abort if request.req.kv.holds_kv else unlock)
            return
        plan = prefill(self.cache, (request, end))
        self.restore(request)
        request.compute(request.done, end)
        request.done = end
        if plan is not None:
            self.flying.append(plan)
        if self.rng.random() < 0.7:
            request.checkpoint()
        else:
            request.req.prefix_len = end

    def restore(self, request):
        """What the slot just taken is restored from is the tile of the prefix."""
        plan = request.take_restores()
        if plan is not None and plan.warm:
            self.cache.settle()
            self.expect(request.req.full_untruncated_fill_ids[: plan.boundaries[0]], int(plan.tile_ids), request.rows)
            self.reused += 1

    def expect(self, tokens, tile_id, rows):
        """The tile and the pages of ``tokens`` hold what is computed from them."""
        self.cache.fill(0, content(tokens))
        assert all(
            torch.equal(a, b)
            for a, b in zip(self.cache.tile(0).values(), self.cache.tile(tile_id).values(), strict=True)
        )
        self.cache.kvcache.capture_pool.clear_tile()
        for boundary in range(P, len(tokens) + 1, P):
            row = self.cache.kvcache.unified_region_buffers(128)[0][0][int(rows[boundary - 1]) // P]
            assert torch.equal(row, expected_page(row, tokens[:boundary])), boundary

    def end(self, request=None):
        if not self.running:
            return
        request = request or self.rng.choice(self.running)
        self.drop(
            request,
            Request.finish if request.done == request.length else self.rng.choice([Request.abort, Request.finish]),
        )

    def drop(self, request, how):
        self.running.remove(request)
        tiles = request.req.swa_tiles
        how(request)
        if tiles is not None:
            self.zombies.append(tiles)

    def evict(self):
        tree, size = self.cache.tree, self.rng.randint(1, 3) * P
        self.rng.choice(
            [
                lambda: evict_tiles(tree, size // P),
                lambda: self.cache.allocator.evict_to_free_tokens(tree, 12 * P),
                lambda: tree.evict_host(size, ComponentType.SWA),
                lambda: tree.evict_host(size),
            ]
        )()

    def pause(self):
        self.rng.choice([self.cache.settle, self.cache.tree.check_hicache_events])()

    def check(self):
        self.cache.poison_free_tiles()
        self.zombies = [tiles for tiles in self.zombies if tiles.in_flight and tiles.tiles]
        owners = [r.req.swa_tiles for r in self.running if r.req.swa_tiles] + self.zombies
        held = [tile for owner in owners for tile in owner.tiles.values()]
        integrity.check_tree(self.cache.tree, held)
        assert self.cache.tree.tile_publisher.refused == 0
        if self.rng.random() < 0.3:
            tokens = tokens_of([self.rng.choice([0, 0, 1]) for _ in range(5)])
            match = self.cache.match(tokens)
            if match.device_prefix_len:
                self.cache.settle()
                rows = self.cache.tree.path_device_indices(match.last_device_node)
                self.expect(tokens[: match.device_prefix_len], self.cache.tile_id_at(match), rows)
                self.reused += 1

    def close(self):
        for request in list(self.running):
            self.drop(request, Request.finish if request.req.kv.holds_kv else unlock)
        for plan in self.flying:
            self.planner.finish(plan)
        self.cache.check()


def unlock(request):
    request.cache.tree.unlock(request.req.lock)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("core", ["python", "rust"])
def test_what_is_reused_belongs_to_its_prefix(core, seed):
    with (
        server_context(hicache_swa_host_tile_fraction=0.9) as args,
        TileCache(args, core=core, tiles=TILES, publishes=True) as cache,
    ):
        world = World(cache, random.Random(seed))
        for _ in range(300):
            world.step()
        world.close()
        assert world.reused > 50
        assert cache.tree.tile_publisher.published > 30


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
