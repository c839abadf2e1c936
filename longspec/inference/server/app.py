"""The server's web application: OpenAI's API, health, metrics and the page."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from longspec.inference.engine.scheduler import Scheduler
from longspec.inference.server.access import AccessCheck
from longspec.inference.server.errors import SERVER_STOPPED, ApiError
from longspec.inference.server.job import Delta, Job
from longspec.inference.server.limits import Limits, read_body
from longspec.inference.server.metrics import Metrics
from longspec.inference.server.openai_api import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from longspec.inference.server.page import load_page
from longspec.inference.server.replies import DONE, ChatReplies, Replies, server_sent_event
from longspec.inference.server.served_model import ServedModel

T = TypeVar("T")

ROUTES = "use POST /v1/chat/completions or /v1/completions, or GET /v1/models"
"""Advice for every other path, those of OpenAI's other APIs among them."""
CLIENT_GONE = 499
"""Status of a response that nobody reads any more."""
LONGEST_WARNING = 500
"""Most characters of the names of ignored fields in a response."""
LAST_EVENTS_S = 1.0
"""Time in which the client must read the events that end a stream at its deadline, or at the server's end."""


@dataclass(frozen=True)
class Service:
    """The endpoints and what they read. Each method that takes a request raises ApiError."""

    model: ServedModel
    scheduler: Scheduler
    limits: Limits
    metrics: Metrics
    encoder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "encoder"))
    """One thread for the tokenizer, because long texts would hold up the event loop."""

    async def chat(self, http: Request) -> Response:
        return await self._answer(http, ChatRequest, ChatReplies)

    async def complete(self, http: Request) -> Response:
        return await self._answer(http, CompletionRequest, Replies)

    async def _answer(
        self, http: Request, kind: type[ChatRequest] | type[CompletionRequest], replies_kind: type[Replies]
    ) -> Response:
        """Submit what a body asks for, and answer whole or as a stream."""
        body = await read_body(http, kind, self.limits)
        # Time in the tokenizer and in the queue counts, too.
        deadline = asyncio.get_running_loop().time() + self.limits.max_seconds
        requests = await self._encoded(self.model.requests, body, self.limits)
        job = Job(self.scheduler, requests, body, self.model.tokenizer, deadline, self.metrics)
        replies = replies_kind(self.model.name, job)
        # A request that is refused must get its status, so all choices are queued before a stream begins.
        job.submit()
        response = EventStream(replies) if body.stream else await _whole(http, replies)
        if body.model_extra:
            # The names are the client's text: in a header they must be short, printable and without quotes.
            names = re.sub(r"[^\w.\- ,]", "?", ", ".join(body.model_extra), flags=re.ASCII)[:LONGEST_WARNING]
            response.headers["Warning"] = f'299 longspec "ignored fields: {names}"'
        return response

    async def _encoded(self, encode: Callable[..., T], *arguments: Any) -> T:
        """The result of a function that runs the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self.encoder, encode, *arguments)

    async def models(self, http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description]})

    async def one_model(self, http: Request) -> Response:
        if (name := http.path_params["name"]) != self.model.name:
            raise ApiError(404, f"the model '{name}' is not served here, only '{self.model.name}'", "model")
        return JSONResponse(self._description)

    @property
    def _description(self) -> dict[str, Any]:
        own = {"method": self.model.method, "positions": self.model.positions}
        return {"id": self.model.name, "object": "model", "created": 0, "owned_by": "longspec", "longspec": own}

    async def tokenize(self, http: Request) -> Response:
        body = await read_body(http, TokenizeRequest, self.limits)

        def encode() -> list[int]:
            if body.add_special_tokens:
                return self.model.encode([body.prompt])[0]
            return self.model.tokenizer(body.prompt, add_special_tokens=False)["input_ids"]

        tokens = await self._encoded(encode)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self.model.positions})

    async def detokenize(self, http: Request) -> Response:
        body = await read_body(http, DetokenizeRequest, self.limits)
        for token in body.tokens:
            if not 0 <= token < self.model.vocab_size:
                raise ApiError(400, f"tokens: token {token}; the vocabulary has {self.model.vocab_size}", "tokens")
        return JSONResponse({"prompt": await self._encoded(self.model.tokenizer.decode, body.tokens)})

    async def tokenizer_info(self, http: Request) -> Response:
        tokenizer = self.model.tokenizer
        names = ("bos_token", "eos_token", "pad_token", "chat_template")
        fields = {name: getattr(tokenizer, name) for name in names}
        return JSONResponse({"tokenizer_class": type(tokenizer).__name__, **fields})

    async def figures(self, http: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def health(self, http: Request) -> Response:
        now = self.scheduler.snapshot()
        if now.healthy:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "error": now.error}, 503)


class EventStream(StreamingResponse):
    """A job's deltas as server-sent events. However it ends, the job gives its rows back."""

    def __init__(self, replies: Replies) -> None:
        self.replies, self.job = replies, replies.job
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(TimeoutError):  # of a client that does not read; uvicorn closes its connection
                async with asyncio.timeout_at(self.job.deadline + LAST_EVENTS_S):
                    await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # the server ends, and does not wait for clients that do not read
            last = (server_sent_event(ApiError(503, SERVER_STOPPED).body) + DONE).encode()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_EVENTS_S):
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self.job.cancel()

    async def _events(self) -> AsyncIterator[str]:
        for body in self.replies.opening():
            yield server_sent_event(body)
        try:
            async for delta in self.job.deltas():
                if chunk := self.replies.chunk(delta):
                    yield server_sent_event(chunk)
        except ApiError as error:
            # The status line is sent already; clients of OpenAI's API read an error from the stream as well.
            yield server_sent_event(error.body)
        else:
            for body in self.replies.closing():
                yield server_sent_event(body)
        yield DONE


async def _whole(http: Request, replies: Replies) -> Response:
    """The answer in one piece; its rows are given back as soon as the client disconnects. Raises ApiError."""

    async def collect() -> list[Delta]:
        return [delta async for delta in replies.job.deltas()]

    async def disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    # Unlike a stream, a whole answer sends nothing while it is made, so a lost connection has to be waited for.
    answer = asyncio.create_task(collect())
    gone = asyncio.create_task(disconnect())
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(replies.whole(answer.result())) if answer.done() else Response(status_code=CLIENT_GONE)
    finally:
        answer.cancel()
        gone.cancel()
        replies.job.cancel()


def build_app(
    model: ServedModel, scheduler: Scheduler, limits: Limits, api_key: str | None = None, hosts: Sequence[str] = ("*",)
) -> Starlette:
    """The application. It neither starts nor closes the scheduler. api_key: the bearer token that clients must send;
    None allows requests without one. hosts: accepted values of the Host header. A list of the server's own names
    prevents DNS rebinding."""
    service = Service(model, scheduler, limits, Metrics(scheduler.snapshot))
    page, headers = load_page()

    async def show_page(http: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    routes = [
        Route("/", show_page),
        Route("/health", service.health),
        Route("/metrics", service.figures),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.one_model),
        Route("/tokenizer_info", service.tokenizer_info),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.complete, methods=["POST"]),
        Route("/tokenize", service.tokenize, methods=["POST"]),
        Route("/detokenize", service.detokenize, methods=["POST"]),
    ]
    check = Middleware(AccessCheck, api_key=api_key, hosts=hosts)
    handlers = {HTTPException: _refused, Exception: _refused}
    return Starlette(routes=routes, middleware=[check], exception_handlers=handlers)


async def _refused(http: Request, error: Exception) -> Response:
    """The response to an exception."""
    if isinstance(error, ApiError):
        return error.response
    if not isinstance(error, HTTPException):
        return ApiError(500, "the server failed on this request; its log has the cause").response
    response = ApiError(error.status_code, f"no route for {http.method} {http.url.path}; {ROUTES}").response
    response.headers.update(error.headers or {})  # Allow, with status 405
    return response
