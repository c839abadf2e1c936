"""Clients of the HTTP server for measurements: timed streams, and a soak of requests that end in every way."""

import json
import random
import re
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

TIMEOUT_S = 600
MALFORMED = (b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "a", "n": 0}', b'{"prompt": "a", "top_a": 0.1}', b"\xff\xfe")


@dataclass
class Timed:
    """An answer. Times in seconds since the request was sent."""

    text: str
    tokens: int
    ttft_s: float
    total_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        """Without prefill and the first token."""
        return (self.tokens - 1) / (self.total_s - self.ttft_s)


class Client:
    """Talks to one server; its methods may be called from several threads."""

    def __init__(self, url: str) -> None:
        self.url, self.opener = url, build_opener(ProxyHandler({}))

    def stream(self, prompt: list[int], tokens: int) -> Timed:
        """A greedy answer of exactly `tokens` tokens."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "longspec": {"ignore_eos": True}}
        start, times, text = perf_counter(), [], ""
        for chunk in self._events(body):
            times.append(perf_counter() - start)
            text += chunk["choices"][0]["text"]
        return Timed(text, tokens, times[0], times[-1])

    def post(self, body: bytes) -> int:
        """Status of an answer in one piece."""
        try:
            with self._open("/v1/completions", body) as response:
                json.load(response)
                return response.status
        except HTTPError as error:
            return error.code

    def abandon(self, body: dict[str, Any], chunks: int) -> None:
        """Start a stream and close the connection after some of its chunks."""
        with closing(self._events(body)) as events:
            for _ in zip(range(chunks), events, strict=False):
                pass

    def metrics(self) -> dict[str, float]:
        """The figures of /metrics that have no labels."""
        with self._open("/metrics") as response:
            text = response.read().decode()
        return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}

    def _open(self, path: str, body: bytes | None = None) -> Any:
        """The response of the server. Raises HTTPError for a status of an error."""
        request = Request(self.url + path, body, {"Content-Type": "application/json"})
        return self.opener.open(request, timeout=TIMEOUT_S)

    def _events(self, body: dict[str, Any]) -> Generator[Any]:
        """The chunks of a stream."""
        with self._open("/v1/completions", json.dumps({**body, "stream": True}).encode()) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])


def soak(
    client: Client, prompts: list[list[int]], requests: int, concurrent: int, tokens: int, seed: int = 0
) -> Counter[str]:
    """Send requests of random kinds; the number of each. Raises RuntimeError for an answer that is not as expected.

    A third of them are whole answers, some with stop strings; the others are streams that the client abandons, and
    malformed bodies.
    """

    def one(number: int) -> str:
        choice = random.Random(seed * requests + number)
        kind = choice.choice(("whole", "stop", "abandoned", "abandoned", "malformed", "malformed"))
        body: dict[str, Any] = {"prompt": choice.choice(prompts), "max_tokens": choice.randint(1, tokens)}
        body |= {"seed": number, "temperature": choice.choice((0, 1))}
        if kind == "malformed":
            expected, status = 400, client.post(choice.choice(MALFORMED))
        elif kind == "abandoned":
            client.abandon(body, choice.randint(0, 5))
            return kind
        else:
            stop = {"stop": choice.sample(["e", "a ", "the", "\n"], 2)} if kind == "stop" else {}
            expected, status = 200, client.post(json.dumps({**body, **stop}).encode())
        if status != expected:
            raise RuntimeError(f"request {number} ({kind}): status {status}")
        return kind

    with ThreadPoolExecutor(concurrent) as pool:
        return Counter(pool.map(one, range(requests)))
