"""How many tiles fit, and whether that is enough: pure functions of sizes."""

from __future__ import annotations

from sglang.srt.mem_cache.swa_bitexact.launch_error import LaunchError

# Pinning this much host memory takes long enough that an operator wonders.
SLOW_START_BYTES = 16 * 10**9
# Above this share of what is free the host has nothing left for anything else.
HOST_LIMIT = 0.9
FEW_HOST_TILES_PER_DEVICE_TILE = 2


def tiles_per_step(chunk_tokens: int, *, page_size: int, stride: int) -> int:
    """Most tiles that a chunk of ``chunk_tokens`` of one sequence takes: the grid, the last two
    boundaries and a branch point, but no more than it has boundaries. Many short prompts in
    one step can want more; what is short then is dropped and counted. A chunk size of 0 or less means
    no chunks; only the grid is unknown then, and one page of it is counted.

    Example, chunk_tokens=8_192, page_size=256: stride 1 -> 32, stride 4 -> 11, stride 0 -> 3.
    """
    boundaries = max(1, -(-chunk_tokens // page_size))
    grid = -(-boundaries // stride) if stride else 0
    return min(boundaries, grid + 3)


def device_tiles(compressed_bytes: float, fraction: float, tile_bytes: int) -> int:
    """Tiles beside ``compressed_bytes`` of compressed rows, so that they are ``fraction`` of both.

    One tile's storage goes to the padding page. Example: 95 GB of rows, fraction 0.05 and
    tiles of 6_496_256 B leave 5 GB, 769 tiles, 768 of them usable.
    """
    budget = compressed_bytes * fraction / (1 - fraction)
    return max(0, int(budget // tile_bytes) - 1)


def check_device_tiles(
    tiles: int,
    *,
    tile_bytes: int,
    fraction: float,
    max_running_requests: int,
    step_tiles: int,
    stride: int,
) -> None:
    """Refuse a capture pool in which running requests could not hold one tile each while a
    step fills its own and the step before it is still in flight.

    Raises:
        LaunchError: names the sizes and what to change.
    """
    needed = max_running_requests + 2 * step_tiles
    if tiles >= needed:
        return
    raise LaunchError(
        f"The capture pool holds {tiles} tiles of {tile_bytes / 2**20:.2f} MiB "
        f"({fraction:.3g} of KV memory), but {needed} are needed: one for each of "
        f"{max_running_requests} running requests and twice the {step_tiles} that one step "
        f"can capture at page stride {stride}. Raise --hicache-swa-device-tile-fraction, "
        f"lower --max-running-requests or --chunked-prefill-size, or raise "
        f"--hicache-swa-offload-page-stride."
    )


def host_tiles(full_bytes: int, fraction: float, tile_bytes: int) -> int:
    """Host tiles beside ``full_bytes`` of compressed rows, so that they are ``fraction`` of both.

    Example: 150 GB of rows, fraction 0.5, tiles of 6_496_256 B -> 23_090 tiles, 150 GB.
    """
    return int(full_bytes * fraction / (1 - fraction) // tile_bytes)


def host_bytes_per_ratio(full_bytes: int, fraction: float) -> int:
    """Host bytes for each 1.0 of --hicache-ratio: the mirror of the device's ``full_bytes`` of
    compressed rows, and the tiles that are ``fraction`` of both.

    Example: 75 GB of rows, fraction 0.5 -> 150 GB; at ratio 2.0 the host pools take 300 GB.
    """
    return int(full_bytes / (1 - fraction))


def _rank_limit(available_bytes: int, ranks: int) -> float:
    """Bytes that each of ``ranks`` processes may take of a machine's free memory."""
    return HOST_LIMIT * available_bytes / ranks


def check_host_memory(needed: int, *, available_bytes: int, ranks: int) -> None:
    """Refuse host pools, of ``needed`` bytes per rank with their tiles, that do not fit.

    Example: 512 GB free, 8 ranks: each may take 0.9 x 64 GB = 57.6 GB.

    Raises:
        LaunchError: names the sizes and what to change.
    """
    limit = _rank_limit(available_bytes, ranks)
    if needed > limit:
        raise LaunchError(
            f"HiCache and its tiles want {needed / 1e9:.2f} GB of host memory per rank "
            f"({ranks} ranks on this host), but {available_bytes / 1e9:.2f} GB are free, of "
            f"which a rank may take {limit / 1e9:.2f} GB. Lower --hicache-ratio, or "
            f"--hicache-size, or --hicache-swa-host-tile-fraction."
        )


def check_host_tiles(
    tiles: int,
    *,
    tile_bytes: int,
    full_bytes: int,
    fraction: float,
    device_tiles: int,
    available_bytes: int,
    ranks: int,
    stride: int,
) -> tuple[str, ...]:
    """Refuse host tiles that do not fit; return what an operator is warned of.

    available_bytes: free DRAM of the machine, which ``ranks`` processes share. full_bytes:
    the compressed rows' host memory, taken already.

    Example, tiles of 6_496_256 B, 512 GB free, 8 ranks: each may take 0.9 x 64 GB = 57.6 GB,
    which 8_866 tiles are. Of these 2_463 are 16 GB and warned of for their start-up time.

    Raises:
        LaunchError: names the sizes and what to change.
    """
    needed = tiles * tile_bytes
    limit = _rank_limit(available_bytes, ranks)
    size = (
        f"{tiles} host tiles of {tile_bytes / 2**20:.2f} MiB "
        f"({needed / 1e9:.2f} GB per rank, {ranks} ranks on this host, "
        f"page stride {stride})"
    )
    if tiles < 1:
        raise LaunchError(
            f"{size}: no window could reach the host. Beside {full_bytes / 1e9:.2f} GB of "
            f"compressed rows, --hicache-swa-host-tile-fraction {fraction:.3g} leaves less "
            f"than one tile. Raise it, or raise --hicache-ratio."
        )
    if needed > limit:
        raise LaunchError(
            f"{size} do not fit: {available_bytes / 1e9:.2f} GB of host memory are free, of "
            f"which a rank may take {limit / 1e9:.2f} GB. Lower "
            f"--hicache-swa-host-tile-fraction ({fraction:.3g}) or --hicache-ratio, or run "
            f"fewer ranks on this host; with fewer tiles, a larger "
            f"--hicache-swa-offload-page-stride spreads them over longer prefixes."
        )
    warnings = []
    if needed >= SLOW_START_BYTES:
        warnings.append(
            f"{size} are pinned at start-up, which takes a while. Lower "
            f"--hicache-swa-host-tile-fraction ({fraction:.3g}) to start faster."
        )
    if tiles < FEW_HOST_TILES_PER_DEVICE_TILE * device_tiles:
        warnings.append(
            f"{size} are few beside {device_tiles} tiles on the device: most of what "
            f"leaves the device will have left the host too. Raise "
            f"--hicache-swa-host-tile-fraction ({fraction:.3g}) or --hicache-ratio."
        )
    return tuple(warnings)
