"""Host time of the engine's rounds: the time of a step without the kernels' launches and without waiting for them.

`python -m benchmarks.host_rounds --rows 256` answers prompts as `longspec regenerate` does, with a target of random
weights, and ends with one JSON line. On a CPU a launch is the round itself, so only the host's time means anything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import wraps
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.shapes import SHAPES, random_pair
from longspec.inference.engine.batch import Batch
from longspec.inference.engine.request_engine import RequestEngine
from longspec.inference.methods import Drafting
from longspec.inference.request import Sampling
from longspec.regenerate.writer import Answer, Answerer


def timed(owner: Any, name: str, note: Callable[[float], object]) -> None:
    """Call `note` with the seconds of each call of a method of a class."""
    inner = getattr(owner, name)

    @wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        result = inner(*args, **kwargs)
        note(perf_counter() - start)
        return result

    setattr(owner, name, call)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompts", type=int, help="default: as many as rows")
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pair = random_pair(args.shape, device, torch.bfloat16 if device == "cuda" else torch.float32)

    excluded: list[float] = []
    host: list[float] = []

    def note(seconds: float) -> None:
        host.append(seconds - sum(excluded))
        excluded.clear()

    timed(Batch, "play", excluded.append)
    timed(Batch, "read_prompts", excluded.append)
    if device == "cuda":
        timed(torch.cuda.Event, "synchronize", excluded.append)
    timed(RequestEngine, "step", note)

    generator = torch.Generator().manual_seed(0)
    count = args.prompts or args.rows
    prompts = torch.randint(SHAPES[args.shape].vocab_size, (count, args.prompt_tokens), generator=generator).tolist()
    answerer = Answerer(pair, Drafting("vanilla"), args.rows)
    for _ in range(2):  # the first run warms up
        host.clear()
        answers = [
            Answer(prompt, Sampling(args.temperature, seed=row), args.tokens) for row, prompt in enumerate(prompts)
        ]
        start = perf_counter()
        answerer.complete(answers, [])
        seconds = perf_counter() - start
    tokens = sum(len(answer.tokens) for answer in answers)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                "host_ms_per_round": 1e3 * median(host),
                "host_ms_sum": 1e3 * sum(host),
                "steps": len(host),
                "tokens_per_s": tokens / seconds,
                "options": vars(args),
            }
        )
    )


if __name__ == "__main__":
    main()
