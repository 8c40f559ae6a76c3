"""Two tensor-parallel ranks decide alike: two processes over gloo, from equal scheduler states."""

from __future__ import annotations

import json
import os
import random
import sys
from array import array
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

STEPS, TILES = 400, 9


def _rank(rank, folder):
    from sglang.srt.mem_cache.swa_bitexact.planner import CapturePlanner

    from kit.tile_cache import server_context
    from kit.tile_pools import tile_pools

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    with server_context():
        planner = CapturePlanner(tile_pools(tiles=TILES), stride=2)
    # What a device holds differs between ranks, and must not matter.
    for buffer in planner.allocator.capture_pool.buffers.values():
        buffer.fill_(rank)
    rng, live, decisions = random.Random(1), {}, []
    for _ in range(STEPS):
        slot = rng.randrange(1, 5)
        if slot in live and rng.random() < 0.3:
            planner.release(live.pop(slot)[0])
            continue
        length = rng.randrange(200, 2500)
        request, done = live.setdefault(
            slot,
            (
                SimpleNamespace(
                    kv=SimpleNamespace(req_pool_idx=slot),
                    full_untruncated_fill_ids=array("q", range(length)),
                    swa_branching_seqlen=None,
                    skip_radix_cache_insert=False,
                    swa_tiles=None,
                ),
                0,
            ),
        )
        end = min(len(request.full_untruncated_fill_ids), done + rng.randrange(1, 700))
        live[slot] = (request, end)
        batch = SimpleNamespace(reqs=[request], prefix_lens=[done], extend_lens=[end - done])
        plan = planner.plan_extend(batch)
        decisions.append([] if plan is None else [*(c.boundary for c in plan.captures), *plan.tile_ids.tolist()])
        if plan is not None:
            planner.finish(plan)
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
    assert found["decided"] > 100 and found["dropped"] > 0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
