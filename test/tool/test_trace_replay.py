"""The replay of a trace: what is reused and captured is what the policy says, on both tree cores."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))

from make_trace import BLOCK, make_trace
from trace_policies import Policy, TraceRequest, distinct_blocks, load_trace
from trace_world import PAGE, Sizes, replay, tokens_of

REQUESTS = 60


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """What the generator writes, read again from .gz; then some of it twice more, cut to whole blocks."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in make_trace(REQUESTS, seed=3))
    generated = load_trace(path)
    cut = [TraceRequest(r.ids[: r.blocks], r.blocks * BLOCK) for r in generated[:8] if r.blocks]
    return generated + cut + cut


def expected(trace, policy):
    """Blocks that FULL alone would have matched, blocks that are reused, and tiles, without any limit."""
    seen, tiles = set(), set()
    nominal = effective = captured = 0
    for request in trace:
        # One token must be computed.
        longest = (request.tokens - 1) // BLOCK
        hit = next((k for k in range(longest) if request.ids[k] not in seen), longest)
        reused = max((k for k in range(1, hit + 1) if request.ids[k - 1] in tiles), default=0)
        wanted = set()
        if "last" in policy:
            wanted |= {request.blocks, longest}
        if "branch" in policy and hit > reused:
            wanted.add(hit)
        if "dense" in policy:
            wanted |= set(range(1, request.blocks + 1))
        if "grid-2048" in policy:
            wanted |= set(range(4, request.blocks + 1, 4))
        new = [request.ids[k - 1] for k in wanted if k > reused]
        nominal, effective, captured = nominal + hit, effective + reused, captured + len(new)
        tiles.update(new)
        seen.update(request.ids[: request.blocks])
    return nominal, effective, captured


def unlimited(trace):
    size = distinct_blocks(trace) + 2 * max(len(request.ids) for request in trace)
    return Sizes(size, size, size, size)


def test_the_generator_chains_ids_and_repeats_itself():
    lines = make_trace(REQUESTS, seed=3)
    assert lines == make_trace(REQUESTS, seed=3) != make_trace(REQUESTS, seed=4)
    before = {}
    for line in lines:
        assert len(line["hash_ids"]) == -(-line["input_length"] // BLOCK)
        for k, block in enumerate(line["hash_ids"]):
            # An id stands for its block and all before it.
            assert before.setdefault(block, (k, line["hash_ids"][:k])) == (k, line["hash_ids"][:k])


def test_tokens_are_equal_exactly_where_blocks_are():
    a, b = (tokens_of(TraceRequest((7, end), 2 * BLOCK)) for end in (8, 9))
    assert len(a) == 2 * PAGE and a[:PAGE] == b[:PAGE] and not set(a[PAGE:]) & set(b)
    lengths = {n: len(tokens_of(TraceRequest((1, 2, 3), n))) for n in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1)}
    assert lengths == {BLOCK - 1: PAGE - 1, BLOCK: PAGE, BLOCK + 1: PAGE + 1, 2 * BLOCK - 1: 2 * PAGE - 1}


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("policy", ["dense", "grid-2048", "last", "last+branch", "last+branch+grid-2048"])
def test_without_limits_the_replay_is_the_policy(trace, policy, core):
    found = replay(trace, Policy(policy), unlimited(trace), core=core, chunk=4 * PAGE)
    assert (found["nominal_blocks"], found["effective_blocks"], found["tiles"]) == expected(trace, policy)
    assert (found["dropped"], found["evicted_host"]) == (0, 0)


@pytest.mark.parametrize("core", ["python", "rust"])
def test_under_limits_the_counts_are_the_same_in_every_run(trace, core):
    """Few pages and tiles on the device, few tiles on the host."""
    sizes = Sizes(device_pages=130, device_tiles=10, host_pages=400, host_tiles=30)
    found = replay(trace, Policy("last+branch+grid-2048"), sizes, core=core, chunk=4 * PAGE)
    counts = {name: value for name, value in found.items() if isinstance(value, int)}
    # As both cores count them.
    assert counts == {
        "nominal_blocks": 557,
        "effective_blocks": 535,
        "tiles": 98,
        "dropped": 5,
        "superseded": 54,
        "evicted_device": 114,
        "evicted_host": 58,
    }
    assert found["peak"] == {"device_pages": 130, "device_tiles": 10, "host_pages": 178, "host_tiles": 30}


@pytest.mark.parametrize("core", ["python", "rust"])
def test_oldest_first_is_another_order(trace, core):
    """SGLang's own, in which leaves go with their compressed rows: what the product's is compared with."""
    sizes = Sizes(device_pages=130, device_tiles=10, host_pages=400, host_tiles=30)
    found = replay(trace, Policy("last+branch+grid-2048+oldest"), sizes, core=core, chunk=4 * PAGE)
    assert (found["effective_blocks"], found["evicted_device"], found["evicted_host"]) == (543, 104, 56)


def test_a_line_with_too_few_ids_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1], "input_length": 512}\n{"hash_ids": [1], "input_length": 1024}\n')
    assert load_trace(path, 1) == [TraceRequest((1,), 512)]
    with pytest.raises(ValueError, match="line 2: 1 hash_ids for 1024 tokens"):
        load_trace(path)


@pytest.mark.parametrize("name", ["grid", "grid-500", "first", "last,branch"])
def test_an_unknown_policy_is_refused(name):
    with pytest.raises(ValueError, match="is none of dense, last, branch, oldest and grid-N"):
        Policy(name)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
