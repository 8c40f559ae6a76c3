"""Poison changes what is free, all of it and nothing else, on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from kit.tile_cache import TileCache, file_storage, server_context, tokens_from
from kit.tile_pools import PAGE, RATIOS, ROWS, WINDOW, small_pool
from sglang_cpu_ref import poison

# Rows of a request slot in each state pool; see the pools' ring sizes.
_STATE_RINGS = {4: 8, 128: 128}
Buffers = dict[str, torch.Tensor]


# Device ---------------------------------------------------------------------------


def _device_buffers(allocator) -> Buffers:
    """Every buffer of the device, by rows."""
    kvcache = allocator.get_kvcache()
    out = {f"unified.{layer}": rows for layer, rows in enumerate(kvcache.unified_kv_pool.kv_buffer)}
    states = {"state": kvcache.compress_state_pools, "indexer_state": kvcache.indexer_compress_state_pools}
    for name, pools in states.items():
        for layer, pool in enumerate(pools):
            if pool is not None:
                out[f"{name}.{layer}"] = pool.kv_score_buffer.kv_score
    for layer, pages in enumerate(kvcache.c4_indexer_kv_pool.index_k_with_scale_buffer):
        out[f"index_keys.{layer}"] = pages
    if getattr(allocator, "capture_pool", None) is not None:
        for name, stream in allocator.capture_pool.buffers.items():
            for layer, tiles in enumerate(stream):
                out[f"tile.{name}.{layer}"] = tiles.flatten(1)
    return out


def _zero(buffers: Buffers) -> Buffers:
    """All bytes zero: garbage has no word that is, and fresh memory may hold an earlier test's."""
    for rows in buffers.values():
        rows.view(torch.uint8).zero_()
    return buffers


def _changed(buffers: Buffers) -> dict[str, set[int]]:
    """Rows of which some byte is not zero any more; then every word of them is not."""
    out = {}
    for name, rows in buffers.items():
        words = rows.view(torch.int32) != 0
        out[name] = set(words.any(1).nonzero().flatten().tolist())
        assert out[name] == set(words.all(1).nonzero().flatten().tolist()), name
    return out


def _rows(owners: set[int], each: int, base: int = 0) -> set[int]:
    return {base + owner * each + row for owner in owners for row in range(each)}


def _expected(allocator, slots: set[int], pages: set[int], tiles: set[int]) -> dict[str, set[int]]:
    """Rows by buffer that belong to these owners, from the layout's definition."""
    ring = 5 * WINDOW
    out = {}
    for layer, ratio in enumerate(RATIOS):
        compressed = _rows(pages, PAGE // ratio, ring) if ratio else set()
        out[f"unified.{layer}"] = _rows(slots, WINDOW) | compressed
        if ratio:
            out[f"state.{layer}"] = _rows(slots, _STATE_RINGS[ratio])
        if ratio == 4:
            out[f"indexer_state.{layer}"] = _rows(slots, _STATE_RINGS[4])
    out |= {f"index_keys.{layer}": pages for layer in range(RATIOS.count(4))}
    return out | {name: tiles for name in _device_buffers(allocator) if name.startswith("tile.")}


@pytest.fixture
def cache() -> Iterator[TileCache]:
    with server_context() as args, TileCache(args) as cache:
        yield cache


def test_the_device_s_free_slots_pages_and_tiles_change_and_nothing_else(cache):
    """4 slots, 16 pages, 8 tiles; some of each taken, some of those given back."""
    allocator, slots = cache.allocator, cache.req_to_token_pool
    taken = set(slots.alloc_rows(3))
    slots.free_rows([given_back := min(taken)])
    pages = allocator.full_attn_allocator.alloc(5 * PAGE)
    used_pages = set((pages[::PAGE] // PAGE).tolist())
    tiles = allocator.alloc_tiles(4)
    # One tile comes back with its page: the free list learns of it when it is counted.
    allocator.map_tile(pages[:PAGE], tiles[:1])
    allocator.free(pages[:PAGE])
    used_pages -= {int(pages[0]) // PAGE}
    assert len(allocator.swa_attn_allocator.get_all_free_pages()) == 4

    free_slots = {1, 2, 3, 4} - (taken - {given_back})
    free_pages = set(range(1, 17)) - used_pages
    free_tiles = set(range(1, 9)) - set(tiles[1:].tolist())
    assert (len(free_slots), len(free_pages), len(free_tiles)) == (2, 12, 5)

    buffers = _zero(_device_buffers(allocator))
    assert poison.Poison().device(allocator, slots) == poison.Poisoned(slots=2, pages=12, tiles=5)
    assert _changed(buffers) == _expected(allocator, free_slots, free_pages, free_tiles)


def test_every_call_writes_other_bytes(cache):
    buffers, poisoner = _device_buffers(cache.allocator), poison.Poison()
    poisoner.device(cache.allocator, cache.req_to_token_pool)
    before = {name: rows.clone() for name, rows in buffers.items()}
    poisoner.device(cache.allocator, cache.req_to_token_pool)
    everything = _expected(cache.allocator, {1, 2, 3, 4}, set(range(1, 17)), set(range(1, 9)))
    for name, rows in buffers.items():
        differs = (rows.view(torch.int32) != before[name].view(torch.int32)).any(1)
        assert set(differs.nonzero().flatten().tolist()) == everything[name], name


def test_the_stock_allocator_without_tiles():
    with server_context():
        kvcache = small_pool(ROWS, RATIOS)
        slots = ReqToTokenPool(size=4, max_context_len=8192, device="cpu", enable_memory_saver=False)
        allocator = SWATokenToKVPoolAllocator(
            ROWS, 8 * PAGE, PAGE, torch.float8_e4m3fn, "cpu", kvcache, need_sort=False, req_to_token_pool=slots
        )
        used = set((allocator.full_attn_allocator.alloc(3 * PAGE)[::PAGE] // PAGE).tolist())
        buffers = _zero(_device_buffers(allocator))
        done = poison.Poison().device(allocator, slots)
        assert done == poison.Poisoned(slots=4, pages=13, tiles=0)
        expected = _expected(allocator, {1, 2, 3, 4}, set(range(1, 17)) - used, set())
        assert _changed(buffers) == expected


# Host -----------------------------------------------------------------------------


def _host_buffers(cache: TileCache) -> Buffers:
    """Every host pool by page, all layers of a page in one row."""
    out = {}
    for entry in cache.tree.host_pool_group.entries:
        buffer = entry.host_pool.kv_buffer
        for layer, rows in enumerate(buffer if isinstance(buffer, list) else [buffer]):
            if rows is not None:
                out[f"{entry.name.value}/{layer}"] = rows.flatten(1)
    return out


def _host_pages(cache: TileCache, name: PoolName) -> set[int]:
    return set(range(cache.tree.host_pool_group.get_pool(name).size // PAGE))


_TILE_POOLS = {
    PoolName.SWA.value,
    PoolName.DEEPSEEK_V4_C4_STATE.value,
    PoolName.DEEPSEEK_V4_C4_INDEXER_STATE.value,
}


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_the_host_s_free_pages_change_and_nothing_else(layout):
    """Page ids are handed out in order: 3 pages with a tile at their end, then 2 of which one came back."""
    with server_context(hicache_mem_layout=layout) as args, TileCache(args) as cache:
        cache.publish_random(tokens_from(1, 3), 3 * PAGE, seed=1)
        group = cache.tree.host_pool_group
        group.free(group.alloc(2 * PAGE)[:PAGE])
        buffers = _zero(_host_buffers(cache))
        done = poison.Poison().host(cache.tree)
        free_full = _host_pages(cache, PoolName.KV) - {0, 1, 2, 4}
        free_tiles = _host_pages(cache, PoolName.SWA) - {0}
        changed = _changed(buffers)
        assert {name.split("/")[0] for name in changed} > _TILE_POOLS
        for name, pages in changed.items():
            assert pages == (free_tiles if name.split("/")[0] in _TILE_POOLS else free_full), name
        # The anchor counts too; it has no bytes.
        assert done == poison.Poisoned(host_pages=4 * len(free_full) + 3 * len(free_tiles))


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_what_is_on_its_way_survives_on_every_tier(layout, tmp_path):
    """A tile is poisoned around at every stage: written to the host, to L3, read back, loaded."""
    tokens, poisoner, moments = tokens_from(1, 3), poison.Poison(), []

    def everything(cache, moment):
        moments.append(moment)
        poisoner.device(cache.allocator, cache.req_to_token_pool)
        poisoner.host(cache.tree)

    def poison_around(cache, name):
        """Poison in the storage thread, right before and after each transfer."""
        backend = cache.controller.storage_backend
        original = getattr(backend, name)

        def transfer(*arguments, **keywords):
            poisoner.host(cache.tree)
            result = original(*arguments, **keywords)
            poisoner.host(cache.tree)
            moments.append(name)
            return result

        setattr(backend, name, transfer)

    arguments = {"hicache_mem_layout": layout, **file_storage(tmp_path)}
    with server_context(**arguments) as args:
        with TileCache(args) as cache:
            poison_around(cache, "batch_set_v2")
            expected = cache.publish_random(tokens, 3 * PAGE, seed=1)
            everything(cache, "published")
            cache.settle()
            everything(cache, "written")
            assert cache.holds(cache.match(tokens), expected)
            cache.evict_device()
            everything(cache, "evicted")
            match = cache.load_back(tokens)
            everything(cache, "loaded")
            assert cache.holds(match, expected)
        with TileCache(args) as fresh:
            poison_around(fresh, "batch_get_v2")
            everything(fresh, "fresh")
            assert fresh.prefetch(tokens).host_hit_length == 3 * PAGE
            everything(fresh, "prefetched")
            assert fresh.holds(fresh.load_back(tokens), expected)
            fresh.tree.sanity_check()
    assert {"batch_set_v2", "batch_get_v2"} < set(moments)


def test_a_flush_leaves_garbage_on_the_whole_host(cache):
    cache.publish_random(tokens_from(1, 3), 3 * PAGE, seed=1)
    buffers = _zero(_host_buffers(cache))
    poison.after_reset(type(cache.tree).reset, cache.tree)
    changed = _changed(buffers)
    full, tiles = _host_pages(cache, PoolName.KV), _host_pages(cache, PoolName.SWA)
    for name, pages in changed.items():
        assert pages == (tiles if name.split("/")[0] in _TILE_POOLS else full), name


@pytest.mark.parametrize("poisoned", [False, True])
def test_a_page_is_garbage_before_it_is_loaded_into(cache, monkeypatch, poisoned):
    """Evicted pages keep their rows: a load that copies nothing finds the right ones there, without poison."""
    tokens = tokens_from(1, 3)
    expected = cache.publish_random(tokens, 3 * PAGE, seed=1)
    cache.settle()
    # All other tiles are taken: the load can only get the one that is evicted.
    cache.allocator.alloc_tiles(7)
    monkeypatch.setattr(cache, "poison", lambda: None)
    cache.evict_device()
    if poisoned:
        load_back = type(cache.tree).load_back
        monkeypatch.setattr(cache.tree, "load_back", lambda node: poison.before_load_back(load_back, cache.tree, node))
    copy = "sglang.srt.mem_cache.memory_pool_host.transfer_kv_per_layer_direct_pf_lf"
    monkeypatch.setattr(copy, lambda **_: None)
    assert cache.holds(cache.load_back(tokens), expected) is not poisoned


def test_without_hicache_there_is_nothing_on_the_host():
    assert poison.Poison().host(SimpleNamespace(host_pool_group=None)) == poison.Poisoned()
    assert poison.Poison().host(SimpleNamespace()) == poison.Poisoned()


def test_slots_are_poisoned_before_the_allocation(cache):
    """SGLang clears the c4 state of a slot as it hands it out; garbage must not come after."""
    state = cache.kvcache.compress_state_pools[1].kv_score_buffer.kv_score
    batch = SimpleNamespace(
        tree_cache=cache.tree, req_to_token_pool=cache.req_to_token_pool, slots=cache.req_to_token_pool.alloc_rows
    )
    (slot,) = poison.before_extend(lambda batch: batch.slots(1), batch)
    rows = state[slot * 8 : slot * 8 + 8]
    half = rows.shape[1] // 2
    assert bool((rows[:, :half] == 0).all()) and bool((rows[:, half:] == float("-inf")).all())
    free = [s for s in (1, 2, 3, 4) if s != slot]
    assert all(float(state[s * 8 : s * 8 + 8].abs().min()) >= 32 for s in free)
