"""The line that says, at the end of the start, what is exact and what it costs: pure functions."""

from __future__ import annotations

from typing import NamedTuple

from sglang.srt.mem_cache.swa_bitexact.placement import suggested_stride

GB = 10**9
_CONTEXTS = (8_192, 32_768, 131_072)


class TilePoolFacts(NamedTuple):
    """One tier's tiles: how many, and of which share of what memory they are."""

    tiles: int
    fraction: float


def reuse_points_per_gb(tile_bytes: int) -> int:
    """Reuse points in 1 GB (10^9 B) of tile memory, on the device as on the host.

    Example: tiles of 6_496_256 B -> 153.
    """
    return GB // tile_bytes


def stride_advice(tiles: int, pages: int, page_size: int) -> str:
    """The suggested page stride for contexts of _CONTEXTS tokens, as a sentence.

    tiles, pages: of the last tier that keeps them.

    Example, 14_623 tiles and 59_575 pages of 256 tokens: "Page stride at which tiles last as
    long as their rows, for contexts of 8192 / 32768 / 131072 tokens: 7 / 5 / 5."
    """
    strides = [
        suggested_stride(n, tiles=tiles, pages=pages, page_size=page_size)
        for n in _CONTEXTS
    ]
    return (
        "Page stride at which tiles last as long as their rows, for contexts of "
        f"{' / '.join(map(str, _CONTEXTS))} tokens: {' / '.join(map(str, strides))}."
    )


def geometry_text(
    *,
    window_layers: int,
    window: int,
    state_layers: int,
    indexer_layers: int,
    page_size: int,
    stride: int,
) -> str:
    """What a tile holds, and where there is one.

    Example: "43 layers' windows of 128 tokens and 21 c4 and 21 c4-indexer states, at every
    4th page of 256 tokens"; stride 1: "at every page of ..."; stride 0: "at the ends of
    prompts and answers, and at branch points, in pages of 256 tokens".
    """
    where = {
        0: f"at the ends of prompts and answers, and at branch points, in pages of {page_size}",
        1: f"at every page of {page_size}",
    }.get(stride, f"at every {_ordinal(stride)} page of {page_size}")
    states = f"{state_layers} c4 and {indexer_layers} c4-indexer states"
    return f"{window_layers} layers' windows of {window} tokens and {states}, {where} tokens"


def startup_line(
    geometry: str,
    tile_bytes: int,
    device: TilePoolFacts,
    host: TilePoolFacts | None,
    *,
    storage: str | None,
    identity: str | None,
    advice: tuple[str, ...] = (),
) -> str:
    """The line. host: None without HiCache. storage: the backend, None without.

    advice: further sentences, each with its full stop.

    Example, for V4-Flash at stride 1 with HiCache and no storage:
        Bit-exact reuse is on. A reuse point is 43 layers' windows of 128 tokens and 21 c4 and
        21 c4-indexer states, at every page of 256 tokens. It costs 6496256 B; 1 GB holds 153.
        Device: 768 reuse points, 5.00 GB per rank (0.05 of KV memory). Host: 14623 reuse
        points, 94.99 GB per rank (0.5 of HiCache's). Storage: none, identity bitexact1-5c0e...
    """
    sentences = [
        "Bit-exact reuse is on.",
        f"A reuse point is {geometry}.",
        f"It costs {tile_bytes} B; 1 GB holds {reuse_points_per_gb(tile_bytes)}.",
        # One tile's storage is the allocator's padding page.
        _pool_text("Device", device, (device.tiles + 1) * tile_bytes, "of KV memory"),
        "Host: no HiCache."
        if host is None
        else _pool_text("Host", host, host.tiles * tile_bytes, "of HiCache's"),
    ]
    if identity is not None:
        sentences.append(f"Storage: {storage or 'none'}, identity {identity}.")
    return " ".join((*sentences, *advice))


def _pool_text(name: str, pool: TilePoolFacts, nbytes: int, whose: str) -> str:
    return (
        f"{name}: {pool.tiles} reuse points, {nbytes / GB:.2f} GB per rank "
        f"({pool.fraction:.3g} {whose})."
    )


def _ordinal(number: int) -> str:
    """Example: 2 -> "2nd", 3 -> "3rd", 4 -> "4th", 12 -> "12th"."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"
