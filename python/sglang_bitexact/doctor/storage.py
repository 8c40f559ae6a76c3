"""What the directory of SGLang's file backend holds: told from names and times, nothing is opened.

A file is ``<hash>[.<pool>]_<model>[-<identity>]<ranks>.bin``, as HiCacheFile names it: the hash is
the page's, the anchor's file has no pool, and ``/`` in the model's name is ``-``.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sglang_bitexact.errors import BitexactError

# Objects of a page and of a tile; the last of each is its digests. Pools that are named here and
# that a model does not have are in no file.
PAGE_POOLS = (
    "kv",
    "deepseek_v4_c4",
    "deepseek_v4_c4_rope",
    "deepseek_v4_c4_indexer",
    "deepseek_v4_c4_indexer_scale",
    "deepseek_v4_c128",
    "deepseek_v4_c128_rope",
    "bitexact_page",
)
TILE_POOLS = ("swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state", "bitexact_tile")
# What is younger may be in the middle of being written.
SETTLED_S = 3600.0

_IDENTITY = re.compile(r"bitexact\d+-[0-9a-f]{32}")
_FILE = re.compile(r"(?P<key>[0-9a-f]+)(?P<mark>[._])(?P<rest>.+)\.bin(?P<quarantined>\.quarantined)?")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")


class File(NamedTuple):
    """modified: seconds since the epoch."""

    name: str
    size: int
    modified: float


class Object(NamedTuple):
    """A file of an exact server. suffix: model, identity and ranks: what the server's keys end with."""

    file: File
    key: str
    pool: str
    suffix: str
    identity: str
    quarantined: bool


class Orphan(NamedTuple):
    """Files that no hit can use. lacks: what is missing, such as "tile without its page"."""

    lacks: str
    objects: tuple[Object, ...]


class Stored(NamedTuple):
    """A directory. other: files whose names are not understood; they are never touched."""

    objects: tuple[Object, ...]
    stock: tuple[File, ...]
    temporary: tuple[File, ...]
    other: tuple[File, ...]


class Identity(NamedTuple):
    """What is stored under one identity. pages, tiles: whole ones. bytes: of all its files."""

    identity: str
    pages: int
    tiles: int
    files: int
    bytes: int


class Health(NamedTuple):
    """unfinished: orphans that are young enough to be whole soon. temporary: left behind."""

    identities: tuple[Identity, ...]
    orphans: tuple[Orphan, ...]
    unfinished: int
    quarantined: tuple[File, ...]
    temporary: tuple[File, ...]
    stock: tuple[File, ...]
    other: tuple[File, ...]


def scan(directory: Path) -> Stored:
    """Every file of ``directory``.

    Raises:
        BitexactError: it is no directory.
    """
    if not directory.is_dir():
        raise BitexactError(f"{directory} is no directory: give the file backend's, as the server has it")
    files = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                stat = entry.stat(follow_symlinks=False)
                files.append(File(entry.name, stat.st_size, stat.st_mtime))
    return sort_out(sorted(files))


def sort_out(files: Iterable[File]) -> Stored:
    """What each file is, by its name.

    A model's name may begin as a pool's ends ("indexer_x"), so that a name has two readings; then
    the anchors' files, which have no pool, say which models there are. If they do not, the file
    is one of ``other``.
    """
    objects: list[Object] = []
    stock: list[File] = []
    temporary: list[File] = []
    other: list[File] = []
    undecided: list[tuple[File, re.Match[str], str]] = []
    for file in files:
        match = _FILE.fullmatch(file.name)
        identity = _IDENTITY.search(file.name)
        if match is None:
            (temporary if _TEMPORARY.fullmatch(file.name) else other).append(file)
        elif identity is None:
            stock.append(file)
        elif match["mark"] == "_":
            objects.append(_object(file, match, "kv", match["rest"], identity[0]))
        else:
            undecided.append((file, match, identity[0]))
    models = {found.suffix for found in objects}
    for file, match, name in undecided:
        pools = [pool for pool in (*PAGE_POOLS[1:], *TILE_POOLS) if match["rest"].startswith(f"{pool}_")]
        readings = [(pool, match["rest"][len(pool) + 1 :]) for pool in pools]
        if len(readings) > 1:
            readings = [reading for reading in readings if reading[1] in models]
        if len(readings) == 1:
            objects.append(_object(file, match, *readings[0], name))
        else:
            other.append(file)
    return Stored(tuple(objects), tuple(stock), tuple(temporary), tuple(other))


def _object(file: File, match: re.Match[str], pool: str, suffix: str, identity: str) -> Object:
    return Object(file, match["key"], pool, suffix, identity, match["quarantined"] is not None)


def examine(stored: Stored, now: float) -> Health:
    """Which pages and tiles are whole, and what is no part of one. now: seconds since the epoch."""
    whole: dict[str, list[int]] = {found.identity: [0, 0] for found in stored.objects}
    orphans, unfinished = [], 0
    for page, tile in _pages(stored):
        for number, broken in enumerate((page, tile)):
            if not broken.objects:
                continue
            if not broken.lacks:
                whole[broken.objects[0].identity][number] += 1
            elif all(now - found.file.modified > SETTLED_S for found in (*page.objects, *tile.objects)):
                orphans.append(broken)
            else:
                unfinished += 1
    identities = []
    for name, (pages, tiles) in sorted(whole.items()):
        sizes = [found.file.size for found in stored.objects if found.identity == name]
        identities.append(Identity(name, pages, tiles, len(sizes), sum(sizes)))
    return Health(
        identities=tuple(identities),
        orphans=tuple(orphans),
        unfinished=unfinished,
        quarantined=tuple(found.file for found in stored.objects if found.quarantined),
        temporary=tuple(file for file in stored.temporary if now - file.modified > SETTLED_S),
        stock=stored.stock,
        other=stored.other,
    )


def _pages(stored: Stored) -> Iterator[tuple[Orphan, Orphan]]:
    """Each page's objects, and its tile's, with what they lack ("" if nothing).

    A page has the objects that any page under its suffix has; an anchor and digests it always has.
    """
    pages: dict[tuple[str, str], list[Object]] = defaultdict(list)
    pools: dict[str, set[str]] = defaultdict(lambda: {"kv", "swa", "bitexact_page", "bitexact_tile"})
    for found in stored.objects:
        if not found.quarantined:
            pages[found.suffix, found.key].append(found)
            pools[found.suffix].add(found.pool)
    for (suffix, _), objects in sorted(pages.items()):
        page = _group(objects, PAGE_POOLS, pools[suffix], "page")
        tile = _group(objects, TILE_POOLS, pools[suffix], "tile")
        if tile.objects and not tile.lacks and page.lacks:
            tile = tile._replace(lacks="tile without its page")
        yield page, tile


def _group(objects: list[Object], members: tuple[str, ...], pools: set[str], kind: str) -> Orphan:
    digest = members[-1]
    needed = set(members) & pools
    found = tuple(o for o in objects if o.pool in members)
    missing = needed - {o.pool for o in found}
    lacks = ""
    if missing == {digest}:
        lacks = f"{kind} without its digest"
    elif [o.pool for o in found] == [digest]:
        lacks = f"digest without its {kind}"
    elif missing:
        lacks = f"{kind} in pieces"
    return Orphan(lacks, found)
