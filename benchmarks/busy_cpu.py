"""Decoding on a CPU that other processes use, too, against transformers with threads that sleep while they wait.

`python -m benchmarks.busy_cpu [--loops 2] [--turns 8]` prints a table and, last, one JSON object. The settings take
turns at one greedy generation each, so that other load on the machine affects all of them alike. `--loops 0` measures
an idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any

from tqdm import tqdm

from benchmarks.tables import markdown

BASELINE = "transformers, passive"
TRANSFORMERS = "transformers"
POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SETTINGS: dict[str, tuple[str, dict[str, str]]] = {
    BASELINE: (TRANSFORMERS, {"OMP_WAIT_POLICY": "passive"}),
    "longspec": ("auto", {}),
    "longspec, passive": ("auto", {"OMP_WAIT_POLICY": "passive"}),
    "longspec, libgomp's default": ("auto", {"GOMP_SPINCOUNT": "300000"}),
}
"""Method and environment of each setting."""
PROMPT = "Explain step by step how a bicycle pump works."
TARGET = "smollm2-135m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=2, help="processes that compute without end")
    parser.add_argument("--turns", type=int, default=8, help="generations per setting")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens per generation")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.tokens)
        return
    with ExitStack() as stack:
        workers = {name: stack.enter_context(started(*SETTINGS[name], options.tokens)) for name in SETTINGS}
        for process in workers.values():
            take_turn(process)  # compiles and measures
        for _ in range(options.loops):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for _ in tqdm(range(options.turns), unit="turn", disable=None):
            for name, process in workers.items():
                seconds[name].append(take_turn(process))
    print(table(seconds))
    print(json.dumps({**vars(options), "cores": len(os.sched_getaffinity(0)), "seconds": seconds}))


def table(seconds: dict[str, list[float]]) -> str:
    """Seconds per generation of each setting, and the ratio to the baseline's generation of the same turn."""
    rows = []
    for name, values in seconds.items():
        ratios = [value / base for value, base in zip(values, seconds[BASELINE], strict=True)]
        error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        figures = [min(values), median(values), max(values)]
        rows.append([name, *(f"{value:.2f}" for value in figures), f"{mean(ratios):.2f} ± {error:.2f}"])
    return markdown(["setting", "minimum s", "median s", "maximum s", "seconds × baseline"], rows)


@contextmanager
def started(method: str, policy: dict[str, str], tokens: int) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the model and generates on request. The policy counts only when OpenMP is loaded."""
    environment = {name: value for name, value in os.environ.items() if name not in POLICIES} | policy
    command = [sys.executable, "-m", "benchmarks.busy_cpu", "--worker", method, "--tokens", str(tokens)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def take_turn(process: subprocess.Popen[str]) -> float:
    """Seconds of one generation."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def work(method: str, tokens: int) -> None:
    """Answer each line of stdin with the seconds of a generation."""
    import longspec  # isort: skip  # before torch, as in the commands

    import torch
    from transformers import AutoModelForCausalLM

    from longspec.models.target_cache import resolve_target

    pair, tokenizer = longspec.load_pair(TARGET, device="cpu")
    model: Any = pair
    if method == TRANSFORMERS:
        model = AutoModelForCausalLM.from_pretrained(resolve_target(TARGET), dtype=torch.float32)
    turns = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    for _ in sys.stdin:
        start = perf_counter()
        if method == TRANSFORMERS:
            model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        else:
            longspec.generate(model, inputs["input_ids"], method=method, max_new_tokens=tokens)
        print(perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
