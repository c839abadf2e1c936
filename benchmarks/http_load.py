"""Clients of the HTTP server for measurements: timed streams, and a soak of requests that end in every way."""

import http.client
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

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
        parts = urlsplit(url)
        self.host, self.port = str(parts.hostname), parts.port

    def stream(self, prompt: list[int], tokens: int) -> Timed:
        """A greedy answer of exactly `tokens` tokens."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "longspec": {"ignore_eos": True}}
        start, times, text = perf_counter(), [], ""
        connection = self._connect()
        for chunk in self._events(connection, body):
            times.append(perf_counter() - start)
            text += chunk["choices"][0]["text"]
        connection.close()
        return Timed(text, tokens, times[0], times[-1])

    def post(self, body: bytes) -> tuple[int, Any]:
        """Status and content of an answer in one piece."""
        connection = self._connect()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = json.loads(response.read())
        connection.close()
        return response.status, content

    def abandon(self, body: dict[str, Any], chunks: int) -> None:
        """Start a stream and close the connection after some of its chunks."""
        connection = self._connect()
        events = self._events(connection, body)
        for _ in zip(range(chunks), events, strict=False):
            pass
        connection.close()

    def metrics(self) -> dict[str, float]:
        """The figures of /metrics that have no labels."""
        connection = self._connect()
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)

    def _events(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> Iterator[Any]:
        """The chunks of a stream."""
        content = json.dumps({**body, "stream": True}).encode()
        connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read().decode()}")
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
        body: dict[str, Any] = {
            "prompt": choice.choice(prompts),
            "max_tokens": choice.randint(1, tokens),
            "seed": number,
        }
        body["temperature"] = choice.choice((0, 1))
        if kind == "malformed":
            expected, status = (400,), client.post(choice.choice(MALFORMED))[0]
        elif kind == "abandoned":
            client.abandon(body, choice.randint(0, 5))
            return kind
        else:
            stop = {"stop": choice.sample(["e", "a ", "the", "\n"], 2)} if kind == "stop" else {}
            expected, status = (200,), client.post(json.dumps({**body, **stop}).encode())[0]
        if status not in expected:
            raise RuntimeError(f"request {number} ({kind}): status {status}")
        return kind

    with ThreadPoolExecutor(concurrent) as pool:
        return Counter(pool.map(one, range(requests)))
