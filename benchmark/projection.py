"""A projection, on paper, of what capture and restore cost on an MI355X. Nothing here was measured there.

    python benchmark/projection.py [--json]

For one rank and one prefill step of T tokens at stride 1:

    step     = 2 * active parameters * T * dp / (ranks * PEAK_FLOPS * UTILISATION)
    tiles    = T / 256
    capture  = launches * LAUNCH_SECONDS + 2 * tiles * tile bytes / (BANDWIDTH * SHARE_OF_BANDWIDTH)
    launches = layers + 2 * layers of ratio 4            (one per layer and stream)
    restore  = 2 * LAUNCH_SECONDS + 2 * tile bytes / (BANDWIDTH * SHARE_OF_BANDWIDTH)
    share    = capture / step

Every byte is read once and written once. Tiles are as large on every rank: tensor parallelism divides
the step and not the capture; under DP attention (dp = ranks) each rank has a chunk of its own, and the
experts of all of them together take the step's time. Attention, communication and activations are left
out of the step: it really takes longer, and the share is smaller.

Example, V4-Flash, T 8,192, 8 ranks, DP attention:
    step     2 * 13e9 * 8,192 * 8 / (8 * 5e15 * 0.4)           = 106.5 ms
    launches 43 + 2 * 21                                        = 85
    capture  85 * 4e-6 + 2 * 32 * 6,496,256 / (8e12 * 0.6)      = 0.340 + 0.087 = 0.427 ms
    share                                                       = 0.40 %
"""

from __future__ import annotations

from typing import Any, NamedTuple

from geometry import MODELS, Model
from paired import script

# AMD Instinct MI355X data sheet (CDNA 4, 2025): 8 TB/s of HBM3E; 5.0 PFLOPS of dense FP8.
BANDWIDTH = 8e12
PEAK_FLOPS = 5.0e15
# Assumptions, not measured. Of the peak, what a prefill reaches: a high value makes the step short, and the
# share large. Of the bandwidth, what a copy kernel reaches.
UTILISATION = 0.4
SHARE_OF_BANDWIDTH = 0.6
# Assumption: what a kernel that does next to nothing takes of a stream that has more to do.
LAUNCH_SECONDS = 4e-6
PAGE = 256
CHUNK = 8_192
# layout.py's worked sizes: a window row has 1,024 B, the overlap rows of a ratio-4 layer 40,960 B.
WINDOW_BYTES, STATE_BYTES = 128 * 1_024, 40_960
GOAL = 0.005


class Deployment(NamedTuple):
    """ranks: GPUs that share the experts. dp: of them, how many have a chunk of their own."""

    name: str
    ranks: int
    dp: int


DEPLOYMENTS = (Deployment("8 GPUs, DP attention", 8, 8), Deployment("8 GPUs, tensor parallel", 8, 1))


class Projection(NamedTuple):
    """Seconds, and what they are made of; share: capture_seconds of step_seconds."""

    model: str
    deployment: str
    tile_bytes: int
    tiles: int
    launches: int
    step_seconds: float
    launch_seconds: float
    copy_seconds: float
    capture_seconds: float
    restore_seconds: float
    share: float
    bytes_share: float


def tile_bytes(model: Model) -> int:
    """Bytes of one tile: 43 x 131,072 + 21 x 40,960 = 6,496,256 for V4-Flash."""
    return model.layers * WINDOW_BYTES + model.overlapping * STATE_BYTES


def project(
    model: Model,
    deployment: Deployment,
    tokens: int = CHUNK,
    *,
    stride: int = 1,
    launch_seconds: float = LAUNCH_SECONDS,
) -> Projection:
    """The formula above; ``stride``: a tile at every stride-th page, and one at the prompt's end.

    Raises:
        ValueError: tokens are no whole pages, or a number is not positive.
    """
    if tokens <= 0 or tokens % PAGE or stride < 1 or not 1 <= deployment.dp <= deployment.ranks:
        raise ValueError(
            f"{tokens} tokens, stride {stride}, {deployment}: expected whole pages of {PAGE}, a stride of 1 or more "
            f"and 1 <= dp <= ranks"
        )
    size, pages = tile_bytes(model), tokens // PAGE
    # The last boundary of a prompt of whole pages is reused up to the page before it.
    tiles = pages if stride == 1 else pages // stride + 1
    launches = model.layers + 2 * model.overlapping
    step = 2 * model.active * tokens * deployment.dp / (deployment.ranks * PEAK_FLOPS * UTILISATION)
    per_tile = 2 * size / (BANDWIDTH * SHARE_OF_BANDWIDTH)
    launching, copying = launches * launch_seconds, tiles * per_tile
    return Projection(
        model=model.name,
        deployment=deployment.name,
        tile_bytes=size,
        tiles=tiles,
        launches=launches,
        step_seconds=step,
        launch_seconds=launching,
        copy_seconds=copying,
        capture_seconds=launching + copying,
        restore_seconds=2 * launch_seconds + per_tile,
        share=(launching + copying) / step,
        bytes_share=copying / step,
    )


def measure() -> dict[str, Any]:
    """All models and deployments; ``is_projection`` says what these figures are."""
    inputs = {
        "bandwidth": BANDWIDTH,
        "peak_flops": PEAK_FLOPS,
        "utilisation": UTILISATION,
        "share_of_bandwidth": SHARE_OF_BANDWIDTH,
        "launch_seconds": LAUNCH_SECONDS,
        "tokens": CHUNK,
    }
    rows = [project(model, deployment)._asdict() for model in MODELS for deployment in DEPLOYMENTS]
    return {"is_projection": True, "inputs": inputs, "goal": GOAL, "rows": rows}


def show(result: dict[str, Any]) -> None:
    print(f"PROJECTION, not a measurement: MI355X, chunks of {CHUNK:,} tokens, stride 1")
    for r in result["rows"]:
        print(
            f"{r['model']}, {r['deployment']}: step {r['step_seconds'] * 1e3:.1f} ms; capture "
            f"{r['capture_seconds'] * 1e3:.3f} ms ({r['launches']} launches {r['launch_seconds'] * 1e3:.3f}, bytes "
            f"{r['copy_seconds'] * 1e3:.3f}) = {r['share']:.2%} of the step, its bytes alone {r['bytes_share']:.2%}; "
            f"a restore {r['restore_seconds'] * 1e6:.0f} us"
        )


if __name__ == "__main__":
    script(__doc__, measure, show)
