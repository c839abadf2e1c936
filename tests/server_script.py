"""The web application over a scheduler that plays given events, for tests."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from http_server import EOS, NAME, POSITIONS, chat_tokenizer, encode
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tiny_tokenizer import VOCAB_SIZE
from transformers import GenerationConfig

from longspec.inference.arguments import check_request
from longspec.inference.engine.requests import Event, Finished, FinishReason, OnEvent, Request, Snapshot, Ticket, Tokens
from longspec.inference.server.app import build_app
from longspec.inference.server.limits import Limits
from longspec.inference.server.served_model import ServedModel

TOKENIZER = chat_tokenizer()
LIMITS = Limits(max_choices=4, max_body_bytes=100_000)
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def said(text: str, **fields: Any) -> Tokens:
    return Tokens(ids(text), ["target"] * len(ids(text)), **fields)


@dataclass
class Script:
    """A scheduler that answers each request with the same events, from another thread."""

    events: list[Event] = field(default_factory=lambda: [said("hello"), Finished("stop")])
    refusal: Exception | None = None
    room: int = 100
    """Requests that are taken before the refusal."""
    healthy: bool = True
    submitted: list[Request] = field(default_factory=list)
    cancelled: list[Request] = field(default_factory=list)
    reasons: list[FinishReason] = field(default_factory=list)
    """Those of `cancelled`."""
    cached: list[int] = field(default_factory=lambda: [0])
    """Cached tokens of the requests' prompts, in turn."""
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def submit(self, request: Request, on_event: OnEvent) -> Ticket:
        check_request(request, VOCAB_SIZE, POSITIONS)
        if self.refusal is not None and len(self.submitted) >= self.room:
            raise self.refusal
        self.submitted.append(request)
        self.thread.submit(lambda: [on_event(event) for event in self.events])
        cached = self.cached[(len(self.submitted) - 1) % len(self.cached)]
        return Ticket(request, on_event, perf_counter(), cached_prompt_tokens=cached)

    def cancel(self, ticket: Ticket, reason: FinishReason = "cancelled") -> None:
        self.cancelled.append(ticket.request)
        self.reasons.append(reason)

    def snapshot(self) -> Snapshot:
        fields = {"requests": 7, "finished": {"stop": 5}, "row_rounds": 4, "decoded_tokens": 10}
        error = "" if self.healthy else "out of memory"
        rows = {"max_rows": 16, "capacity": POSITIONS, "queued": 2, "running": 3}
        return Snapshot(healthy=self.healthy, error=error, **rows, **fields)


def application(
    script: Script, limits: Limits = LIMITS, config: GenerationConfig | None = None, **options: Any
) -> Starlette:
    def own(prompts: list[Any], variables: Any = None) -> list[list[int]]:
        return encode(prompts, variables, TOKENIZER)  # which tests replace

    config = config or GenerationConfig()
    served = ServedModel(NAME, "tree", TOKENIZER, own, frozenset({EOS}), POSITIONS, VOCAB_SIZE, config)
    return build_app(served, script, limits, **options)


def chat(client: TestClient, code: int = 200, path: str = "chat/completions", **body: Any) -> Any:
    response = client.post(f"/v1/{path}", json=body)
    assert response.status_code == code, response.text
    return response.json()


def events(client: TestClient, path: str = "chat/completions", **body: Any) -> list[Any]:
    """The server-sent events of a stream, without [DONE]."""
    response = client.post(f"/v1/{path}", json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


async def talk(app: Starlette, body: Any, receive: Any, send: Any) -> None:
    """Send a chat request without a server; receive: the messages after the body's, send: takes the answer's. body:
    None for a body of which no end arrives."""
    content = b"{" if body is None else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": content, "more_body": body is None}]

    async def receive_body_first() -> Any:
        return messages.pop() if messages else await receive()

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("localhost", 80)}
    await asyncio.wait_for(app(scope, receive_body_first, send), 10)
