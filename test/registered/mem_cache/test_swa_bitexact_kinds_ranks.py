"""The kind of fault where ranks of one server decide differently, and then wait for each other for ever.

A pool that is a page smaller on one rank cannot be: rows on the device follow from the smallest rank's
memory, which SGLang agrees on, tiles from these rows, and the host's pools from the device's.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from unittest import mock

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from sglang.test.ci.ci_register import register_cpu_ci

from kit.existing_tests import missing_tests

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

ROUNDS = 12
CORES = ("python", "rust")

# By what may differ between ranks, the tests.
KINDS = {
    "files that storage has, or gives, and how long it takes": ("test_ranks_reuse_what_all_of_them_have",),
    "free memory of the machine": ("test_host_pools_do_not_follow_free_memory",),
    "which tile a page gets, and when frees are counted": (
        "test_swa_bitexact_ranks.py::test_two_ranks_capture_and_drop_the_same_tiles",
    ),
    "the rank's number": ("test_swa_bitexact_identity.py::TestIdentity.test_what_stored_bytes_do_not_depend_on",),
}


def test_the_tests_of_the_table_are_there():
    assert missing_tests(KINDS, __file__) == []


def _rank(rank, folder):
    """Both tree cores, one after the other."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {core: _prefetches(rank, folder / core, core) for core in CORES}
    gathered = [None, None]
    dist.all_gather_object(gathered, found)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(gathered))
    dist.destroy_process_group()


def _prefetches(rank, folder, core):
    """Prefetches from a directory of its own, out of which it loses files of its own choice."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    from kit.tile_cache import server_context, tokens_from
    from kit.tile_pools import PAGE
    from kit.tile_storage import COMPRESSED, TILE, TileStorage, computed, emptied, host_size

    own, tokens = random.Random(rank), tokens_from(1, 5)
    storage = TileStorage(folder / f"storage {rank}", core)
    captures, get, refused = [PAGE, 2 * PAGE, 4 * PAGE], HiCacheFile.get, set()

    def slow(self, key, *arguments):
        time.sleep(own.random() * 0.02)
        if f"{self._get_suffixed_key(key)}.bin" in refused:
            raise OSError("not on this rank")
        return get(self, key, *arguments)

    found = []
    with server_context(**storage.arguments) as args, mock.patch.object(HiCacheFile, "get", slow):
        with storage.server(args, tp_group=dist.group.WORLD) as cache:
            a = computed(cache, tokens, 4 * PAGE, *captures, seed=1)
            files = {
                (pool, end): storage.path(cache, pool, tokens[:end]).name
                for end in captures
                for pool in (*COMPRESSED, *TILE)
            }
        shutil.copytree(storage.directory, folder / f"whole {rank}")
        for turn in range(ROUNDS):
            shutil.rmtree(storage.directory)
            shutil.copytree(folder / f"whole {rank}", storage.directory)
            gone = own.sample(sorted(files), own.choice([0, 0, 1, 2]))
            for each in gone:
                (storage.directory / files[each]).unlink()
            # In every third turn a file is there, and cannot be read on one of the ranks.
            refused.clear()
            if turn % 3 == 2 and rank == turn % 2:
                refused.add(files["swa", own.choice(captures)])
            lost = [end for pool, end in gone if pool in COMPRESSED]
            whole = [end for end in captures if all(end < e for e in lost) and not {(p, end) for p in TILE} & set(gone)]
            with storage.server(args, tp_group=dist.group.WORLD) as cache:
                hit = cache.prefetch(tokens).host_hit_length
                assert not hit or cache.holds(cache.load_back(tokens), a.captured[hit])
                cache.check()
                assert emptied(cache)[1] == host_size(cache)
            found.append({"hit": hit, "whole": whole, "refused": [e for (_, e), f in files.items() if f in refused]})
    return found


def test_ranks_reuse_what_all_of_them_have(monkeypatch, tmp_path):
    # The ranks import this folder's kit.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    for core in CORES:
        (tmp_path / core).mkdir()
    mp.spawn(_rank, (tmp_path,), nprocs=2)
    ranks = json.loads((tmp_path / "found.json").read_text())
    for core in CORES:
        hits = []
        for first, second in zip(*(found[core] for found in ranks), strict=True):
            expected = max({0, *first["whole"]} & {0, *second["whole"]})
            if expected in first["refused"] + second["refused"]:
                expected = 0
            assert [first["hit"], second["hit"]] == [expected] * 2
            hits.append(expected)
        assert len(hits) == ROUNDS and len(set(hits)) > 2


def test_host_pools_do_not_follow_free_memory():
    from sglang.srt.mem_cache.swa_bitexact import host_stack

    from kit.tile_cache import TileCache, server_context
    from kit.tile_storage import host_size

    sizes = []
    for free in (1 << 33, 1 << 34, (1 << 34) + 12_345):
        with (
            mock.patch.object(host_stack, "available_host_memory_bytes", return_value=free) as asked,
            server_context() as args,
            TileCache(args) as cache,
        ):
            sizes.append(host_size(cache))
            assert asked.called
    assert sizes == [(32, 7)] * 3


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
