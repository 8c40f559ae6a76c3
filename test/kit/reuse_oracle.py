"""What a request that reuses a prefix leaves in the tree, against a cold run of the same tokens.

    python -m kit.reuse_oracle on|off [short]     (in test/; prints one JSON object)

Answers of short contexts do not show a wrong index key, and a wrong compressed row stays in the
tree for others: so the stored rows are compared, byte by byte. off: the switch is off. short: two
small cases without a grid of tiles, and each hit again from host memory.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = str(int("on" in sys.argv))

import torch

# Before anything else of SGLang: it chooses the platform, which SGLang's modules read.
from kit.scheduler_run import SchedulerRun, request
from kit.stored_rows import stored_rows

PAGE_SIZE = 256
SHORT = "short" in sys.argv
# (prompt, prefix that another one shares, length of that one): contexts below and beyond
# 4 * index_topk = 2,048 tokens, from where on the indexer leaves rows out; prefixes that end inside
# a page, and at a boundary. The last short one is shared up to where the other has no tile.
CASES = ((700, 400, 400), (1_300, 1_024, 1_024), (2_700, 2_300, 2_300))
SHORT_CASES = ((700, 400, 400), (800, 600, 1_100))
# A request is enough to give each slot another owner.
SLOTS = 4 if SHORT else 12
SHORT_ARGUMENTS = {
    "hicache_swa_offload_page_stride": 0,
    "enable_hierarchical_cache": True,
    "hicache_write_policy": "write_through",
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_ratio": 2.0,
}


def prompt(seed: int, length: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(16, 512, (length,), generator=source).tolist()


def asked(rid: str, tokens: list[int], namespace: str) -> Any:
    made = request(rid, tokens, 4)
    made.extra_key = namespace
    return made


def rows_of(run: SchedulerRun, tokens: list[int], namespace: str) -> dict[str, torch.Tensor]:
    """What the tree has of whole pages of ``tokens``."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree = run.scheduler.tree_cache
    key = RadixKey(request("", tokens, 1).input_ids, extra_key=namespace)
    match = tree.match_prefix(MatchPrefixParams(key=key))
    rows = tree.path_device_indices(match.last_device_node)
    assert len(rows) == len(tokens) // PAGE_SIZE * PAGE_SIZE, f"the tree has {len(rows)} of {len(tokens)} tokens"
    return stored_rows(run.scheduler.token_to_kv_pool_allocator.get_kvcache(), rows.long())


def wrong_rows(cold: dict[str, torch.Tensor], warm: dict[str, torch.Tensor]) -> dict[str, int]:
    """How many rows of each kind differ in a byte."""
    return {
        kind: int((rows.view(torch.uint8) != warm[kind].view(torch.uint8)).any(1).sum()) for kind, rows in cold.items()
    }


def evict_device(run: SchedulerRun) -> None:
    """Everything is on the host, and leaves the device."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree = run.scheduler.tree_cache
    run.run(lambda _: [] if tree.ongoing_write_through else None)
    tree.evict(EvictParams(num_tokens=1 << 20))


def main() -> None:
    # Stock evicts cached pages where request slots run short.
    arguments = SHORT_ARGUMENTS if SHORT else {}
    run = SchedulerRun(max_total_tokens=32_768, max_running_requests=SLOTS, chunked_prefill_size=512, **arguments)
    loads: list[bool] = []
    if (restores := run.scheduler.tree_cache.restore_queue) is not None:
        take = restores.take

        def observed(*, layer_wise: bool) -> Any:
            plan = take(layer_wise=layer_wise)
            if plan is not None and plan.warm:
                loads.append(plan.layer_wise)
            return plan

        restores.take = observed
    result = {}
    for seed, (length, shared, primed) in enumerate(SHORT_CASES if SHORT else CASES):
        tokens = prompt(seed, length)
        run.run_all([asked("cold", tokens, "cold")])
        run.run_all([asked("prime", tokens[:shared] + prompt(50 + seed, primed - shared), "warm")])
        for k in range(0, SLOTS, 4):
            run.run_all([asked(f"other {k + n}", prompt(100 + k + n, 300), f"other {length}") for n in range(4)])
        run.run_all([asked("warm", tokens, "warm")])
        cold, warm = rows_of(run, tokens, "cold"), rows_of(run, tokens, "warm")
        found = {"wrong": wrong_rows(cold, warm), "rows": {kind: len(rows) for kind, rows in cold.items()}}
        rids = ["cold", "warm"]
        if SHORT:
            evict_device(run)
            run.run_all([asked("host", tokens, "warm")])
            found["wrong_from_host"] = wrong_rows(cold, rows_of(run, tokens, "warm"))
            rids.append("host")
        outputs = [output for output in run.outputs if len(output.rids) == 1 and output.rids[0] in rids]
        answers = {rid: [list(o.output_ids[0]) for o in outputs if o.rids == [rid]] for rid in rids}
        found["cached"] = [max(o.cached_tokens[0] for o in outputs if o.rids == [rid]) for rid in rids[1:]]
        found["same_answer"] = all(answer == answers["cold"] for answer in answers.values())
        found["loads"] = loads.copy()
        result[length] = found
        run.outputs.clear()
        loads.clear()
    print(json.dumps(result), file=sys.__stdout__)


if __name__ == "__main__":
    main()
