"""An HTTP server that answers like SGLang, with a cache in three tiers and faults to choose."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE = 256


class FakeSglang:
    """The state behind the server.

    fault: told tier and reused tokens of an answer, says by how much its last logprob is wrong.
    """

    def __init__(self, device_tokens: int = 4096) -> None:
        self.fault: Callable[[str | None, int], float] = lambda tier, reused: 0.0
        self.tiers = ("device", "host", "storage")
        self.namespaces = True
        self.deterministic = True
        self.follows_sampling_seed = False
        self.model_type = "deepseek_v4"
        self.requests: list[dict[str, Any]] = []
        self.flushes = 0
        self._pages: dict[str, OrderedDict[tuple[str, bytes], None]] = {tier: OrderedDict() for tier in self.tiers}
        self._device_pages = device_tokens // PAGE
        self._lock = threading.Lock()
        self.device_tokens = device_tokens
        self.longest: int | None = None

    def flush(self) -> None:
        self.flushes += 1
        self._pages["device"].clear()
        self._pages["host"].clear()

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.requests.append(body)
            prompt: list[int] = body["input_ids"]
            namespace = body["extra_key"] if self.namespaces else ""
            found = self._match(namespace, prompt)
            parameters = body["sampling_params"]
            marks = [str(prompt), str(parameters["temperature"])]
            if (parameters["temperature"] and not self.follows_sampling_seed) or not self.deterministic:
                marks.append(str(len(self.requests)))
            answer = [_draw(*marks, str(i)) for i in range(parameters["max_new_tokens"])]
            tokens = [token for token, _ in answer]
            self._insert(namespace, [*prompt, *tokens[:-1]])
        logprobs = [logprob for _, logprob in answer]
        tier = next((tier for tier in self.tiers if found[tier]), None)
        logprobs[-1] += self.fault(tier, sum(found.values()))
        top = [[(x - i, (t + i) % 512, None) for i in range(20)] for t, x in zip(tokens, logprobs, strict=True)]
        meta = {
            "cached_tokens": sum(found.values()),
            "cached_tokens_details": found if any(found.values()) else None,
            "output_token_logprobs": [(x, t, None) for t, x in zip(tokens, logprobs, strict=True)],
            "output_top_logprobs": top,
            "num_retractions": 0,
        }
        return {"output_ids": tokens, "meta_info": meta}

    def _match(self, namespace: str, prompt: Sequence[int]) -> dict[str, int]:
        """Reused tokens per tier: each page from the first tier that has it."""
        found = dict.fromkeys(self.tiers, 0)
        for name in _pages(namespace, prompt[: len(prompt) - 1]):
            tier = next((tier for tier in self.tiers if name in self._pages[tier]), None)
            if tier is None:
                break
            found[tier] += PAGE
        return found

    def _insert(self, namespace: str, tokens: Sequence[int]) -> None:
        for name in _pages(namespace, tokens):
            for pages in self._pages.values():
                pages[name] = None
                pages.move_to_end(name)
        while len(self._pages["device"]) > self._device_pages:
            self._pages["device"].popitem(last=False)

    def server_info(self) -> dict[str, Any]:
        return {
            "version": "0.5.23",
            "page_size": PAGE,
            "max_total_num_tokens": self.device_tokens,
            "max_running_requests": 4,
            "max_req_input_len": self.longest,
            "enable_deterministic_inference": self.follows_sampling_seed,
        }

    def model_info(self) -> dict[str, Any]:
        return {"model_type": self.model_type, "model_path": "/nowhere"}


def _pages(namespace: str, tokens: Sequence[int]) -> Iterator[tuple[str, bytes]]:
    digest = hashlib.sha256()
    for end in range(PAGE, len(tokens) + 1, PAGE):
        digest.update(repr(list(tokens[end - PAGE : end])).encode())
        yield namespace, digest.digest()


def _draw(*marks: str) -> tuple[int, float]:
    """A token and its logprob, the same for the same marks."""
    digest = hashlib.sha256("|".join(marks).encode()).digest()
    return 16 + digest[0], -digest[1] / 64


@contextmanager
def serving(fake: FakeSglang) -> Iterator[str]:
    """The address of ``fake``, on a thread of this process."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body in one packet: two wait for each other.
        wbufsize = -1
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            if self.path == "/model_info":
                self._answer(fake.model_info())
            else:
                self._answer(fake.server_info())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path.startswith("/flush_cache"):
                fake.flush()
                self._answer({})
            else:
                content = json.loads(body)
                answer = fake.generate(content)
                if content.get("stream"):
                    self._stream(answer)
                else:
                    self._answer(answer)

        def _stream(self, answer: dict[str, Any]) -> None:
            """Two pieces, each with the whole answer so far."""
            first = {**answer, "output_ids": answer["output_ids"][:1]}
            pieces = [f"data: {json.dumps(piece)}\n\n" for piece in (first, answer)]
            data = "".join([*pieces, "data: [DONE]\n\n"]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _answer(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
