"""What a request that reuses a prefix leaves in the tree, against a cold run of the same tokens.

    python -m kit.reuse_oracle on|off     (in test/; prints one JSON object)

Answers of short contexts do not show a wrong index key, and a wrong compressed row stays in the
tree for others: so the stored rows are compared, byte by byte. off: the switch is off.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = str(int(sys.argv[1:] == ["on"]))

import torch

# Before anything else of SGLang: it chooses the platform, which SGLang's modules read.
from kit.scheduler_run import SchedulerRun, request
from kit.stored_rows import stored_rows

PAGE_SIZE = 256
# (prompt, primed prefix): contexts below and beyond 4 * index_topk = 2,048 tokens, from where on the
# indexer leaves rows out; prefixes that end inside a page, and at a boundary.
CASES = ((700, 400), (1_300, 1_024), (2_700, 2_300))


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


def main() -> None:
    # Stock evicts cached pages where request slots run short.
    run = SchedulerRun(max_total_tokens=32_768, max_running_requests=12, chunked_prefill_size=512)
    result = {}
    for seed, (length, primed) in enumerate(CASES):
        tokens = prompt(seed, length)
        run.run_all([asked("cold", tokens, "cold")])
        run.run_all([asked("prime", tokens[:primed], "warm")])
        for k in range(0, 12, 4):
            run.run_all([asked(f"other {k + n}", prompt(100 + k + n, 300), "other") for n in range(4)])
        run.run_all([asked("warm", tokens, "warm")])
        cold, warm = rows_of(run, tokens, "cold"), rows_of(run, tokens, "warm")
        wrong = {
            kind: int((rows.view(torch.uint8) != warm[kind].view(torch.uint8)).any(1).sum())
            for kind, rows in cold.items()
        }
        outputs = [output for output in run.outputs if output.rids in (["cold"], ["warm"])]
        answers = {rid: [list(o.output_ids[0]) for o in outputs if o.rids == [rid]] for rid in ("cold", "warm")}
        result[length] = {
            "wrong": wrong,
            "rows": {kind: len(rows) for kind, rows in cold.items()},
            "cached": max(o.cached_tokens[0] for o in outputs if o.rids == ["warm"]),
            "same_answer": answers["cold"] == answers["warm"],
        }
        run.outputs.clear()
    print(json.dumps(result), file=sys.__stdout__)


if __name__ == "__main__":
    main()
