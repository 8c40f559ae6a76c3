"""Upstream's test kits that talk to a server over HTTP, run against one server; their outcomes as data.

Sizes are small, since a step takes tens of milliseconds here. Left out: kits that need a trained model
alone, a dataset, images, speculative decoding, PD or a grammar library, and those of other cache kinds.
"""

from __future__ import annotations

import contextlib
import random
import unittest
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import requests
from sglang.test.kits import cache_hit_kit, radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.unified_radix_cache_kit import AccuracyTwoPassMixin, UnifiedRadixTreeTestMixin

from sglang_bitexact.demo.server import Server

PAGE_SIZE = 256
_VOCABULARY = 512


class Outcome(NamedTuple):
    """passed, and else the end of the failure's text."""

    passed: bool
    text: str


def _folded(tokens: Any) -> Any:
    """Kits draw ids of a large vocabulary; the same ids within the tiny model's, whose own stay."""
    return [_folded(token) for token in tokens] if isinstance(tokens, list) else tokens % _VOCABULARY


@contextlib.contextmanager
def _folding() -> Iterator[None]:
    post = requests.post

    def folded(url: str, *args: Any, **kwargs: Any) -> requests.Response:
        body = kwargs.get("json")
        if body and "input_ids" in body:
            kwargs["json"] = {**body, "input_ids": _folded(body["input_ids"])}
        return post(url, *args, **kwargs)

    with unittest.mock.patch.object(requests, "post", folded):
        yield


def _any_hit(result: dict[str, Any], *_: Any) -> None:
    assert result["meta_info"]["cached_tokens"] > 0


def _random_prompts(count: int, input_len: int, seed: int) -> list[Any]:
    """Stands for the samples of a dataset that cannot be downloaded."""
    draw = random.Random(seed)
    return [unittest.mock.Mock(prompt=[draw.randrange(1, 30_000) for _ in range(input_len)]) for _ in range(count)]


class _Contract(BasicAPIContractMixin, unittest.TestCase):
    pass


class _Decode(BasicDecodeCorrectnessMixin, unittest.TestCase):
    sanity_max_new_tokens_short = 16
    sanity_max_new_tokens_long = 48


class _Stress(BasicSchedulerStressMixin, unittest.TestCase):
    sanity_max_new_tokens_short = 16


class _Abort(AbortAllMixin, unittest.TestCase):
    abort_all_num_requests = 6
    abort_all_max_new_tokens = 1000


class _Pause(PauseResumeInPlaceMixin, unittest.TestCase):
    pause_num_requests = 6
    pause_max_new_tokens = 64
    pause_duration = 2
    pause_ignore_eos = True


class _TwoPass(AccuracyTwoPassMixin, unittest.TestCase):
    """The whole prompt but its last page, from storage after a flush."""

    l3_prefetch_page_size = PAGE_SIZE
    l3_prefetch_prompt_pages = 4
    test_gsm8k_two_passes = None


class _Logprobs(UnifiedRadixTreeTestMixin, unittest.TestCase):
    """What was sampled behind a hit against the same tokens without any cache: no divergence at all."""

    model = "tiny"
    kl_threshold = 1e-12
    max_new_tokens = 12
    num_groups = 2
    branches_per_group = 2
    prefill_cache_assert = staticmethod(_any_hit)
    decode_cache_assert = staticmethod(_any_hit)
    input_ids = tuple([random.Random(n).randrange(1, 30_000) for _ in range(520)] for n in range(4))
    test_gsm8k = None


class _Reuse(unittest.TestCase):
    base_url = ""

    def test_every_turn_reuses_all_whole_pages_before_it(self) -> None:
        samples = iter(range(100))

        def sample(input_len: int, num_prompts: int, **_: Any) -> list[Any]:
            return _random_prompts(num_prompts, input_len, next(samples))

        with (
            unittest.mock.patch.object(cache_hit_kit, "get_tokenizer"),
            unittest.mock.patch.object(cache_hit_kit, "sample_random_requests", sample),
            unittest.mock.patch.object(cache_hit_kit, "gen_payload", _folded_payload),
        ):
            cache_hit_kit.run_multiturn_cache_hit_test(
                self.base_url, "tiny", num_clients=4, num_rounds=3, request_length=300, output_length=12
            )

    def test_a_random_tree_of_prompts(self) -> None:
        random.seed(7)
        nodes = radix_cache_server_kit.gen_radix_tree(num_nodes=40, chunk_len=48)
        with unittest.mock.patch.object(radix_cache_server_kit, "gen_radix_tree", return_value=nodes):
            radix_cache_server_kit.run_radix_attention_test(self.base_url)


_payload = cast(Callable[..., dict[str, Any]], cache_hit_kit.gen_payload)


def _folded_payload(input_ids: list[int], *args: Any) -> dict[str, Any]:
    """That kit streams with another HTTP library."""
    return _payload(_folded(input_ids), *args)


KITS = (_Contract, _Decode, _Stress, _Abort, _Pause, _TwoPass, _Logprobs, _Reuse)


def outcomes(server: Server) -> dict[str, Outcome]:
    """Run every kit against ``server``; by kit and test name."""
    out: dict[str, Outcome] = {}
    for kit in KITS:
        case = cast(Any, type(kit.__name__, (kit,), {"base_url": server.url, "process": unittest.mock.Mock()}))
        case.process.poll.return_value = None
        for name in unittest.TestLoader().getTestCaseNames(case):
            result = unittest.TestResult()
            with _folding():
                case(name).run(result)
            failed = [text for _, text in (*result.failures, *result.errors)]
            out[f"{kit.__name__[1:]}.{name}"] = Outcome(not failed, failed[0][-400:] if failed else "")
    return out
