"""The HTTP server under load, against `generate` in one process: throughput, time to first token, and leaks.

`python -m benchmarks.serving --model llama8b` measures `generate`, starts `longspec serve` on a free port, measures
that, and ends with one JSON line. Prompts are pieces of a text, so the drafts have something to predict.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj
from threading import Thread
from time import perf_counter
from typing import Any

import torch

from benchmarks.http_load import Client, soak
from benchmarks.tables import print_result
from longspec.cli.options import PairOptions
from longspec.cli.pair import LoadedPair, SamplingOptions, open_pair
from longspec.errors import reports_user_errors

ROOT = Path(__file__).parents[1]
GOALS: dict[str, tuple[str, str, str, float]] = {
    "single_over_generate": ("single_tokens_per_s", "generate_single_tokens_per_s", ">=", 0.95),
    "concurrent_over_static_batch": ("concurrent_tokens_per_s", "generate_batch_tokens_per_s", ">=", 0.85),
    "concurrent_over_vanilla_batch": ("concurrent_tokens_per_s", "vanilla_batch_tokens_per_s", ">=", 1.5),
    "second_turn_ttft_over_first": ("second_turn_ttft_s", "first_turn_ttft_s", "<=", 0.25),
    "rss_growth": ("rss_after", "rss_before", "<=", 1.02),
    "cuda_growth": ("cuda_after", "cuda_before", "<=", 1.02),
}
"""Numerator and denominator of each ratio, and its goal."""


@dataclass
class Load:
    """The prompts of a measurement, as token ids."""

    single: list[int]
    ragged: list[list[int]]
    history: list[int]
    """The first turn of a conversation; the second turn is this, an answer, and a few more tokens."""
    tokens: int
    """Length of each answer."""


def make_load(text: str, tokenizer: Any, shortest: int, longest: int, rows: int, tokens: int) -> Load:
    """Pieces of a text, which is repeated with a number in front if it is too short."""
    ids: list[int] = []
    copy = 0
    while len(ids) < (rows + 2) * longest:
        ids += tokenizer(f"\n\n{copy}\n\n{text}", add_special_tokens=False)["input_ids"]
        copy += 1
    lengths = [shortest + (longest - shortest) * row // max(1, rows - 1) for row in range(rows)]
    ragged = [ids[row * longest : row * longest + length] for row, length in enumerate(lengths)]
    return Load(ids[rows * longest :][:shortest], ragged, ids[(rows + 1) * longest :][:longest], tokens)


def measure_generate(pair: LoadedPair, load: Load) -> dict[str, float]:
    """tokens/s of `generate`: one prompt without its prefill, and static batches from start to end."""

    def run(prompts: list[list[int]], method: str) -> tuple[float, float]:
        for _ in range(2):  # the first run warms up
            start = perf_counter()
            stats = pair.generate(
                prompts, SamplingOptions(max_new_tokens=load.tokens), method=method, eos_token_id=()
            ).stats
            seconds = perf_counter() - start
        return stats.tokens_per_second, len(prompts) * load.tokens / seconds

    return {
        "generate_single_tokens_per_s": run([load.single], pair.method)[0],
        "generate_batch_tokens_per_s": run(load.ragged, pair.method)[1],
        "vanilla_batch_tokens_per_s": run(load.ragged, "vanilla")[1],
    }


def measure_server(client: Client, load: Load) -> dict[str, float]:
    """The same figures for the server, and the times to first token of two turns."""
    client.stream(load.ragged[0][:64], 8)
    single = client.stream(load.single, load.tokens)
    with ThreadPoolExecutor(len(load.ragged)) as pool:
        start = perf_counter()
        answers = list(pool.map(lambda prompt: client.stream(prompt, load.tokens), load.ragged))
        seconds = perf_counter() - start
    first = client.stream(load.history, 32)
    second = client.stream(load.history + load.single[:32], 32)
    return {
        "single_tokens_per_s": single.decode_tokens_per_s,
        "concurrent_tokens_per_s": sum(answer.tokens for answer in answers) / seconds,
        "slowest_ttft_s": max(answer.ttft_s for answer in answers),
        "first_turn_ttft_s": first.ttft_s,
        "second_turn_ttft_s": second.ttft_s,
    }


def measure_leaks(client: Client, load: Load, requests: int) -> dict[str, Any]:
    """Memory before and after a soak, and whether a greedy answer is the same before, during and after it."""
    rows = len(load.ragged)
    prompts = [prompt[: 16 + 16 * row] for row, prompt in enumerate(load.ragged)]
    soak(client, prompts, requests // 4, rows, load.tokens, seed=1)  # caches of allocators fill up
    idle(client)
    alone, before = client.stream(prompts[-1], load.tokens).text, client.metrics()
    with ThreadPoolExecutor(1) as pool:
        kinds = pool.submit(soak, client, prompts, requests, rows - 1, load.tokens)
        among = [client.stream(prompts[-1], load.tokens).text]
        while not kinds.done():
            among.append(client.stream(prompts[-1], load.tokens).text)
    idle(client)
    after, last = client.metrics(), client.stream(prompts[-1], load.tokens).text
    names = {"rss": "process_resident_memory_bytes", "cuda": "longspec_cuda_memory_bytes"}
    # 0 bytes of CUDA memory on a CPU do not grow.
    memory = {f"{name}_before": before.get(key) or 1 for name, key in names.items()}
    memory |= {f"{name}_after": after.get(key) or 1 for name, key in names.items()}
    same = {*among, last} == {alone}
    return {**memory, "kinds": dict(kinds.result()), "seeded_answers": len(among), "seeded_answers_same": same}


def idle(client: Client) -> None:
    while (now := client.metrics())["longspec_running_rows"] or now["longspec_queue_length"]:
        time.sleep(0.05)


@contextmanager
def served(args: argparse.Namespace) -> Iterator[Client]:
    """A server of the pair in a process of its own."""
    options = [f"--{name}={value}" for name in ("draft", "method", "dtype", "device") if (value := getattr(args, name))]
    command = [sys.executable, "-m", "longspec", "serve", args.model, "--port=0", f"--max_rows={args.rows}", *options]
    command.append("--generation_config=none")  # as `measure_generate`
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                print(line, end="", file=sys.stderr)
                if match := re.search(r"listening on (\S+)", line):
                    # A full pipe would block the server.
                    Thread(target=copyfileobj, args=(process.stderr, sys.stderr), daemon=True).start()
                    yield Client(match[1])
                    return
            raise RuntimeError("the server did not start")
        finally:
            process.terminate()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="pair by name, hub id or folder")
    parser.add_argument("--draft", help="default: that of the pair")
    parser.add_argument("--method", help="default: tree, or lookup for a pair without a trained draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", help="default: CUDA if available")
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "config.md", help="text that prompts are cut from")
    parser.add_argument("--rows", type=int, default=16, help="concurrent requests")
    parser.add_argument("--shortest", type=int, default=1024, help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--requests", type=int, default=1000, help="requests of the soak")
    return parser


@reports_user_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    pair = open_pair(PairOptions(args.model, args.draft, args.device, args.dtype), args.method, applied=())
    load = make_load(args.text.read_text(), pair.tokenizer, args.shortest, args.longest, args.rows, args.tokens)
    figures: dict[str, Any] = measure_generate(pair, load)
    machine = torch.cuda.get_device_name(pair.model.device) if pair.model.device.type == "cuda" else "cpu"
    method = pair.method
    del pair
    torch.cuda.empty_cache()
    with served(args) as client:
        figures |= measure_server(client, load) | measure_leaks(client, load, args.requests)
    for name, (above, below, sign, goal) in GOALS.items():
        ratio = figures[above] / figures[below]
        met = ratio >= goal if sign == ">=" else ratio <= goal
        print(f"{name:32} {ratio:8.3f}  goal {sign} {goal:<5} {'met' if met else 'missed'}")
    print(f"seeded answers the same under load: {figures['seeded_answers_same']}")
    print_result("serving", args, device=machine, method=method, figures=figures)


if __name__ == "__main__":
    main()
