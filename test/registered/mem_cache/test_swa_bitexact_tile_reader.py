"""Which ring rows a restore writes, and when: those of the new slots, once, behind their transfer."""

from __future__ import annotations

import itertools
import sys
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.swa_bitexact import restore
from sglang.test.ci.ci_register import register_cpu_ci

from kit.tile_cache import TileCache, server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_requests import TileRequest

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

P = PAGE
STATES = ("c4_state", "indexer_state")
TOKENS = tokens_from(1, 4)


@pytest.fixture(params=["python", "rust"])
def cache(request):
    """Tiles of TOKENS at 1 and 3 pages."""
    with server_context() as args, TileCache(args, core=request.param, tiles=8, publishes=True) as cache:
        cache.first = TileRequest(cache, TOKENS, seed=1).admit().extend(3 * P, P, 3 * P)
        cache.first.take_restores()
        cache.first.finish()
        cache.settle()
        yield cache


class Rings:
    """All buffers that hold a ring: noise, and what they must be after a restore."""

    def __init__(self, cache):
        self.cache = cache
        self.layout = cache.kvcache.capture_pool.layout
        self.rings = {name: table.buffers for name, table in cache.kvcache.tile_writer.rings.items()}
        generator = torch.Generator().manual_seed(99)
        for buffer in itertools.chain(*self.rings.values()):
            raw = buffer.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
        self.expected = {name: [b.clone() for b in buffers] for name, buffers in self.rings.items()}

    def expect(self, slot, boundary, tile_id, *, layers=None, streams=None):
        """The rows before ``boundary`` of one slot become the tile's; of all or some layers and streams."""
        tile = self.cache.kvcache.capture_pool.tile(tile_id)
        for name, stream in self.layout.streams.items():
            for index, layer in enumerate(stream.layers):
                if (layers is None or layer in layers) and (streams is None or name in streams):
                    for row in range(stream.rows):
                        position = boundary - stream.rows + row
                        at = slot * stream.ring_rows + position % stream.ring_rows
                        self.expected[name][index][at] = tile[name][index, row]

    def expect_cleared(self, slot, *, layers=None):
        """The rows before position 0 of a slot's states are SGLang's cleared ones: kv 0, score -inf."""
        for name in STATES:
            stream = self.layout.streams[name]
            for buffer, layer in zip(self.expected[name], stream.layers, strict=True):
                if layers is not None and layer not in layers:
                    continue
                for position in range(-stream.rows, 0):
                    row = buffer[slot * stream.ring_rows + position % stream.ring_rows]
                    row[: stream.width // 2] = 0
                    row[stream.width // 2 :] = float("-inf")

    def right(self):
        """Whether every byte of every buffer is as expected."""
        return all(
            torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
            for name, buffers in self.rings.items()
            for found, expected in zip(buffers, self.expected[name], strict=True)
        )


def plan_of(cache, *prompts):
    """The requests of ``prompts``, admitted and with a slot, and their plans as one."""
    requests = [TileRequest(cache, tokens, seed=10 + i).admit() for i, tokens in enumerate(prompts)]
    for request in requests:
        request.extend(len(request.req.origin_input_ids))
    armed = []
    for request in requests:
        request.match()
        request.req.prefix_len = request.req.prefix_len // P * P
        armed.append(request.req)
    cache.tree.restore_swa_windows(armed, torch.tensor([req.kv.req_pool_idx for req in armed]))
    return cache.tree.restore_queue.take(layer_wise=False)


@pytest.fixture
def mixed(cache):
    """A plan of three slots: boundaries 3 pages and 1 page, and a cold one; over noise in every ring."""
    plan = plan_of(cache, TOKENS, TOKENS[: P + 7], tokens_from(9000, 1)[:9])
    assert plan.boundaries == [3 * P, P, 0]
    return cache, plan, Rings(cache)


def expect_all(plan, rings):
    for slot, boundary, tile_id in zip(plan.slots, plan.boundaries, plan.tile_ids.tolist(), strict=True):
        if boundary:
            rings.expect(slot, boundary, tile_id)
        else:
            rings.expect_cleared(slot)


def test_a_restore_writes_the_slots_rows_and_nothing_else(mixed):
    cache, plan, rings = mixed
    assert rings.right()
    cache.kvcache.tile_reader.restore(plan)
    assert not rings.right()
    expect_all(plan, rings)
    assert rings.right()
    assert plan.executed


def test_two_launches_restore_all_slots_and_layers(mixed):
    cache, plan, _ = mixed
    with mock.patch.object(restore, "scatter_tables", wraps=restore.scatter_tables) as launch:
        cache.kvcache.tile_reader.restore(plan)
    assert launch.call_count == 2


def test_a_plan_is_executed_once(mixed):
    """A later call must not undo what the step wrote since."""
    cache, plan, rings = mixed
    cache.kvcache.tile_reader.restore(plan)
    rings = Rings(cache)
    cache.kvcache.tile_reader.restore(plan)
    assert rings.right()


def test_layer_by_layer_a_layer_is_restored_behind_its_transfer(mixed):
    cache, plan, rings = mixed
    plan.layer_wise = True
    reader = cache.kvcache.tile_reader
    with mock.patch.object(restore, "scatter_tables") as launch:
        reader.restore(plan)
    assert (launch.call_count, rings.right()) == (0, True)
    cold = plan.slots[-1]
    warm = list(zip(plan.slots, plan.boundaries, plan.tile_ids.tolist(), strict=True))[:2]
    for layer in range(4):
        for streams in (["window"], STATES):
            reader.restore_layer(layer, *streams)
            for slot, boundary, tile_id in warm:
                rings.expect(slot, boundary, tile_id, layers=[layer], streams=streams)
            if streams is STATES:
                rings.expect_cleared(cold, layers=[layer])
            assert rings.right(), (layer, streams)
    # The step is complete: another restore of the same layer does nothing, and the next plan is welcome.
    again = Rings(cache)
    reader.restore_layer(0, "window")
    reader.restore_layer(1, *STATES)
    assert again.right()


def test_a_part_is_restored_once(mixed):
    """A layer's ring is asked for several times, and between them the step writes it."""
    cache, plan, _ = mixed
    plan.layer_wise = True
    reader = cache.kvcache.tile_reader
    reader.restore(plan)
    reader.restore_layer(0, "window")
    rings = Rings(cache)
    reader.restore_layer(0, "window")
    assert rings.right()


def test_a_step_that_left_layers_out_is_found_by_the_next(mixed):
    cache, plan, _ = mixed
    plan.layer_wise = True
    reader = cache.kvcache.tile_reader
    reader.restore(plan)
    for layer in range(4):
        reader.restore_layer(layer, "window")
    reader.restore_layer(1, *STATES)
    reader.restore_layer(3, "c4_state")
    following = plan_of(cache, TOKENS)
    with pytest.raises(AssertionError, match=r"did not reach \[\('indexer_state', 3\)\]"):
        reader.restore(following)


def test_a_cold_batch_waits_for_no_layer(cache):
    """Nothing that it restores is being loaded."""
    plan = plan_of(cache, tokens_from(9000, 1)[:9])
    plan.layer_wise = True
    rings = Rings(cache)
    cache.kvcache.tile_reader.restore(plan)
    rings.expect_cleared(plan.slots[0])
    assert rings.right()
    following = plan_of(cache, TOKENS)
    cache.kvcache.tile_reader.restore(following)


def test_the_pools_own_reads_restore_a_layer_first(mixed):
    """Whoever reads a ring waits for its layer, and gets it restored."""
    cache, plan, rings = mixed
    plan.layer_wise = True
    cache.kvcache.tile_reader.restore(plan)
    for layer, ratio in enumerate((0, 4, 128, 4)):
        cache.kvcache.get_unified_kv(layer)
        if ratio == 4:
            cache.kvcache.get_attention_compress_states(layer)
            cache.kvcache.get_indexer_compress_states(layer)
    expect_all(plan, rings)
    assert rings.right()


def test_a_read_waits_for_its_layer_and_restores_it_then(mixed):
    """Not before: the layer's part of the tile may still be on its way."""
    cache, plan, _ = mixed
    plan.layer_wise = True
    cache.kvcache.tile_reader.restore(plan)
    events = []
    copy = restore.scatter_tables
    with (
        mock.patch.object(cache.kvcache, "wait_layer_transfer", lambda layer: events.append(("wait", layer))),
        mock.patch.object(restore, "scatter_tables", lambda *rows: (events.append("restore"), copy(*rows))),
    ):
        cache.kvcache.get_unified_kv(1)
        cache.kvcache.get_attention_compress_states(1)
        cache.kvcache.get_indexer_compress_states(3)
    assert events == [("wait", 1), "restore", ("wait", 1), "restore", ("wait", 3), "restore"]


def test_a_loaded_tile_is_restored(cache):
    """From the host into the ring: the bytes that were captured."""
    cache.evict_device()
    a = TileRequest(cache, TOKENS, seed=2).admit().extend(3 * P + 1)
    plan = a.take_restores()
    cache.settle()
    rings = Rings(cache)
    reader = cache.kvcache.tile_reader
    reader.restore(plan)
    for layer in range(4):
        reader.restore_layer(layer, "window", *STATES)
    tile_id = int(plan.tile_ids)
    found = cache.tile(tile_id)
    assert all(torch.equal(found[name], rows) for name, rows in cache.first.captured[3 * P].items())
    rings.expect(plan.slots[0], 3 * P, tile_id)
    assert rings.right()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
