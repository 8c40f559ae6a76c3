"""Steps as a data-parallel rank pads them, in one process: what do they capture?

    python -m kit.padded_steps            (in test/; prints one JSON object)

Under DP attention SGLang pads a rank's step to the longest of all ranks, computes a decode step
as an extend of one row each where another rank prefills, and gives an idle rank a made-up
request. ForwardBatch.prepare_mlp_sync_batch does all three for a group of one rank, too.
"""

from __future__ import annotations

import json
import os
import sys
import unittest.mock
from typing import Any

os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "1"
os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")

import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.mem_cache.swa_bitexact import guards

guards._is_complete = lambda: True

from sglang.benchmark import one_batch
from sglang.srt.layers.dp_attention import DpPaddingMode
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from kit.tiny_run import TinyRun, tiny_run

_HOOKS = ("window_rows", "state_rows", "windows_at_end", "states_at_end")
TOKENS = [6 + k * 7 % 500 for k in range(600)]


class PaddedSteps:
    """Runs steps with and without padding, and keeps what they captured."""

    def __init__(self) -> None:
        self.run: TinyRun = tiny_run(hicache_swa_device_tile_fraction=0.75)
        self.pool = self.run.runner.token_to_kv_pool_allocator.capture_pool
        self.padded_to = 0
        self.hooks: list[str] = []
        writer = self.run.pool.tile_writer
        for name in _HOOKS:
            setattr(writer, name, self._noted(name, getattr(writer, name)))
        one_batch._maybe_prepare_mlp_sync_batch = self._pad

    def _noted(self, name: str, hook: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> None:
            self.hooks.append(name)
            hook(*arguments, **keywords)

        return call

    def _pad(self, batch: Any, _runner: Any) -> None:
        """In the place of the exchange of token counts between ranks."""
        if self.padded_to:
            batch.global_num_tokens = batch.global_num_tokens_for_logprob = [self.padded_to]
            batch.is_extend_in_batch = True
            batch.can_run_decode_cuda_graph = False

    def tiles(self, batch: Any) -> dict[int, dict[str, torch.Tensor]]:
        plan = batch.swa_capture_plan
        return {
            capture.boundary: self.pool.tile(int(tile))
            for capture, tile in zip(plan.captures, plan.tile_ids, strict=True)
        }

    def steps(self, extend_to: int, decode_to: int) -> tuple[dict[int, Any], list[str]]:
        """Prefill to 511 and decode to 512, padded to so many rows (0: not); tiles, decode's hooks."""
        self.run.clear()
        sequence = self.run.sequence(TOKENS)
        self.padded_to = extend_to
        self.run.extend((sequence, 511))
        found = self.tiles(sequence.batch)
        self.padded_to, self.hooks = decode_to, []
        self.run.decode(sequence)
        return found | self.tiles(sequence.batch), self.hooks

    def idle(self) -> list[str]:
        """A step of a rank without requests, padded to eight rows; the hooks that wrote tiles."""
        self.run.clear()
        before = {name: buffer.clone() for name, buffer in self.pool.buffers.items()}
        batch = self.run.sequence(TOKENS)
        self.padded_to = 0
        self.run.extend((batch, 10))
        idle = batch.batch
        idle.prepare_for_idle()
        self.padded_to, self.hooks = 8, []
        self._pad(idle, None)
        forward = ForwardBatch.init_new(idle, self.run.runner, return_hidden_states_before_norm=False)
        with torch.no_grad():
            self.run.runner.forward(forward)
        assert all(torch.equal(self.pool.buffers[name], rows) for name, rows in before.items())
        return self.hooks


def main() -> None:
    steps = PaddedSteps()
    # Pinned memory needs an accelerator.
    real = torch.tensor
    with (
        unittest.mock.patch.object(forward_batch_info.torch, "tensor", lambda *a, pin_memory=False, **k: real(*a, **k)),
        unittest.mock.patch.object(DpPaddingMode, "get_dp_padding_mode", return_value=DpPaddingMode.MAX_LEN),
    ):
        plain, hooks = steps.steps(0, 0)
        result: dict[str, Any] = {"boundaries": sorted(plain), "plain_decode_hooks": sorted(set(hooks))}
        for name, (extend_to, decode_to) in {"extend": (640, 0), "decode": (0, 8), "both": (640, 8)}.items():
            found, hooks = steps.steps(extend_to, decode_to)
            result[name] = {
                "equal": all(torch.equal(found[b][s], plain[b][s]) for b in plain for s in plain[b]),
                "decode_hooks": sorted(set(hooks)),
            }
        result["idle_hooks"] = steps.idle()
    print(json.dumps(result), file=sys.__stdout__)


if __name__ == "__main__":
    main()
