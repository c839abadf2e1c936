"""Refusals in OpenAI's error format."""

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's `type` by status; other 4xx are an invalid_request_error, 5xx a server_error."""


HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
"""Headers by status. A client that finds the queue full is to come back soon: each answer that ends frees a row."""


class ApiError(Exception):
    """A request that is refused or has failed."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, close: bool = False
    ) -> None:
        """param: name of the field at fault. close: whether the connection ends: a part of the body is unread."""
        super().__init__(message)
        self.status, self.code = status, code
        self.message, self.param = encodable(message), param and encodable(param)
        self.headers = dict(HEADERS.get(status, {}))
        if close:
            self.headers["Connection"] = "close"

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def encodable(text: str) -> str:
    """The text without lone surrogates, which JSON can escape and no encoding has."""
    return text.encode(errors="replace").decode()


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors, which name fields by their path below "body"."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({first['ctx']['error']})")
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "unsupported":
        path.append(first["ctx"]["field"])
    problem = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    name = ".".join(path) or None
    return ApiError(400, f"{name}: {problem}" if name else problem, param=name)
