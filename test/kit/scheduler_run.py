"""The real scheduler on the real model, in this process, fed by a script.

SGLang's own event loop runs; only its socket is replaced: where it would poll for requests, the
script is asked. One instance per process, since SGLang's globals are set once.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from kit.checkpoint import shared_checkpoint

# What the script says at an iteration: requests and aborts to hand in, or None to stop the loop.
Script = Callable[[int], list[Any] | None]


def request(rid: str, tokens: list[int], max_new_tokens: int, *, stop: int | None = None) -> TokenizedGenerateReqInput:
    """A greedy request that generates exactly ``max_new_tokens``, or ends with the token ``stop``."""
    sampling = SamplingParams(
        temperature=0,
        max_new_tokens=max_new_tokens,
        ignore_eos=stop is None,
        stop_token_ids=None if stop is None else [stop],
    )
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text="",
        input_ids=array("q", tokens),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )


def abort(rid: str) -> AbortReq:
    return AbortReq(rid=rid)


class SchedulerRun:
    """A scheduler that is up and idle."""

    def __init__(self, **arguments: Any) -> None:
        args = ServerArgs(model_path=str(shared_checkpoint()), device="cpu", skip_tokenizer_init=True, **arguments)
        args.resolve_once()
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        self.scheduler = Scheduler(args, PortArgs.init_new(args))
        self.outputs: list[Any] = []
        for sender in (self.scheduler.output_streamer, self.scheduler.ipc_channels):
            for name in ("send_to_detokenizer", "send_to_tokenizer"):
                if hasattr(sender, name):
                    object.__setattr__(sender, name, self)

    def send_output(self, output: Any, _request: Any = None) -> None:
        """Takes the place of the sockets."""
        self.outputs.append(output)

    def aborted(self) -> list[str]:
        """Ids of the requests that ended as aborted, whether they had begun or waited."""
        begun = {
            rid
            for output in self.outputs
            for rid, reason in zip(getattr(output, "rids", ()), getattr(output, "finished_reasons", ()), strict=False)
            if reason and reason["type"] == "abort"
        }
        return sorted(begun | {output.rid for output in self.outputs if isinstance(output, AbortReq)})

    def run(self, script: Script) -> None:
        """SGLang's event loop until ``script`` returns None."""
        scheduler = self.scheduler
        iteration = 0

        def receive(local_reqs: list[Any] | None = None) -> list[Any]:
            nonlocal iteration
            inputs = script(iteration)
            iteration += 1
            if inputs is None:
                scheduler.gracefully_exit = True
                return []
            return inputs

        scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
        scheduler.gracefully_exit = False
        scheduler.run_event_loop()

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs, no result is outstanding."""
        scheduler = self.scheduler
        return (
            not scheduler.waiting_queue
            and scheduler.running_batch.is_empty()
            and scheduler.chunked_req is None
            and not scheduler.last_batch
            and not getattr(scheduler, "result_queue", ())
        )

    def run_all(self, inputs: list[Any], limit: int = 5_000) -> None:
        """Hand everything in at once and run until idle; AssertionError after ``limit`` steps."""

        def script(iteration: int) -> list[Any] | None:
            assert iteration < limit, f"not idle after {limit} iterations"
            if iteration == 0:
                return inputs
            return None if self.idle else []

        self.run(script)
