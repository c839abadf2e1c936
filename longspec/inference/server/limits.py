"""Limits of what one HTTP request may ask for, and the reading of its body within them."""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from longspec.inference.server.errors import ApiError, validation_error

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class Limits:
    """Limits of one request. The scheduler limits prompt and answer by memory and by the target's positions."""

    max_seconds: float = 600.0
    """From the arrival of a request to its last token."""
    body_seconds: float = 30.0
    """Time in which a request's body must arrive."""
    max_body_bytes: int = 8 << 20
    max_choices: int = 16
    """Prompts times `n`; they must fit into the queue together."""


async def read_body(http: Request, kind: type[Body], limits: Limits) -> Body:
    """The body as a pydantic model. Raises ApiError."""
    # Pages of other sites can send any other type without asking.
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(400, "the body must be a JSON object, sent as application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in http.stream():
                body += part
                if len(body) > limits.max_body_bytes:
                    raise ApiError(413, f"the body is larger than {limits.max_body_bytes} bytes")
        return kind.model_validate_json(bytes(body))
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {limits.body_seconds:g} s to arrive") from None
    except ClientDisconnect as error:
        raise ApiError(400, "the client has gone") from error
    except ValidationError as error:
        raise validation_error(error) from error
