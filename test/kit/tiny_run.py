"""The real model on the real backend, in this process, driven batch by batch.

SGLang's own ModelRunner, ScheduleBatch and pools, as its one-batch benchmark builds
them; no scheduler, no tree. One instance per process: SGLang's globals are set once.
"""

from __future__ import annotations

import functools
import os
from array import array
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")

import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.benchmark import one_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from kit.checkpoint import shared_checkpoint
from kit.stored_rows import stored_rows

PAGE_SIZE = 256


@dataclass
class Sequence:
    """One request: its tokens, how many are in the pools, and SGLang's Req."""

    req: Any
    tokens: list[int]
    done: int = 0
    batch: Any = None

    @property
    def slot(self) -> int:
        return int(self.req.kv.req_pool_idx)


@dataclass
class TinyRun:
    """A loaded tiny model and its empty pools."""

    runner: Any
    _count: int = field(default=0)

    @property
    def pool(self) -> Any:
        return self.runner.token_to_kv_pool

    def clear(self) -> None:
        """Free every slot and row; their bytes stay, as on a server."""
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()

    def sequence(self, tokens: list[int]) -> Sequence:
        self._count += 1
        req = Req(
            rid=str(self._count),
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1 << 20, ignore_eos=True),
        )
        req.full_untruncated_fill_ids = req.origin_input_ids
        req.logprob_start_len = -1
        return Sequence(req, list(tokens))

    def extend(self, *parts: tuple[Sequence, int]) -> torch.Tensor:
        """One prefill batch: each sequence up to its given length. Logits, fp32 [B, vocab]."""
        reqs = []
        for sequence, end in parts:
            sequence.req.prefix_len = sequence.done
            sequence.req.extend_end = end
            sequence.done = end
            reqs.append(sequence.req)
        _, logits, batch = one_batch.extend(reqs, self.runner)
        for sequence, _ in parts:
            sequence.batch = batch
        return logits.float().clone()

    def decode(self, *sequences: Sequence) -> torch.Tensor:
        """One decode step of the sequences that shared the last batch, each with its next token."""
        batch = sequences[0].batch
        following = torch.tensor([s.tokens[s.done] for s in sequences])
        _, logits = one_batch.decode(following, batch, self.runner)
        for sequence in sequences:
            sequence.done += 1
        return logits.float().clone()

    # What a token leaves behind -------------------------------------------------

    def ring_rows(self, sequence: Sequence, positions: range) -> list[torch.Tensor]:
        """Window rows of ``positions``, one [len, 512] bf16 tensor per layer."""
        pool = self.pool
        ring = pool.unified_swa_ring_size
        rows = torch.tensor([sequence.slot * ring + p % ring for p in positions])
        return [buffer[rows] for buffer in pool.unified_kv_pool.kv_buffer]

    def state_rows(self, sequence: Sequence, positions: range, ratio: int = 4) -> dict[str, torch.Tensor]:
        """State rows of ``positions`` of the compressors and indexers of ``ratio``, by "kind.layer"."""
        out = {}
        compressors, indexers = self.pool.compress_state_pools, self.pool.indexer_compress_state_pools
        for kind, pools in ((f"c{ratio}", compressors), ("index", indexers)):
            for layer, pool in enumerate(pools):
                if pool is None or pool.ratio != ratio:
                    continue
                rows = [sequence.slot * pool.ring_size + p % pool.ring_size for p in positions]
                out[f"{kind}.{layer}"] = pool.kv_score_buffer.kv_score[rows]
        return out

    def compressed_rows(self, sequence: Sequence, length: int) -> dict[str, torch.Tensor]:
        """Compressed rows and index keys of the first ``length`` tokens, by "kind.layer"."""
        loc = self.runner.req_to_token_pool.req_to_token[sequence.slot, :length].long()
        return stored_rows(self.pool, loc)


@functools.cache
def tiny_run(**arguments: Any) -> TinyRun:
    """The process's TinyRun, loaded on first use; ``arguments`` are SGLang's."""
    args = ServerArgs(
        model_path=str(shared_checkpoint()),
        device="cpu",
        page_size=PAGE_SIZE,
        max_total_tokens=32_768,
        max_running_requests=16,
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        **arguments,
    )
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    runner, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    return TinyRun(runner.torch_runner)
