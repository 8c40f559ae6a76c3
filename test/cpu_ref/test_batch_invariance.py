"""A token's results depend on its own prefix only.

The real model on the real backend and pools: the same sequence is computed alone in one
prefill, and again under any chunk split, in any company, partly by decode, with any number
of threads, on slots full of other requests' rows. Everything it leaves behind must have
the same bits: logits, ring rows, overlap state, compressed rows and index keys.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.tiny_run import TinyRun, tiny_run

# Lengths around the window (128), the c128 group (128), the page (256) and the c4 group (4).
_EDGES = [1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 383, 384, 511, 512, 513, 600]
_LONGEST = 600


@pytest.fixture(scope="module")
def tiny() -> TinyRun:
    return tiny_run()


def _tokens(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(6, 512) for _ in range(length)]


_TARGET = _tokens(1, 2400)


def _left_behind(tiny: TinyRun, sequence, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Everything that a sequence of ``done`` tokens leaves in the pools, and its last logits."""
    length = sequence.done
    out = {"logits": logits.clone()}
    for layer, rows in enumerate(tiny.ring_rows(sequence, range(max(0, length - 128), length))):
        out[f"ring.{layer}"] = rows.clone()
    # The state ring is read back from the last whole group on: older rows may be overwritten.
    start = max(0, length // 4 * 4 - 4)
    states = tiny.state_rows(sequence, range(start, length))
    # Of c128, the rows that wait for the end of their group.
    states |= tiny.state_rows(sequence, range(length // 128 * 128, length), ratio=128)
    out |= {f"state.{k}": v.clone() for k, v in states.items()}
    out |= {k: v.clone() for k, v in tiny.compressed_rows(sequence, length).items()}
    return out


_references: dict[int, dict[str, torch.Tensor]] = {}


def _reference(tiny: TinyRun, length: int) -> dict[str, torch.Tensor]:
    """The target alone, in one prefill; computed once per length."""
    if length not in _references:
        tiny.clear()
        sequence = tiny.sequence(_TARGET)
        _references[length] = _left_behind(tiny, sequence, tiny.extend((sequence, length))[0])
    return _references[length]


def _compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], length: int) -> None:
    assert found.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not differing, f"other bits at length {length} in {differing}"


def _run(tiny: TinyRun, cuts: SequenceOf[int], length: int, decoded: int, company: SequenceOf[int]) -> None:
    """Prefill to ``cuts`` in turn, then to ``length - decoded`` with ``company``, then decode."""
    expected = _reference(tiny, length)
    tiny.clear()
    # Dirty the slots and rows that the target will get.
    noise = tiny.sequence(_tokens(99, 300))
    tiny.extend((noise, 300))
    tiny.clear()
    target = tiny.sequence(_TARGET)
    others = [tiny.sequence(_tokens(7 + k, n + decoded)) for k, n in enumerate(company)]
    for cut in cuts:
        if target.done < cut < length - decoded:
            tiny.extend((target, cut))
    half = len(others) // 2
    parts = [(o, len(o.tokens) - decoded) for o in others]
    logits = tiny.extend(*parts[:half], (target, length - decoded), *parts[half:])[half]
    for _ in range(decoded):
        logits = tiny.decode(*others[:half], target, *others[half:])[half]
    _compare(_left_behind(tiny, target, logits), expected, length)


lengths = st.one_of(st.sampled_from(_EDGES), st.integers(1, _LONGEST))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=lengths,
    cuts=st.lists(lengths, max_size=4),
    decoded=st.integers(0, 9),
    company=st.lists(st.integers(1, 300), max_size=3),
    threads=st.sampled_from([1, 2]),
)
def test_any_way_of_computing_a_sequence_gives_the_same_bits(tiny, length, cuts, decoded, company, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _run(tiny, sorted(cuts), length, min(decoded, length - 1), company)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cuts", "decoded", "company"),
    [((), 0, ()), ((1024, 2048, 2100), 0, (40,)), ((2047,), 12, (5, 260)), ((), 40, ())],
)
def test_contexts_beyond_the_index_top_k(tiny, cuts, decoded, company):
    """2,300 tokens are 575 compressed rows: the indexer chooses 512 of them."""
    _run(tiny, cuts, 2300, decoded, company)


def test_the_comparison_covers_every_kind_of_row(tiny):
    assert {name.split(".")[0] for name in _reference(tiny, 300)} == {
        *("logits", "ring", "state", "c4", "c128", "index_key")
    }
    states = {name: rows.shape[0] for name, rows in _reference(tiny, 300).items() if name.startswith("state")}
    assert states == {"state.c4.1": 4, "state.c4.3": 4, "state.index.1": 4, "state.index.3": 4, "state.c128.2": 44}


def test_the_comparison_sees_a_single_changed_row(tiny):
    """The test can fail: one stale ring row before the last chunk changes what follows."""
    expected = _reference(tiny, 500)
    tiny.clear()
    target = tiny.sequence(_TARGET)
    tiny.extend((target, 400))
    ring = tiny.pool.unified_swa_ring_size
    tiny.pool.unified_kv_pool.kv_buffer[1][target.slot * ring + 399 % ring] += 1
    logits = tiny.extend((target, 500))[0]
    with pytest.raises(AssertionError, match="other bits"):
        _compare(_left_behind(tiny, target, logits), expected, 500)
