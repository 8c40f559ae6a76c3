"""Indexer logits and top-k, against upstream's torch fallbacks and by hand."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.numbers import generator, randn
from kit.pristine import pristine
from sglang_cpu_ref import indexer

_UPSTREAM = "sglang.srt.layers.attention.dsv4.indexer"


def _cache(seed: int, pages: int) -> torch.Tensor:
    """Index pages with random e4m3 codes and positive scales: uint8 [pages, 64, 1, 132]."""
    codes = randn(seed, pages, 64 * 128).float().to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(pages, 64, generator=generator(seed)) + 0.1).view(torch.uint8).view(pages, -1)
    return torch.cat((codes, scales), dim=1).view(pages, 64, 1, 132)


def _inputs(seed: int, lengths: list[int], width: int) -> tuple:
    rows = len(lengths)
    table = torch.randint(0, 9, (rows, width), generator=generator(seed), dtype=torch.int32)
    q = randn(seed + 1, rows, 1, 4, 128).float().to(torch.float8_e4m3fn)
    weight = randn(seed + 2, rows, 4, dtype=torch.float32)
    return q, _cache(seed + 3, 9), weight, torch.tensor(lengths, dtype=torch.int32), table


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(0, 192), min_size=1, max_size=5))
def test_logits_against_upstream_fallback(seed, lengths):
    arguments = _inputs(seed, lengths, 3)
    found = indexer.fp8_paged_mqa_logits(*arguments, None, 192, False)
    expected = pristine(_UPSTREAM).fp8_paged_mqa_logits_torch(*arguments, None, 192, False)
    # Upstream's fallback rounds to bfloat16 along the way.
    assert torch.allclose(found, expected.float(), rtol=2.0**-5, atol=0.5)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 192), min_size=1, max_size=5))
def test_logits_against_formula(seed, lengths):
    q, cache, weight, _, table = arguments = _inputs(seed, lengths, 3)
    found = indexer.fp8_paged_mqa_logits(*arguments, None, 192, False)
    pages = cache.view(9, -1)
    for row, length in enumerate(lengths):
        for position in range(length):
            page, offset = pages[table[row, position // 64]], position % 64
            key = page[offset * 128 : (offset + 1) * 128].view(torch.float8_e4m3fn).double()
            scale = page[64 * 128 + offset * 4 :][:4].view(torch.float32).double()
            dots = (q[row, 0].double() @ key).clamp_min(0.0)
            products = dots * weight[row].double() * scale
            # Four float32 roundings of products, two of sums.
            assert abs(found[row, position] - products.sum()) <= 2.0**-21 * products.abs().sum()
        assert found[row, length:].eq(0).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 192), min_size=2, max_size=5))
def test_a_row_of_logits_has_the_same_bits_in_any_company(seed, lengths):
    q, cache, weight, seq_lens, table = _inputs(seed, lengths, 3)
    together = indexer.fp8_paged_mqa_logits(q, cache, weight, seq_lens, table, None, 192, False)
    for k in range(len(lengths)):
        row = slice(k, k + 1)
        alone = indexer.fp8_paged_mqa_logits(q[row], cache, weight[row], seq_lens[row], table[row], None, 256, False)
        assert torch.equal(alone[0, :192], together[k])


def _topk(scores, lengths, table, topk=512, page_size=64):
    pages = torch.full((scores.shape[0], topk), 7, dtype=torch.int32)
    raw = torch.full_like(pages, 7)
    indexer.topk_transform(scores, torch.tensor(lengths, dtype=torch.int32), table, pages, page_size, raw)
    return pages, raw


def test_short_contexts_take_every_row_in_order_like_upstream():
    scores, lengths = randn(1, 3, 640, dtype=torch.float32), [0, 5, 512]
    table = torch.arange(30, dtype=torch.int32).view(3, 10)
    pages, raw = _topk(scores, lengths, table)
    expected = torch.full((3, 512), 7, dtype=torch.int32)
    upstream = pristine(_UPSTREAM).topk_transform_pytorch_vectorized
    upstream(scores, torch.tensor(lengths, dtype=torch.int32), table, expected, 64)
    assert torch.equal(pages, expected)
    assert raw[1, :6].tolist() == [0, 1, 2, 3, 4, -1]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(513, 640), pad=st.integers(0, 300))
def test_long_contexts_take_the_best_whatever_the_width(seed, length, pad):
    scores = randn(seed, 1, 640, dtype=torch.float32)
    # relu makes many equal scores: the earlier row must win.
    scores = scores.clamp_min(0.0) * (torch.arange(640) % 3 == 0)
    table = torch.arange(16, dtype=torch.int32).view(1, 16)
    _, raw = _topk(torch.nn.functional.pad(scores, (0, pad), value=9.0), [length], table)
    by_rank = sorted(range(length), key=lambda i: (-scores[0, i].item(), i))[:512]
    assert raw[0].tolist() == sorted(by_rank)


def test_page_translation():
    table = torch.tensor([[4, 9]], dtype=torch.int32)
    pages, _ = _topk(torch.zeros(1, 128), [66], table, topk=512)
    assert pages[0, 62:67].tolist() == [4 * 64 + 62, 4 * 64 + 63, 9 * 64, 9 * 64 + 1, -1]
