"""Index streams and metadata: entry for entry what upstream's Triton kernels write."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.pristine import pristine
from sglang_cpu_ref import metadata, streams

_DSV4 = "sglang.kernels.ops.attention.dsv4"
_WIN, _SWA_PAGES, _TOPK = 128, 640, 512

requests = st.lists(st.tuples(st.integers(0, 700), st.integers(1, 60)), min_size=1, max_size=4)


def _prefill_inputs(batch: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """(prefix, extend) per request -> the per-token inputs of build_prefill_indices."""
    slot, position, start, first_row = [], [], [], []
    for number, (prefix, extend) in enumerate(batch):
        first = len(slot)
        slot += [number + 1] * extend
        position += range(prefix, prefix + extend)
        start += [prefix] * extend
        first_row += [first] * extend
    as_tensor = lambda values: torch.tensor(values, dtype=torch.int64)  # noqa: E731
    return {
        "state_slot": as_tensor(slot),
        "positions": as_tensor(position),
        "chunk_start": as_tensor(start),
        "cu_q": as_tensor(first_row),
    }


def _page_table(lengths: list[int], width: int, seed: int) -> torch.Tensor:
    """Front-packed random row ids, -1 padded, int32 [tokens, width]."""
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    source = torch.Generator().manual_seed(seed)
    for row, length in enumerate(lengths):
        table[row, :length] = torch.randint(0, 300, (length,), generator=source, dtype=torch.int32)
    return table


@settings(max_examples=12, deadline=None)
@given(batch=requests, ratio=st.sampled_from([0, 4, 128]), ring=st.sampled_from([_WIN, _WIN + 3]))
def test_prefill_indices(batch, ratio, ring):
    inputs = _prefill_inputs(batch)
    position = inputs["positions"].tolist()
    pages = {
        "c128_page_indices": _page_table([(p + 1) // 128 for p in position], 64, 1),
        "c4_sparse_page_indices": _page_table([min((p + 1) // 4, _TOPK) for p in position], _TOPK, 2),
    }
    common = {"compress_ratio": ratio, "win": _WIN, "ring_stride": ring, "swa_pages": _SWA_PAGES, **inputs, **pages}
    expected = pristine(f"{_DSV4}.unified_kv_kernels.runtime").build_prefill_indices(**common)
    found = streams.build_prefill_indices(**common)
    for mine, theirs, indptr in zip(found, expected, (found[1], None, found[3], None), strict=True):
        # Upstream's index buffers are allocated for the widest case; the lists end at indptr.
        used = theirs if indptr is None else theirs[: int(indptr[-1])]
        assert torch.equal(mine.to(theirs.dtype), used)
    assert found[1].tolist()[-1] == found[0].shape[0]


@pytest.mark.parametrize(("ratio", "compressed"), [(0, []), (4, [20, 13])])
def test_prefill_indices_worked_example(ratio, compressed):
    """Position 7 of slot 1, in a chunk from 6 on whose rows begin at 10; window 4, ring rows 8 in all.

    Positions 4 and 5 are in the ring (rows 4 + 0, 4 + 1), then come the chosen compressed
    rows, behind the 8 ring rows; 6 and 7 are rows 10 and 11 of this chunk.
    """
    out = streams.build_prefill_indices(
        compress_ratio=ratio,
        state_slot=torch.tensor([1]),
        positions=torch.tensor([7]),
        chunk_start=torch.tensor([6]),
        cu_q=torch.tensor([10]),
        win=4,
        ring_stride=4,
        swa_pages=8,
        c128_page_indices=None,
        c4_sparse_page_indices=torch.tensor([[12, 5, -1]], dtype=torch.int32),
    )
    prefix = [4, 5, *compressed]
    assert [part.tolist() for part in out] == [prefix, [0, len(prefix)], [10, 11], [0, 2]]


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=6), ring=st.sampled_from([_WIN, _WIN + 3]))
def test_decode_streams(lengths, ring):
    seq = torch.tensor(lengths, dtype=torch.int32)
    hca = torch.tensor([n // 128 for n in lengths], dtype=torch.int32)
    csa = torch.tensor([min(n // 4, _TOPK) for n in lengths], dtype=torch.int32)
    common = {
        "state_slot": torch.arange(1, len(lengths) + 1),
        "positions": (seq - 1),
        "swa_len": seq.clamp_max(_WIN),
        "hca_len": hca,
        "csa_len": csa,
        "hca_page_indices": _page_table(hca.tolist(), 64, 3),
        "csa_width": _TOPK,
        "win": _WIN,
        "ring_stride": ring,
        "swa_pages": _SWA_PAGES,
    }
    upstream = pristine(f"{_DSV4}.unified_kv_kernels.runtime")
    expected, found = upstream.build_decode_streams(**common), streams.build_decode_streams(**common)
    tail = {
        "prefix_len": common["swa_len"],
        "page_indices": _page_table(csa.tolist(), _TOPK, 4),
        "valid_len": csa,
        "swa_pages": _SWA_PAGES,
    }
    upstream.fill_compress_tail(indices=expected[4], indptr=expected[5], **tail)
    streams.fill_compress_tail(indices=found[4], indptr=found[5], **tail)
    for k in (0, 2, 4):
        assert torch.equal(found[k + 1], expected[k + 1])
        used = int(found[k + 1][-1])
        assert torch.equal(found[k][:used], expected[k][:used])


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=6), pages=st.booleans())
def test_compression_metadata(lengths, pages):
    seq = torch.tensor(lengths, dtype=torch.int32)
    location = torch.tensor([n * 7 for n in lengths])
    table = torch.randint(0, 50, (len(lengths), 16), dtype=torch.int32, generator=torch.Generator().manual_seed(5))
    arguments = (seq, seq - 1, location, table, 256, pages)
    expected = pristine(f"{_DSV4}.metadata_kernel").init_compression_metadata(*arguments)
    found = metadata.init_compression_metadata(*arguments)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine.to(theirs.dtype), theirs)


@pytest.mark.parametrize("max_seq_len", [1, 255, 256, 257, 2000, 5000])
def test_page_table(max_seq_len):
    req_to_token = torch.randint(0, 10_000, (5, 2048), dtype=torch.int32, generator=torch.Generator().manual_seed(6))
    rows = torch.tensor([3, 1, 4])
    expected = pristine(f"{_DSV4}.attn_glue_hip").page_table_from_req_to_token(req_to_token, rows, max_seq_len, 256)
    assert torch.equal(metadata.page_table_from_req_to_token(req_to_token, rows, max_seq_len, 256), expected)


def test_sparse_buffers():
    raw = torch.tensor([0, 3, 511, 512, 900], dtype=torch.int32)
    arguments = {
        "c4_topk_lengths_clamp1": raw.clamp_min(1),
        "c4_topk_lengths_raw": raw,
        "c1_topk_lengths_clamp1": None,
        "c2_topk_lengths_clamp1": None,
        "index_topk": 512,
        "page_index_align": 64,
    }
    expected = pristine(f"{_DSV4}.attn_glue_hip").sparse_buffers(**arguments)
    found = metadata.sparse_buffers(**arguments)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
