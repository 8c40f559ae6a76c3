"""Writes a trace of conversations in the Mooncake format: no data set is needed to replay one.

    python benchmark/make_trace.py --requests 1000 --seed 0 --out build/trace.jsonl

JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``:
one id per started block of 512 tokens of the prompt. An id stands for its block and all before it,
so two prompts share ids exactly as far as their whole blocks are equal. Conversations begin with
one of a few system prompts; a turn repeats all turns before it, answers included.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

BLOCK = 512
_GAP_MS = 300


def make_trace(requests: int, seed: int, *, systems: int = 4) -> list[dict[str, Any]]:
    """``requests`` requests by arrival, the same for the same arguments.

    Up to ``requests // 8 + 1`` conversations are open at a time and take random turns. Prompts of a
    few hundred to some tens of thousands of tokens; a system prompt of 1 to 10 blocks.
    """
    rng = random.Random(seed)
    ids: dict[tuple[str, ...], int] = {}
    system_lengths = [rng.randint(BLOCK, 10 * BLOCK) for _ in range(systems)]
    open_ones: list[list[tuple[str, int]]] = []
    trace: list[dict[str, Any]] = []
    while len(trace) < requests:
        if (len(open_ones) <= requests // 8 and rng.random() < 0.4) or not open_ones:
            # The first system prompt is the most frequent one.
            system = min(rng.randrange(systems), rng.randrange(systems))
            open_ones.append([(f"system {system}", system_lengths[system])])
        turn = rng.randrange(len(open_ones))
        texts = open_ones[turn]
        texts.append((f"user {len(trace)}", round(rng.lognormvariate(6, 1.3)) + 1))
        output = round(rng.lognormvariate(5, 1)) + 1
        length = sum(tokens for _, tokens in texts)
        trace.append(
            {
                "timestamp": len(trace) * _GAP_MS,
                "input_length": length,
                "output_length": output,
                "hash_ids": [ids.setdefault(block, len(ids)) for block in _blocks(texts)],
            }
        )
        texts.append((f"answer {len(trace)}", output))
        if rng.random() < 0.25 or length > 60 * BLOCK:
            open_ones.pop(turn)
    return trace


def _blocks(texts: list[tuple[str, int]]) -> list[tuple[str, ...]]:
    """What each block stands for: every piece of text before its end, and where that is in the last one.

    Example, texts of 700 and 100 tokens: ("a 512"), ("a 700", "b 100"): the last block is not whole.
    """
    found: list[tuple[str, ...]] = []
    pieces: list[str] = []
    before = 0
    for name, tokens in texts:
        for end in range(before // BLOCK * BLOCK + BLOCK, before + tokens + 1, BLOCK):
            found.append((*pieces, f"{name} {end - before}"))
        before += tokens
        pieces.append(f"{name} {tokens}")
    if before % BLOCK:
        found.append(tuple(pieces))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in make_trace(args.requests, args.seed)))


if __name__ == "__main__":
    main()
