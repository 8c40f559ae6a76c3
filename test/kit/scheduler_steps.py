"""What a capture planner reads of requests and batches, and random steps of a scheduler."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import torch

from kit.tile_pools import PAGE


def req(slot, length, branch=None, skip=False):
    """What a plan reads of a request."""
    return SimpleNamespace(
        kv=SimpleNamespace(req_pool_idx=slot),
        full_untruncated_fill_ids=array("q", range(length)),
        swa_branching_seqlen=branch,
        skip_radix_cache_insert=skip,
        swa_tiles=None,
    )


def extend(*parts):
    """A prefill batch of (request, start, end)."""
    return SimpleNamespace(
        reqs=[r for r, _, _ in parts],
        prefix_lens=[start for _, start, _ in parts],
        extend_lens=[end - start for _, start, end in parts],
    )


def decode(*parts):
    """A decode step of (request, length after the step)."""
    return SimpleNamespace(reqs=[r for r, _ in parts], seq_lens_cpu=torch.tensor([n for _, n in parts]))


def random_step(p, rng, live, flying) -> list:
    """One scheduler step: a batch is planned, an older one finishes, requests come and go.

    live: slot -> (request, tokens done, prompt length). flying: plans whose result is not
    processed. Returns what was planned, as (slot, boundary).
    """
    while len(live) < 4 and rng.random() < 0.7:
        slot = next(s for s in range(1, 5) if s not in live)
        length = rng.randrange(1, 3000)
        live[slot] = (req(slot, length, branch=rng.choice([None, 256, 512])), 0, length)
    plan = None
    if rng.random() < 0.5:
        parts = []
        for slot, (r, done, length) in list(live.items()):
            if done < length and rng.random() < 0.8:
                end = min(length, done + rng.randrange(1, 900))
                parts.append((r, done, end))
                live[slot] = (r, end, length)
        plan = p.plan_extend(extend(*parts)) if parts else None
    else:
        parts = []
        for slot, (r, done, length) in list(live.items()):
            if done >= length:
                # Often just before a boundary, so that decode crosses many.
                done = max(done, done // PAGE * PAGE + rng.choice([0, PAGE - 1]))
                live[slot] = (r, done + 1, length)
                parts.append((r, done + 1))
        plan = p.plan_decode(decode(*parts)) if parts else None
    flying.append(plan)
    for slot in list(live):
        if rng.random() < 0.08:
            p.release(live.pop(slot)[0])
    # Overlap: the result of a step is processed after the next one is planned.
    while len(flying) > rng.choice([0, 1]):
        if (done_plan := flying.pop(0)) is not None:
            p.finish(done_plan)
    return [] if plan is None else [(c.slot, c.boundary) for c in plan.captures]
