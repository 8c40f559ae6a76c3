"""doctor on what a server really stored: the names are those of HiCache and of the feature."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from sglang.srt.mem_cache.swa_bitexact import identity, storage_digests, verified_storage

from kit.tile_cache import TileCache, server_context, tokens_from
from kit.tile_pools import PAGE
from kit.tile_storage import COMPRESSED, TILE, TileStorage, wait_for_storage
from sglang_bitexact.doctor.prune import delete, doomed
from sglang_bitexact.doctor.storage import PAGE_POOLS, TILE_POOLS, Health, examine, scan

TOKENS = tokens_from(1, 4)


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> tuple[TileStorage, str]:
    """Three pages, the first and the third with a tile; and the server's identity."""
    storage = TileStorage(tmp_path_factory.mktemp("l3"), "python")
    with server_context(**storage.arguments) as args, TileCache(args) as cache:
        for end in (PAGE, 3 * PAGE):
            cache.publish_random(TOKENS, end, seed=end)
        cache.settle()
        wait_for_storage(cache)
        cache.settle()
        return storage, cache.controller.storage_host_pool.storage_format_tag


@pytest.fixture
def storage(filled, tmp_path) -> TileStorage:
    """A copy that a test may damage."""
    source, _ = filled
    for path in source.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return TileStorage(tmp_path, "python")


def health(directory: Path, hours: float = 2) -> Health:
    return examine(scan(directory), time.time() + hours * 3600)


def kinds(found: Health) -> list[str]:
    return sorted(orphan.lacks for orphan in found.orphans)


def test_a_healthy_directory(storage, filled):
    found = health(storage.directory)
    size = sum(path.stat().st_size for path in storage.directory.iterdir())
    (only,) = found.identities
    assert only == (filled[1], 3, 2, 3 * len(COMPRESSED) + 2 * len(TILE), size)
    assert only.identity.startswith(identity.PREFIX)
    assert found._replace(identities=()) == ((), (), 0, (), (), (), ())


def test_pools_are_those_of_the_feature():
    members = {str(name.value) for name in storage_digests.TILE_POOLS}
    assert set(TILE_POOLS) == {*members, "bitexact_tile"} == set(TILE)
    assert set(COMPRESSED) <= set(PAGE_POOLS) and verified_storage.QUARANTINED == ".quarantined"


@pytest.mark.parametrize("pool", [*COMPRESSED, *TILE])
def test_every_object_is_missed(storage, pool):
    """The first page's, which has a tile."""
    page = min(path.name.partition(".")[0] for path in storage.directory.glob("*.bitexact_tile_*"))
    (path,) = storage.directory.glob(f"{page}_tiny*" if pool == "kv" else f"{page}.{pool}_tiny*")
    path.unlink()
    digest = pool.startswith("bitexact")
    kind = "tile" if pool in TILE else "page"
    expected = [f"{kind} without its digest" if digest else f"{kind} in pieces"]
    found = health(storage.directory)
    assert kinds(found) == (expected if kind == "tile" else [*expected, "tile without its page"])
    left = len(COMPRESSED) + len(TILE) - 1 if kind == "page" else len(TILE) - 1
    files = doomed(scan(storage.directory), found, [])
    assert len(files) == left
    delete(storage.directory, files)
    assert kinds(health(storage.directory)) == []
    assert health(storage.directory).identities[0][1:3] == ((3, 1) if kind == "tile" else (2, 1))


def test_what_the_server_set_aside_is_quarantined(storage):
    """A changed byte, found by the next read."""
    (path, *_) = storage.directory.glob("*.deepseek_v4_c128_*")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with server_context(**storage.arguments) as args, TileCache(args) as cache:
        cache.prefetch(TOKENS[: 3 * PAGE])
    found = health(storage.directory)
    assert sorted(file.name.partition(".")[2].partition("_tiny")[0] or "kv" for file in found.quarantined) == sorted(
        name for name in COMPRESSED if name != "kv"
    )
