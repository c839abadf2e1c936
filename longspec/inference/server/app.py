"""The server's web application: OpenAI's API, health, metrics and the page."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longspec.inference.engine.scheduler import Scheduler
from longspec.inference.server.access import AccessCheck
from longspec.inference.server.errors import ApiError, error_response, validation_error
from longspec.inference.server.job import Delta, Job
from longspec.inference.server.limits import BodyLimit, Limits
from longspec.inference.server.metrics import Metrics
from longspec.inference.server.openai_api import NAME_CHARACTERS, ChatRequest, CompletionRequest
from longspec.inference.server.page import load_page
from longspec.inference.server.replies import DONE, ChatReplies, Replies, server_sent_event
from longspec.inference.server.served_model import ServedModel
from longspec.inference.server.tokenizer_api import add_tokenizer_routes

ROUTES = "use POST /v1/chat/completions or /v1/completions, or GET /v1/models"
"""Advice for every other path, those of OpenAI's other APIs among them."""
CLIENT_GONE = 499
"""Status of a response that nobody reads any more, for the metrics."""
MOST_NAMES = 20
"""Most ignored fields that a response names."""
READS = ["GET", "HEAD"]
LAST_EVENTS_S = 1.0
"""Time after a stream's deadline in which the client must read the events that end it."""


@dataclass(frozen=True)
class Service:
    """State that the routes read."""

    model: ServedModel
    scheduler: Scheduler
    limits: Limits
    metrics: Metrics
    encoder: ThreadPoolExecutor
    """One thread, because long prompts would hold up the event loop."""

    async def answer(self, http: Request, body: ChatRequest | CompletionRequest) -> Response:
        """Submit what a body asks for, and answer whole or as a stream. Raises ApiError."""
        loop, tokenizer, latencies = asyncio.get_running_loop(), self.model.tokenizer, self.metrics.latencies
        deadline = loop.time() + self.limits.max_seconds  # time in the tokenizer and in the queue counts, too
        requests = await loop.run_in_executor(self.encoder, self.model.requests, body, self.limits)
        stops = [stop for stop in body.stop if stop]
        job = Job(self.scheduler, requests, tokenizer, stops, deadline, latencies, body.echoed, body.drops_answer)
        make = ChatReplies if isinstance(body, ChatRequest) else Replies
        usage = body.stream_options is not None and body.stream_options.include_usage
        replies = make(self.model.name, tokenizer, body.alternatives, body.longspec.tokens and body.stream, usage)
        # A request that is refused must get its status, so all choices are queued before a stream begins.
        job.submit()
        response = EventStream(job, replies) if body.stream else await _whole(http, job, replies)
        if names := header_text(self.model.ignored(body)):
            response.headers["Warning"] = f'299 longspec "ignored fields: {names}"'
        return response

    def describe(self) -> dict[str, Any]:
        """The entry of /v1/models."""
        own = {"method": self.model.method, "positions": self.model.positions}
        return {"id": self.model.name, "object": "model", "created": 0, "owned_by": "longspec", "longspec": own}


def header_text(fields: Iterable[str]) -> str:
    """Names of fields, each once, as text for a header."""
    # They are the client's text: in a header they must be short, printable and without quotes.
    names = dict.fromkeys(re.sub(r"[^\w.-]", "?", name[:NAME_CHARACTERS], flags=re.ASCII) for name in fields)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(list(names)[:MOST_NAMES]) + more


class EventStream(StreamingResponse):
    """A job's deltas as server-sent events. However it ends, the job gives its rows back."""

    def __init__(self, job: Job, replies: Replies) -> None:
        self.job, self.replies = job, replies
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self.job.deadline + LAST_EVENTS_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:  # the client does not read; uvicorn closes the connection of an incomplete response
            pass
        finally:
            self.job.cancel()

    async def _events(self) -> AsyncIterator[str]:
        for body in self.replies.opening(len(self.job.choices)):
            yield server_sent_event(body)
        try:
            async for delta in self.job.deltas():
                if chunk := self.replies.chunk(delta):
                    yield server_sent_event(chunk)
        except ApiError as error:
            # The status line is sent already; clients of OpenAI's API read an error from the stream as well.
            yield server_sent_event(error.body)
        else:
            for body in self.replies.closing(self.job):
                yield server_sent_event(body)
        yield DONE


async def _whole(http: Request, job: Job, replies: Replies) -> Response:
    """The answer in one piece; its rows are given back as soon as the client disconnects. Raises ApiError."""

    async def collect() -> list[Delta]:
        return [delta async for delta in job.deltas()]

    async def disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    # Unlike a stream, a whole answer sends nothing while it is made, so a lost connection has to be waited for.
    answer = asyncio.create_task(collect())
    gone = asyncio.create_task(disconnect())
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=CLIENT_GONE)  # for the metrics; nobody receives it
        return JSONResponse(replies.whole(job, answer.result()))
    finally:
        answer.cancel()
        gone.cancel()
        job.cancel()


class CountedResponses:
    """ASGI middleware that counts responses by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        has_started = False

        async def counted(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._count(scope, message["status"])
            await send(message)

        try:
            await self.app(scope, receive, counted)
        except Exception:
            # Starlette's outermost middleware answers it with status 500, out of this one's sight.
            if not has_started:
                self._count(scope, 500)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.responses.labels(route, status).inc()


def build_app(
    model: ServedModel, scheduler: Scheduler, limits: Limits, api_key: str | None = None, hosts: Sequence[str] = ("*",)
) -> FastAPI:
    """The application. It neither starts nor closes the scheduler. api_key: the bearer token that clients must send;
    None allows requests without one. hosts: accepted values of the Host header. A list of the server's own names
    prevents DNS rebinding."""
    service = Service(model, scheduler, limits, Metrics(scheduler.snapshot), ThreadPoolExecutor(1, "encoder"))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.encoder.shutdown(cancel_futures=True)

    app = FastAPI(title="LongSpec", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    # The middleware that is added last runs first: responses of all others are counted, and a wrong host or key is
    # refused before the body is read.
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(AccessCheck, api_key=api_key, hosts=hosts)
    app.add_middleware(CountedResponses, metrics=service.metrics)
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _refused)
    _add_routes(app, service)
    add_tokenizer_routes(app, model, service.encoder)
    page, headers = load_page()

    @app.api_route("/", methods=READS)
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request, body: ChatRequest) -> Response:
        return await service.answer(http, body)

    @app.post("/v1/completions")
    async def completions(http: Request, body: CompletionRequest) -> Response:
        return await service.answer(http, body)

    @app.api_route("/v1/models", methods=READS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.describe()]}

    @app.api_route("/v1/models/{name:path}", methods=READS)
    async def one_model(name: str) -> dict[str, Any]:
        if name != service.model.name:
            raise ApiError(404, f"the model '{name}' is not served here, only '{service.model.name}'", "model")
        return service.describe()

    @app.api_route("/metrics", methods=READS)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/health", methods=READS)
    async def health() -> JSONResponse:
        now = service.scheduler.snapshot()
        if now.healthy:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "error": now.error}, 503)


async def _refused(http: Request, error: Exception) -> Response:
    """The response to an exception."""
    refusal = ApiError(500, "the server failed on this request; its log has the cause")
    if isinstance(error, ApiError):
        refusal = error
    elif isinstance(error, RequestValidationError):
        refusal = validation_error(error.errors())
    elif isinstance(error, HTTPException):
        message = f"no route for {http.method} {http.url.path}; {ROUTES}"
        refusal = ApiError(error.status_code, message if error.status_code in (404, 405) else str(error.detail))
        refusal.headers |= error.headers or {}  # Allow, with status 405
    return error_response(refusal)
