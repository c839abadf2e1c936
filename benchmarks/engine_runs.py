"""One engine with one method, in a process of its own: `benchmarks.engines` starts it with the engine's interpreter.

Reads a run as JSON on stdin and writes its result, and nothing else, to stdout. Engines are imported where they are
used, because their environments exclude each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice, product
from random import Random
from time import perf_counter
from typing import Any

Generate = Callable[[list[list[int]], list[int], int], list[list[int]]]
"""(prompts, lengths of their answers, concurrency) -> greedy answers of exactly these lengths. When a request ends, the
next one starts, so that `concurrency` of them run until the prompts are used up."""
RECOMMENDED: dict[str, dict[str, Any]] = {
    "vllm": {"performance_mode": "interactivity"},
    "sglang": {"enable_torch_compile": True},
}
"""Options that an engine's documentation recommends for latency."""
SINGLE_PROMPTS = 8
"""Number of prompts of a context that are decoded one at a time."""
TURNS = 4
"""Number of prompts per concurrent request. In a single batch, the last rows would run almost alone."""
SHORTEST, LONGEST = 0.5, 1.5
"""Lengths of concurrent answers, relative to those of single ones, in equal steps. With equal ones, an engine without
drafts would end all requests of a turn at once and read the next prompts together, which real requests do not allow."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
"""The example of vLLM's documentation."""


@dataclass
class Run:
    """A row of the table."""

    engine: str
    method: str
    setting: str
    """`defaults`, or `latency` for RECOMMENDED."""
    target: str
    draft: str | None
    prompts: dict[str, list[list[int]]]
    """Token ids by context."""
    concurrent: list[int]
    tokens: int
    dtype: Any


def ours(run: Run) -> Generate:
    from longspec.cli.options import PairOptions
    from longspec.cli.pair import SamplingOptions, open_pair
    from longspec.inference.answering import answer_all, whole_answers

    pair = open_pair(PairOptions(run.target, run.draft, dtype=run.dtype), run.method)
    pair.stop_ids = []

    def generate(prompts: list[list[int]], lengths: list[int], requests: int) -> list[list[int]]:
        options = [SamplingOptions(max_new_tokens=length) for length in lengths]
        asked = [pair.requests([prompt], own, [0])[0] for prompt, own in zip(prompts, options, strict=True)]
        answers: dict[int, list[int]] = {}
        listener = whole_answers(lambda number, answer, stats: answers.update({number: answer}))
        # As `longspec.generate` with this batch size, but in the given order, as in other engines.
        max_rows = requests if requests < len(prompts) else None
        answer_all(requests=asked, max_rows=max_rows, listener=listener, window=1, **pair.decoding())
        return [answers[number] for number in range(len(prompts))]

    return generate


def vllm(run: Run) -> Generate:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options = recommended(run)
    if run.method == "ngram":
        options["speculative_config"] = NGRAM
    model = LLM(model=run.target, dtype=run.dtype, skip_tokenizer_init=True, enable_prefix_caching=False, **options)

    def generate(prompts: list[list[int]], lengths: list[int], requests: int) -> list[list[int]]:
        # The kind of output is that of LLM.generate.
        fixed = {"ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
        waiting = list(enumerate(prompts))
        answers: dict[int, list[int]] = {}
        while len(answers) < len(prompts):
            while waiting and model.llm_engine.get_num_unfinished_requests() < requests:
                number, prompt = waiting.pop(0)
                sampling = SamplingParams(temperature=0.0, max_tokens=lengths[number], **fixed)
                model.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
            ended = [output for output in model.llm_engine.step() if output.finished]
            answers |= {int(output.request_id): list(output.outputs[0].token_ids) for output in ended}
        return [answers[number] for number in range(len(prompts))]

    return generate


def sglang(run: Run) -> Generate:
    from sglang import Engine

    options = recommended(run) | {"disable_radix_cache": True, "skip_tokenizer_init": True, "log_level": "error"}
    if run.method != "vanilla":
        options["speculative_algorithm"] = run.method.upper()
    if run.method == "glide":
        options["speculative_draft_model_path"] = run.draft
    model = Engine(model_path=run.target, dtype=run.dtype, **options)

    def generate(prompts: list[list[int]], lengths: list[int], requests: int) -> list[list[int]]:
        room = asyncio.Semaphore(requests)

        async def answer(prompt: list[int], length: int) -> list[int]:
            sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
            async with room:
                output = await model.async_generate(input_ids=prompt, sampling_params=sampling)
            return list(output["output_ids"])[-length:]

        async def all_answers() -> list[list[int]]:
            return await asyncio.gather(*map(answer, prompts, lengths))

        return model.loop.run_until_complete(all_answers())

    return generate


def recommended(run: Run) -> dict[str, Any]:
    return dict(RECOMMENDED[run.engine]) if run.setting == "latency" else {}


ENGINES = {"ours": ours, "vllm": vllm, "sglang": sglang}


def measure(run: Run, generate: Generate) -> dict[str, Any]:
    """Decoding tokens/s of one prompt by context, tokens/s of concurrent prompts, and the answers."""
    single, answers = {}, []
    for context, prompts in run.prompts.items():
        # An engine may compile or capture by size. A reversed prompt has the size, but not an answer to draft from.
        for prompt, tokens in product(prompts[:SINGLE_PROMPTS], (1, run.tokens)):
            generate([prompt[::-1]], [tokens], 1)
        whole = first = 0.0
        for prompt in prompts[:SINGLE_PROMPTS]:
            start = perf_counter()
            answers += generate([prompt], [run.tokens], 1)
            middle = perf_counter()
            generate([prompt], [1], 1)
            whole, first = whole + middle - start, first + perf_counter() - middle
        # The pass over the prompt and the first token are those of the answer of one token.
        single[context] = len(prompts[:SINGLE_PROMPTS]) * (run.tokens - 1) / (whole - first)

    many = {}
    shortest = next(iter(run.prompts.values()))
    for requests in run.concurrent:
        batch = list(islice(cycle(shortest), TURNS * requests))
        lengths = spread_lengths(run.tokens, len(batch))
        generate([prompt[::-1] for prompt in batch], lengths, requests)
        start = perf_counter()
        answers += generate(batch, lengths, requests)
        many[str(requests)] = sum(lengths) / (perf_counter() - start)
    return {"single": single, "concurrent": many, "answers": answers}


def spread_lengths(tokens: int, count: int) -> list[int]:
    """Lengths of `count` concurrent answers, in a fixed random order."""
    step = (LONGEST - SHORTEST) / max(1, count - 1)
    lengths = [round(tokens * (SHORTEST + step * number)) for number in range(count)]
    Random(0).shuffle(lengths)
    return lengths


def main() -> None:
    # Engines and their processes log to stdout, vLLM's also after the last answer. Their lines go to stderr.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    run = Run(**json.load(sys.stdin))
    start = perf_counter()
    generate = ENGINES[run.engine](run)
    started = perf_counter() - start
    with results:
        json.dump(measure(run, generate) | {"start_s": started}, results)


if __name__ == "__main__":
    main()
