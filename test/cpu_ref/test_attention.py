"""Sparse attention and the ring store, against upstream's Triton kernels and a float64 formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.numbers import assert_bf16_close, generator, randn
from kit.pristine import pristine
from sglang_cpu_ref import attention

_SCALE = 512**-0.5
_KERNELS = "sglang.kernels.ops.attention.dsv4.unified_kv_kernels"


def _lists(seed: int, tokens: int, rows: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random row lists without repetition: (indices int32, indptr int32)."""
    source = generator(seed)
    lengths = torch.randint(0, longest + 1, (tokens,), generator=source)
    lists = [torch.randperm(rows, generator=source)[: int(n)] for n in lengths]
    return torch.cat(lists).to(torch.int32), torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32)


def _formula(q: torch.Tensor, rows: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """One token, float64: q [H, D], rows [L, D], sink [H]."""
    q, rows = q.double(), rows.double()
    scores = torch.cat((q @ rows.t() * _SCALE, sink.double()[:, None]), dim=1)
    return scores.softmax(1)[:, :-1] @ rows


def _launch_prefill_kernel(**a: torch.Tensor) -> torch.Tensor:
    """Upstream's kernel without its guard against CPU tensors."""
    import triton

    module = pristine(f"{_KERNELS}.paged_prefill")
    q, pool, extend = a["q"], a["unified_kv"], a["kv_extend"]
    tokens, heads, dim = q.shape
    out = torch.empty_like(q)
    module._sparse_attn_v4_paged_prefill_kernel[(tokens, triton.cdiv(heads, 16))](
        *(q, pool, a["kv_indices_prefix"], a["kv_indptr_prefix"]),
        *(extend, a["kv_indices_extend"], a["kv_indptr_extend"], a["attn_sink"], out),
        *(*q.stride(), *pool.stride(), *extend.stride(), *out.stride(), heads, dim, _SCALE),
        BLOCK_H=16,
        BLOCK_D=512,
        BLOCK_K=16,
        num_warps=8,
    )
    return out


# Triton's interpreter computes wrong products of bfloat16 operands (numpy has no such
# type); both kernels take float16 as well.
_ORACLE_DTYPE = torch.float16


@pytest.fixture(scope="module", params=[torch.bfloat16, _ORACLE_DTYPE], ids=["bf16", "fp16"])
def prefill_inputs(request):
    prefix, prefix_ptr = _lists(1, 9, 200, 70)
    extend, extend_ptr = _lists(2, 9, 40, 30)
    return {
        "q": randn(3, 9, 4, 512, dtype=request.param),
        "unified_kv": randn(4, 200, 512, dtype=request.param),
        "kv_indices_prefix": prefix,
        "kv_indptr_prefix": prefix_ptr,
        "kv_extend": randn(5, 40, 512, dtype=request.param),
        "kv_indices_extend": extend,
        "kv_indptr_extend": extend_ptr,
        "attn_sink": randn(6, 4, dtype=torch.float32),
    }


@pytest.mark.parametrize("prefill_inputs", [_ORACLE_DTYPE], indirect=True, ids=["fp16"])
def test_prefill_against_upstream_kernel(prefill_inputs):
    found = attention.prefill(**prefill_inputs, softmax_scale=_SCALE)
    assert_bf16_close(found, _launch_prefill_kernel(**prefill_inputs), steps=0.5)


def test_prefill_against_formula(prefill_inputs):
    a = prefill_inputs
    found = attention.prefill(**a, softmax_scale=_SCALE)
    for t in range(a["q"].shape[0]):
        rows = torch.cat(
            [
                source[indices[ptr[t] : ptr[t + 1]].long()]
                for source, indices, ptr in (
                    (a["unified_kv"], a["kv_indices_prefix"], a["kv_indptr_prefix"]),
                    (a["kv_extend"], a["kv_indices_extend"], a["kv_indptr_extend"]),
                )
            ]
        )
        assert_bf16_close(found[t], _formula(a["q"][t], rows, a["attn_sink"]))


def test_decode_against_upstream_kernel(monkeypatch):
    indices, indptr = _lists(7, 5, 300, 200)
    q, pool = randn(8, 5, 4, 512, dtype=_ORACLE_DTYPE), randn(9, 300, 512, dtype=_ORACLE_DTYPE)
    sink = randn(10, 4, dtype=torch.float32)
    found = attention.decode(
        q=q, unified_kv=pool, kv_indices=indices, kv_indptr=indptr, attn_sink=sink, softmax_scale=_SCALE
    )
    module = pristine(f"{_KERNELS}.paged_decode")
    # The wrapper asks aiter for the number of compute units, and refuses CPU tensors by
    # `is_cuda`: answer for this call.
    monkeypatch.setattr(module, "_cu_count", lambda: 1)
    for splits in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)
            expected = module._sparse_attn_v4_paged_decode_triton(
                q, pool, indices, indptr, sink, _SCALE, kv_splits=splits
            )
        assert_bf16_close(found, expected, steps=0.5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 5))
def test_a_token_depends_on_its_own_rows_only(seed, tokens):
    """Same bits: alone or in a block, rows in any order, from the pool or from the chunk."""
    indices, indptr = _lists(seed, tokens, 150, 90)
    q, pool, sink = randn(seed, tokens, 4, 512), randn(seed + 1, 150, 512), randn(seed + 2, 4, dtype=torch.float32)
    common = {"attn_sink": sink, "softmax_scale": _SCALE}
    decoded = attention.decode(q=q, unified_kv=pool, kv_indices=indices, kv_indptr=indptr, **common)
    none, zeros = torch.empty(0, dtype=torch.int32), torch.zeros(tokens + 1, dtype=torch.int32)
    from_pool = attention.prefill(
        q=q,
        unified_kv=pool,
        kv_indices_prefix=indices,
        kv_indptr_prefix=indptr,
        kv_extend=pool[:1],
        kv_indices_extend=none,
        kv_indptr_extend=zeros,
        **common,
    )
    order = torch.randperm(150, generator=generator(seed + 3))
    place = torch.argsort(order).to(torch.int32)
    from_chunk = attention.prefill(
        q=q,
        unified_kv=pool[:1],
        kv_indices_prefix=none,
        kv_indptr_prefix=zeros,
        kv_extend=pool[order],
        kv_indices_extend=place[indices.long()],
        kv_indptr_extend=indptr,
        **common,
    )
    assert torch.equal(decoded, from_pool)
    assert torch.equal(decoded, from_chunk)


def test_both_products_are_exact(monkeypatch):
    """Neither sum over the head dimension nor over a token's rows depends on its order."""
    query, key, weight = attention._QUERY_BITS, attention._KEY_BITS, attention._WEIGHT_BITS
    assert 512 * 2 ** (query + key) <= 2**53
    assert attention.MAX_KEYS_PER_TOKEN * 2 ** (weight + key) <= 2**53
    seen = []

    def checked(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append((a.shape, b.shape))
        product = a @ b
        for seed in range(5):
            order = torch.randperm(a.shape[1], generator=generator(seed))
            assert torch.equal(a[:, order] @ b[order], product)
        return product

    monkeypatch.setattr(attention, "grid_product", checked)
    member, sink = torch.ones(6, 640, dtype=torch.bool), torch.zeros(4)
    # Values of very different size in one row, rows of very different size; then rows of one
    # size, whose weights still span many binades.
    spread = torch.logspace(-4, 4, 512)
    for q_scale, row_scale in ((spread, torch.logspace(-3, 3, 640)[:, None]), (1.0, 1.0)):
        # float32, to fill every bit of the grids.
        q, pool = randn(1, 6, 4, 512, dtype=torch.float32), randn(2, 640, 512, dtype=torch.float32)
        attention.attend(q * q_scale, pool * row_scale, member, sink, _SCALE)
    assert [a[1] for a, _ in seen] == [512, 640] * 2


def test_poison_stays_with_its_readers():
    q, pool, sink = randn(1, 2, 4, 512), randn(2, 8, 512), torch.zeros(4)
    pool[5] = float("nan")
    member = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0]], dtype=torch.bool)
    out = attention.attend(q, pool, member, sink, _SCALE)
    assert out[1].isnan().all()
    assert torch.equal(out[:1], attention.attend(q[:1], pool[:4], member[:1, :4], sink, _SCALE))


def test_token_without_rows_and_padding_entries():
    q, pool, sink = randn(1, 2, 4, 512), randn(2, 8, 512), torch.zeros(4)
    arguments = {"q": q, "unified_kv": pool, "attn_sink": sink, "softmax_scale": _SCALE}
    padded = attention.decode(kv_indices=torch.tensor([-1, 3, -1, 6]), kv_indptr=torch.tensor([0, 0, 4]), **arguments)
    plain = attention.decode(kv_indices=torch.tensor([3, 6]), kv_indptr=torch.tensor([0, 0, 2]), **arguments)
    assert torch.equal(padded, plain)
    assert torch.equal(padded[0], torch.zeros(4, 512, dtype=torch.bfloat16))


@settings(max_examples=10, deadline=None)
@given(prefix=st.integers(0, 300), extend=st.integers(1, 300), ring=st.sampled_from([128, 131]))
def test_ring_store_against_upstream_kernel(prefix, extend, ring):
    kv, position = randn(1, extend, 512), torch.arange(prefix, prefix + extend)
    arguments = {
        "kv": kv,
        "state_slot": torch.full((extend,), 2),
        "positions": position,
        "win": 128,
        "ring_stride": ring,
        "final_pos": torch.full((extend,), prefix + extend - 1),
    }
    expected, found = randn(2, 4 * ring, 512), randn(2, 4 * ring, 512)
    pristine("sglang.kernels.ops.kvcache.dsv4_unified_kv_store").store_swa_into_unified(
        unified_kv=expected, **arguments
    )
    attention.store_swa_into_unified(unified_kv=found, **arguments)
    assert torch.equal(found, expected)
