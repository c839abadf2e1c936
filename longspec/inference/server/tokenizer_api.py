"""The tokenizer over HTTP, as vLLM serves it: clients that evaluate a model then need no copy of it."""

import asyncio
from concurrent.futures import Executor
from typing import Any

from fastapi import FastAPI

from longspec.inference.server.openai_api import Strict, Text
from longspec.inference.server.served_model import ServedModel


class TokenizeRequest(Strict):
    """The body of /tokenize."""

    prompt: Text
    add_special_tokens: bool = True
    """As in a completion. False adds no BOS."""


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    tokens: list[int]


def add_tokenizer_routes(app: FastAPI, model: ServedModel, encoder: Executor) -> None:
    """encoder: runs the tokenizer, because long texts would hold up the event loop."""
    tokenizer = model.tokenizer

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        def encode() -> list[int]:
            if body.add_special_tokens:
                return model.encode([body.prompt])[0]
            return tokenizer(body.prompt, add_special_tokens=False)["input_ids"]

        tokens = await asyncio.get_running_loop().run_in_executor(encoder, encode)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": model.positions}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        model.check_ids(body.tokens, "tokens")
        return {"prompt": await asyncio.get_running_loop().run_in_executor(encoder, tokenizer.decode, body.tokens)}

    @app.api_route("/tokenizer_info", methods=["GET", "HEAD"])
    async def tokenizer_info() -> dict[str, Any]:
        names = ("bos_token", "eos_token", "pad_token", "chat_template")
        return {"tokenizer_class": type(tokenizer).__name__, **{name: getattr(tokenizer, name) for name in names}}
