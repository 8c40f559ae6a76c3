"""A running SGLang server, over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import requests

from sglang_bitexact.errors import BitexactError
from sglang_bitexact.verify.answer import TOP_LOGPROBS, Answer, parse

_TIMEOUT_S = 600.0


class Facts(NamedTuple):
    """What the server says of itself.

    vocab: token ids are below it; None if it cannot be found out. device_tokens: what the
    device tier holds; longest: prompt that is taken; slots: requests that run at a time; None
    where it is not said.
    """

    version: str
    page_size: int
    device_tokens: int | None
    longest: int | None
    slots: int | None
    vocab: int | None
    deterministic: bool


class Sampling(NamedTuple):
    """seed: None for greedy decoding, else temperature 1 with this sampling seed."""

    new_tokens: int
    seed: int | None = None

    def parameters(self) -> dict[str, Any]:
        chosen = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "sampling_seed": self.seed}
        return {**chosen, "max_new_tokens": self.new_tokens, "ignore_eos": True}


class Client:
    """Requests to the server at ``url``; may be used by several threads at once."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._local = threading.local()

    def generate(self, prompt: Sequence[int], namespace: str, sampling: Sampling) -> Answer:
        """Answer ``prompt``. Requests of different ``namespace`` never share a prefix.

        Raises:
            BitexactError: the server cannot be reached, refused, or answered in another form.
        """
        body = self._body(prompt, namespace, sampling)
        answer = self._call("POST", "/generate", json=body).json()
        try:
            return parse(answer)
        except (KeyError, TypeError) as error:
            raise BitexactError(f"{self._url}/generate answered in an unknown form: {error!r}") from error

    def generate_timed(self, prompt: Sequence[int], namespace: str, sampling: Sampling) -> tuple[Answer, float]:
        """As ``generate``, streamed; also the seconds until the first piece of the answer was here."""
        body = {**self._body(prompt, namespace, sampling), "stream": True}
        begin, first, last = time.monotonic(), None, b"{}"
        with self._call("POST", "/generate", json=body, stream=True) as answer:
            try:
                for line in answer.iter_lines():
                    if line.startswith(b"data: {"):
                        first = first or time.monotonic() - begin
                        # Each piece holds the whole answer so far.
                        last = line.removeprefix(b"data: ")
            except requests.RequestException as error:
                raise BitexactError(f"{self._url} hung up: {error}") from error
        try:
            return parse(json.loads(last)), first or 0.0
        except (KeyError, TypeError, ValueError) as error:
            raise BitexactError(f"{self._url}/generate answered in an unknown form: {error!r}") from error

    def abandon(self, prompt: Sequence[int], namespace: str, sampling: Sampling, *, after_first: bool) -> None:
        """Ask and hang up: behind the first piece of the answer, or before it."""
        body = {**self._body(prompt, namespace, sampling), "stream": True}
        with self._call("POST", "/generate", json=body, stream=True) as answer:
            if after_first:
                try:
                    next(answer.iter_content(chunk_size=64), None)
                except requests.RequestException as error:
                    raise BitexactError(f"{self._url} hung up first: {error}") from error

    def _body(self, prompt: Sequence[int], namespace: str, sampling: Sampling) -> dict[str, Any]:
        return {
            "input_ids": list(prompt),
            "extra_key": namespace,
            "sampling_params": sampling.parameters(),
            "return_logprob": True,
            "top_logprobs_num": TOP_LOGPROBS,
        }

    def flush(self) -> None:
        """Empty the device and the host tier, once nothing runs; storage keeps its files."""
        self._call("POST", "/flush_cache?timeout=60")

    def server_info(self) -> dict[str, Any]:
        """Resolved arguments, and the schedulers' state."""
        return self._object("/server_info")

    def model_info(self) -> dict[str, Any]:
        return self._object("/model_info")

    def _object(self, path: str) -> dict[str, Any]:
        """Raises BitexactError if the answer is no JSON object."""
        answer = self._call("GET", path)
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise BitexactError(f"{self._url}{path} answered {answer.text[:100]!r}: this is no SGLang server.")
        return content

    def facts(self) -> Facts:
        """Raises BitexactError if there is no SGLang with DeepSeek-V4 behind the address."""
        model = self.model_info()
        if model.get("model_type") != "deepseek_v4":
            raise BitexactError(f"{self._url} serves model type {model.get('model_type')!r}; expected 'deepseek_v4'.")
        server = self.server_info()
        return Facts(
            version=str(server.get("version")),
            page_size=int(server.get("page_size") or 256),
            device_tokens=server.get("max_total_num_tokens"),
            longest=server.get("max_req_input_len"),
            slots=server.get("effective_max_running_requests_per_dp") or server.get("max_running_requests"),
            vocab=_vocab(Path(str(model.get("model_path")))),
            deterministic=bool(server.get("enable_deterministic_inference")),
        )

    def _call(self, method: str, path: str, **arguments: Any) -> requests.Response:
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        url = self._url + path
        try:
            response: requests.Response = self._local.session.request(
                method, url, timeout=self._timeout_s, headers=self._headers, **arguments
            )
        except (requests.RequestException, ValueError) as error:
            raise BitexactError(f"{url} cannot be reached: {error}. Is the server up, and --url right?") from error
        if response.status_code != 200:
            raise BitexactError(f"{url} answered {response.status_code}: {response.text[:500]}")
        return response


def _vocab(model: Path) -> int | None:
    """From the model's ``config.json``, where its folder is on this machine too."""
    try:
        return int(json.loads((model / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError):
        return None
