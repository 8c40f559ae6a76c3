"""What a capture planner reads of requests and batches, and random steps of a scheduler."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kit.tile_pools import PAGE


class EmptyTree:
    """A tree that holds nothing: where tiles are short, there is none to evict."""

    tree_components = (ComponentType.SWA,)
    token_to_kv_pool_allocator = SimpleNamespace(page_size=PAGE, capture_pool=SimpleNamespace(num_tiles=1))
    tree_core = SimpleNamespace(evict_device_start=lambda *_: None, evict_device_end=lambda *_: None)

    def _evict_device_next_node(self, *_):
        return None, False


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
        tree_cache=EmptyTree(),
        reqs=[r for r, _, _ in parts],
        prefix_lens=[start for _, start, _ in parts],
        extend_lens=[end - start for _, start, end in parts],
    )


def decode(*parts):
    """A decode step of (request, length after the step)."""
    lengths = torch.tensor([length for _, length in parts])
    return SimpleNamespace(tree_cache=EmptyTree(), reqs=[r for r, _ in parts], seq_lens_cpu=lengths)


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
