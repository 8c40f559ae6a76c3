"""A projection, on paper, of what capture and restore cost on an MI355X. Nothing here was measured there.

    python benchmark/projection.py [--json]

For one rank and one prompt, prefilled in steps of T tokens:

    step     = 2 * active parameters * T * dp / (ranks * PEAK_FLOPS * UTILISATION)
    tiles    = what the placement takes of the prompt: stride 1, T / 256 per step
    capture  = launches * LAUNCH_SECONDS + 2 * tiles * tile bytes / (BANDWIDTH * SHARE_OF_BANDWIDTH)
    launches = layers + 2 * layers of ratio 4            of a step with a boundary inside: per layer and stream
               3                                         of a step whose one boundary is its end: per stream
    restore  = 2 * LAUNCH_SECONDS + 2 * tile bytes / (BANDWIDTH * SHARE_OF_BANDWIDTH)
    share    = capture / (steps * step)

Every byte is read once and written once. Tiles are as large on every rank: tensor parallelism divides
the step and not the capture; under DP attention (dp = ranks) each rank has a chunk of its own, and the
experts of all of them together take the step's time. Attention, communication and activations are left
out of the step: it really takes longer, and the share is smaller.

Example, V4-Flash, T 8,192, 8 ranks, DP attention, stride 1, a step:
    step     2 * 13e9 * 8,192 * 8 / (8 * 5e15 * 0.4)           = 106.5 ms
    launches 43 + 2 * 21                                        = 85
    capture  85 * 4e-6 + 2 * 32 * 6,496,256 / (8e12 * 0.6)      = 0.340 + 0.087 = 0.427 ms
    share                                                       = 0.40 %
The same, stride 64 (16,384 tokens), a prompt of 65,536 tokens in 8 steps: three of them end on the grid
and have no other boundary, four have none, the last has the prompt's two:
    launches 3 * 3 + 85                                         = 94
    capture  94 * 4e-6 + 2 * 5 * 6,496,256 / (8e12 * 0.6)       = 0.376 + 0.014 = 0.390 ms, of 8 * 106.5 ms
    share                                                       = 0.046 %
"""

from __future__ import annotations

import itertools
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
CHUNK, PROMPT = 8_192, 65_536
# The default, and a grid for long contexts.
STRIDES = (1, 64)
# Window, c4 state and c4-indexer state.
STREAMS = 3
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
    """Of a whole prompt: seconds, and what they are made of. share: capture_seconds of its steps' seconds."""

    model: str
    deployment: str
    stride: int
    tile_bytes: int
    steps: int
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


def steps_with_boundaries(prompt: int, chunk: int, stride: int) -> list[tuple[int, ...]]:
    """The boundaries that each chunk of a prompt captures, as the planner places them.

    Example, prompt 1_024, chunk 512, stride 2: [(512,), (768, 1_024)].
    """
    from sglang.srt.mem_cache.swa_bitexact.placement import extend_boundaries

    starts = range(0, prompt, chunk)
    return [extend_boundaries(s, min(s + chunk, prompt), prompt, page_size=PAGE, stride=stride) for s in starts]


def project(
    model: Model,
    deployment: Deployment,
    *,
    stride: int = 1,
    prompt: int = PROMPT,
    chunk: int = CHUNK,
    launch_seconds: float = LAUNCH_SECONDS,
) -> Projection:
    """The formula above. stride: of --hicache-swa-offload-page-stride. prompt, chunk: tokens.

    Raises:
        ValueError: tokens are no whole pages or chunks, or a number is not positive.
    """
    if chunk <= 0 or chunk % PAGE or prompt <= 0 or prompt % chunk or stride < 1:
        raise ValueError(
            f"prompt {prompt}, chunk {chunk}, stride {stride}: expected a prompt of whole chunks, chunks of whole "
            f"pages of {PAGE}, and a stride of 1 or more"
        )
    if not 1 <= deployment.dp <= deployment.ranks:
        raise ValueError(f"{deployment}: expected 1 <= dp <= ranks")
    size = tile_bytes(model)
    steps = steps_with_boundaries(prompt, chunk, stride)
    at_end = [boundaries == (chunk * number,) for number, boundaries in enumerate(steps, 1)]
    per_layer = model.layers + 2 * model.overlapping
    launches = sum(STREAMS if end else per_layer for end, taken in zip(at_end, steps, strict=True) if taken)
    tiles = sum(map(len, steps))
    step = 2 * model.active * chunk * deployment.dp / (deployment.ranks * PEAK_FLOPS * UTILISATION)
    per_tile = 2 * size / (BANDWIDTH * SHARE_OF_BANDWIDTH)
    launching, copying = launches * launch_seconds, tiles * per_tile
    return Projection(
        model=model.name,
        deployment=deployment.name,
        stride=stride,
        tile_bytes=size,
        steps=len(steps),
        tiles=tiles,
        launches=launches,
        step_seconds=step,
        launch_seconds=launching,
        copy_seconds=copying,
        capture_seconds=launching + copying,
        restore_seconds=2 * launch_seconds + per_tile,
        share=(launching + copying) / (len(steps) * step),
        bytes_share=copying / (len(steps) * step),
    )


def measure() -> dict[str, Any]:
    """All models, deployments and strides; ``is_projection`` says what these figures are."""
    inputs = {
        "bandwidth": BANDWIDTH,
        "peak_flops": PEAK_FLOPS,
        "utilisation": UTILISATION,
        "share_of_bandwidth": SHARE_OF_BANDWIDTH,
        "launch_seconds": LAUNCH_SECONDS,
        "chunk": CHUNK,
        "prompt": PROMPT,
    }
    cases = itertools.product(MODELS, DEPLOYMENTS, STRIDES)
    rows = [project(model, deployment, stride=stride)._asdict() for model, deployment, stride in cases]
    return {"is_projection": True, "inputs": inputs, "goal": GOAL, "rows": rows}


def show(result: dict[str, Any]) -> None:
    print(f"PROJECTION, not a measurement: MI355X, a prompt of {PROMPT:,} tokens in chunks of {CHUNK:,}")
    for r in result["rows"]:
        print(
            f"{r['model']}, {r['deployment']}, stride {r['stride']}: {r['steps']} steps of "
            f"{r['step_seconds'] * 1e3:.1f} ms; {r['tiles']} tiles in {r['launches']} launches, "
            f"{r['launch_seconds'] * 1e3:.3f} ms + {r['copy_seconds'] * 1e3:.3f} ms = {r['share']:.3%} of the steps, "
            f"its bytes alone {r['bytes_share']:.3%}; a restore {r['restore_seconds'] * 1e6:.0f} us"
        )


if __name__ == "__main__":
    script(__doc__, measure, show)
