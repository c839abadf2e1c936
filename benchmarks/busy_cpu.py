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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any
from unittest.mock import patch

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
GENERATE: list[Callable[..., object]] = []
"""The function of a process, once it has loaded the model."""
PROMPT = "Explain step by step how a bicycle pump works."
TARGET = "smollm2-135m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=2, help="processes that compute without end")
    parser.add_argument("--turns", type=int, default=8, help="generations per setting")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens per generation")
    options = parser.parse_args()
    with ExitStack() as stack:
        workers = {name: stack.enter_context(started(*SETTINGS[name])) for name in SETTINGS}
        for process in workers.values():
            process.submit(take_turn, options.tokens).result()  # compiles and measures
        for _ in range(options.loops):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for _ in tqdm(range(options.turns), unit="turn", disable=None):
            for name, process in workers.items():
                seconds[name].append(process.submit(take_turn, options.tokens).result())
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


def started(method: str, policy: dict[str, str]) -> ProcessPoolExecutor:
    """A process that holds the model. The policy counts only when OpenMP is loaded."""
    environment = {name: value for name, value in os.environ.items() if name not in POLICIES} | policy
    with patch.dict(os.environ, environment, clear=True):
        process = ProcessPoolExecutor(1, get_context("spawn"), load, (method,))
        process.submit(os.getpid).result()  # starts it
    return process


def load(method: str) -> None:
    import longspec  # isort: skip  # before torch, as in the commands

    import torch
    from transformers import AutoModelForCausalLM

    from longspec.models.target_cache import resolve_target

    pair, tokenizer = longspec.load_pair(TARGET, device="cpu")
    turns = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    if method == TRANSFORMERS:
        target: Any = AutoModelForCausalLM.from_pretrained(resolve_target(TARGET), dtype=torch.float32)
        GENERATE.append(partial(target.generate, **inputs, do_sample=False))
    else:
        GENERATE.append(partial(longspec.generate, pair, inputs["input_ids"], method=method))


def take_turn(tokens: int) -> float:
    """Seconds of one generation."""
    start = perf_counter()
    GENERATE[0](max_new_tokens=tokens)
    return perf_counter() - start


if __name__ == "__main__":
    main()
