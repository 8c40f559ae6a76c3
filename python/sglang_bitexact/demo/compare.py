"""Single requests to a server of this machine."""

from __future__ import annotations

from sglang_bitexact.demo.server import Server
from sglang_bitexact.verify.answer import Answer as Run
from sglang_bitexact.verify.cases import stream
from sglang_bitexact.verify.client import Client, Sampling

__all__ = ["Run", "prompt_of", "run"]

# Of the tiny checkpoint.
_VOCAB = 512


def run(server: Server, prompt: list[int], *, new_tokens: int, namespace: str) -> Run:
    """One greedy request. Requests of different ``namespace`` never share a prefix."""
    return Client(server.url).generate(prompt, namespace, Sampling(new_tokens))


def prompt_of(seed: int, length: int) -> list[int]:
    """``length`` random token ids of the tiny vocabulary, the same for the same seed."""
    return stream(seed, length, _VOCAB)
