"""The compressors, against plain loops in float64 that know nothing of plans and rings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.numbers import assert_bf16_close, randn, rope_table
from sglang_cpu_ref import compress, elementwise

_DIM, _SLOTS = 128, 3


def _width(ratio: int) -> int:
    return _DIM * (4 if ratio == 4 else 2)


def _pooled(rows: torch.Tensor, ape: torch.Tensor, ratio: int) -> torch.Tensor:
    """All compressed values of a sequence's state rows [L, width] -> float64 [L // ratio, dim]."""
    out = []
    for end in range(ratio, rows.shape[0] + 1, ratio):
        group = rows[end - ratio : end].double()
        if ratio == 4:
            kv, score = group[:, _DIM : 2 * _DIM], group[:, 3 * _DIM :]
            bias = ape[ratio:]
            if end > ratio:
                before = rows[end - 2 * ratio : end - ratio].double()
                kv = torch.cat((before[:, :_DIM], kv))
                score = torch.cat((before[:, 2 * _DIM : 3 * _DIM], score))
                bias = ape
        else:
            kv, score, bias = group[:, :_DIM], group[:, _DIM:], ape
        out.append(((score + bias.double()).softmax(0) * kv).sum(0))
    return torch.stack(out) if out else torch.zeros(0, _DIM, dtype=torch.float64)


class _Sequence:
    """One request that is fed in chunks through plan and compress_forward."""

    def __init__(self, ratio: int, slot: int, rows: torch.Tensor, ape: torch.Tensor, ring: torch.Tensor, size: int):
        self.ratio, self.slot, self.rows, self.ape, self.ring, self.size = ratio, slot, rows, ape, ring, size
        self.done = 0
        self.values: dict[int, torch.Tensor] = {}

    def _arguments(self, length: int) -> dict:
        return {
            "compress_ratio": self.ratio,
            "req_pool_indices": torch.tensor([self.slot]),
            "seq_lens": torch.tensor([length]),
            "req_to_token": None,
            "full_to_state": None,
            "swa_page_size": 256,
            "ring_size": self.size,
            "use_req_ring": self.ratio == 4,
        }

    def _compress(self, plan, rows: torch.Tensor) -> torch.Tensor:
        return compress.compress_forward(
            self.ring.view(-1, self.ratio, _width(self.ratio)),
            rows,
            self.ape,
            plan,
            head_dim=_DIM,
            compress_ratio=self.ratio,
        )

    def extend(self, end: int) -> None:
        plan = compress.plan_prefill(
            **self._arguments(end), extend_lens=torch.tensor([end - self.done]), num_q_tokens=end - self.done
        )
        out = self._compress(plan, self.rows[self.done : end])
        for value, seq_len in zip(out, plan.plan_c.view(torch.int32)[:, 0].tolist(), strict=True):
            self.values[seq_len] = value
        self.done = end

    def decode(self) -> None:
        self.done += 1
        plan = compress.plan_decode(**self._arguments(self.done))
        out = self._compress(plan, self.rows[self.done - 1 : self.done])
        if self.done % self.ratio == 0:
            self.values[self.done] = out[0]


def _ring_size(ratio: int, spec: bool) -> int:
    return (16 if spec else 8) if ratio == 4 else (256 if spec else 128)


@pytest.mark.parametrize("spec", [False, True])
@pytest.mark.parametrize("ratio", [4, 128])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_split_gives_the_same_bits_and_the_right_ones(ratio, spec, data):
    length = data.draw(st.integers(1, 40 if ratio == 4 else 400))
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=4)) | {length})
    decoded = data.draw(st.integers(0, min(12, length - 1)))
    size = _ring_size(ratio, spec)
    rows = randn(1, length, _width(ratio), dtype=torch.float32)
    ape = randn(2, 8 if ratio == 4 else 128, _DIM, dtype=torch.float32)

    def run(ends: list[int], steps: int) -> dict[int, torch.Tensor]:
        # Garbage in the ring: rows of a previous owner must never be read.
        ring = randn(3, _SLOTS * size, _width(ratio), dtype=torch.float32) * 100
        sequence = _Sequence(ratio, 1, rows, ape, ring, size)
        for end in ends:
            if end > sequence.done:
                sequence.extend(min(end, length - steps))
            if sequence.done == length - steps:
                break
        for _ in range(steps):
            sequence.decode()
        assert torch.equal(ring[:size], randn(3, _SLOTS * size, _width(ratio), dtype=torch.float32)[:size] * 100)
        return sequence.values

    whole, split = run([length], 0), run(cuts, decoded)
    expected = _pooled(rows, ape, ratio)
    assert whole.keys() == split.keys() == {ratio * (k + 1) for k in range(length // ratio)}
    for seq_len in whole:
        assert torch.equal(whole[seq_len], split[seq_len])
        assert torch.allclose(whole[seq_len].double(), expected[seq_len // ratio - 1], rtol=1e-5, atol=1e-5)


def test_prefill_plan_worked_example():
    plan = compress.plan_prefill(
        4, torch.tensor([2]), torch.tensor([13]), torch.tensor([7]), None, None, 256, 8, 7, use_req_ring=True
    )
    columns = plan.plan_c.view(torch.int32).tolist()
    # seq_len, row | buffer_len << 16, and ring pages of 4 rows: slot 2 starts at row 16, page 4.
    assert columns == [[8, 1 | 6 << 16, 4, 5], [12, 5 | 2 << 16, 5, 4]]
    # positions 8..12 lie in ring rows 16 + 0..4, and are rows 2..6 of this chunk.
    assert plan.plan_w.view(torch.int32).tolist() == [[k, 14 + k] for k in range(2, 7)]


def test_batch_company_does_not_change_bits():
    rows = [randn(k, n, _width(4), dtype=torch.float32) for k, n in ((1, 9), (2, 17), (3, 5))]
    ape = randn(4, 8, _DIM, dtype=torch.float32)

    def forward(members: list[int]) -> list[torch.Tensor]:
        lens = torch.tensor([rows[m].shape[0] for m in members])
        plan = compress.plan_prefill(
            4, torch.tensor(members), lens, lens, None, None, 256, 8, int(lens.sum()), use_req_ring=True
        )
        ring = torch.zeros(4 * 8, _width(4))
        flat = torch.cat([rows[m] for m in members])
        out = compress.compress_forward(ring.view(-1, 4, _width(4)), flat, ape, plan, head_dim=_DIM, compress_ratio=4)
        return list(out.split([rows[m].shape[0] // 4 for m in members]))

    together = forward([0, 1, 2])
    for member in range(3):
        assert torch.equal(forward([member])[0], together[member])


@pytest.mark.parametrize("indexer", [False, True])
def test_norm_rope_store(indexer):
    """The stored row is the normed, rotated value; an index key is it in e4m3 with its scale."""
    dim = 128 if indexer else 512
    kv, weight, table = randn(1, 3, dim, dtype=torch.float32), randn(2, dim, dtype=torch.float32), rope_table(64)
    plan = compress.plan_prefill(
        4, torch.tensor([1]), torch.tensor([12]), torch.tensor([12]), None, None, 256, 8, 12, use_req_ring=True
    )
    slots = torch.zeros(12, dtype=torch.int64)
    slots[3::4] = torch.tensor([70, 5, 64])
    cache = torch.zeros((2, 64 * 132) if indexer else (80, 1024), dtype=torch.uint8)
    compress.compress_norm_rope_store(
        kv,
        plan,
        norm_weight=weight,
        norm_eps=1e-6,
        freq_cis=table,
        out_loc=slots,
        kvcache=cache,
        page_size=64 if indexer else 1,
        bf16_store=not indexer,
    )
    d = kv.double()
    d = d / (d.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    tail = torch.view_as_complex(d[:, -64:].reshape(3, 32, 2)) * table[[0, 4, 8]].to(torch.complex128)
    expected = torch.cat((d[:, :-64], torch.view_as_real(tail).flatten(-2)), dim=-1)
    if not indexer:
        rows = cache.view(torch.bfloat16)
        assert_bf16_close(rows[[70, 5, 64]], expected)
        assert int(rows.abs().sum(1).count_nonzero()) == 3
        return
    expected = elementwise.hadamard(expected.float()).double()
    for row, slot in zip(expected, (70, 5, 64), strict=True):
        page, offset = slot // 64, slot % 64
        codes = cache[page, offset * 128 : (offset + 1) * 128].view(torch.float8_e4m3fn).double()
        scale = cache[page, 64 * 128 + offset * 4 :][:4].view(torch.float32).double()
        assert torch.allclose(scale, row.abs().max() / 448, rtol=1e-5)
        # Half a step of e4m3: 2**-4 relative, 2**-10 absolute below its normal range.
        assert ((codes * scale - row).abs() <= 2.0**-4 * row.abs() + scale * 2.0**-10).all()


def test_paged_c4_state_is_refused():
    with pytest.raises(NotImplementedError, match="unified_kv_triton"):
        compress.plan_decode(4, torch.tensor([1]), None, None, torch.tensor([5]), 256, 8, use_req_ring=False)
