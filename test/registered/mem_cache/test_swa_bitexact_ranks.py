"""Two tensor-parallel ranks decide alike: two processes over gloo, from equal scheduler states."""

from __future__ import annotations

import json
import os
import random
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

STEPS, TILES = 1_500, 9


def _rank(rank, folder):
    from sglang.srt.mem_cache.swa_bitexact.planner import CapturePlanner

    from kit.scheduler_steps import random_step
    from kit.tile_cache import server_context
    from kit.tile_pools import tile_pools

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    with server_context():
        planner = CapturePlanner(tile_pools(tiles=TILES), stride=2)
    rng, live, flying, decisions = random.Random(1), {}, [], []
    own = random.Random(rank)
    for _ in range(STEPS):
        # What may differ between ranks: which tile a page gets, and when freed ones are counted.
        pool = planner.allocator.swa_attn_allocator
        order = own.sample(range(len(pool.free_pages)), len(pool.free_pages))
        pool.free_pages = pool.free_pages[torch.tensor(order, dtype=torch.int64)]
        if own.random() < 0.3:
            _ = planner.allocator.tiles_available
        decisions.append(random_step(planner, rng, live, flying))
    gathered = [None, None]
    dist.all_gather_object(gathered, (decisions, vars(planner.counters)))
    if rank == 0:
        found = {"equal": gathered[0] == gathered[1], "decided": sum(map(len, decisions))}
        (folder / "found.json").write_text(json.dumps({**found, "dropped": planner.counters.dropped}))
    dist.destroy_process_group()


def test_two_ranks_capture_and_drop_the_same_tiles(monkeypatch, tmp_path):
    # The ranks import this folder's kit.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    mp.spawn(_rank, (tmp_path,), nprocs=2)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["equal"]
    assert found["decided"] > 500 and found["dropped"] > 100


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
