"""Refusals in OpenAI's error format."""

from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's `type` by status; other 4xx are an invalid_request_error, 5xx a server_error."""
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
"""Headers by status. A client that finds the queue full is to come back soon: each answer that ends frees a row."""
CLOSES = (401, 408, 413)
"""Statuses after which the connection ends, because the body is unread."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's `code` for a prompt that does not fit with its answer."""
SERVER_STOPPED = "the server stopped before the answer was complete"


class ApiError(HTTPException):
    """A request that is refused or has failed."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """param: name of the field at fault."""
        close = {"Connection": "close"} if status in CLOSES else {}
        super().__init__(status, message, {**HEADERS.get(status, {}), **close})
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


def validation_error(error: ValidationError) -> ApiError:
    """The first of pydantic's errors."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "unsupported":
        path.append(first["ctx"]["field"])
    problem = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    name = ".".join(path) or None
    return ApiError(400, f"{name}: {problem}" if name else problem, param=name)
