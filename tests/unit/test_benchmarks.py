"""The benchmarks on tiny shapes: parts of a round, acceptance files, FLOPs, and the tables of the engines compared."""

import json
import os
import select
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine_runs, engines, parts, training
from benchmarks.decoding import filled_batch
from benchmarks.parts import parts_of_round
from benchmarks.read_bandwidth import LAUNCHES, read_sums
from benchmarks.shapes import random_pair
from longspec.inference.engine.rounds import Rounds
from longspec.inference.runner import Runner
from longspec.models.glide import GlideMixin

SHAPE = [2, 3]
OPTIONS = {"temperature": 0.0, "tree_shape": SHAPE, "gamma": 4, "tree_nodes": None, "lookup_branches": False}


@pytest.fixture(scope="module")
def pair() -> GlideMixin:
    return random_pair("tiny", "cpu", torch.float32)


def filled(pair: GlideMixin, method: str, **changes: Any) -> Rounds:
    batch, mode = filled_batch(Runner(pair), [20], method, Namespace(**OPTIONS | changes))
    return batch.state(mode, slice(0, 1))


@pytest.mark.parametrize(("block", "steps", "warps"), [*LAUNCHES, (64, 3, 1)])
def test_the_read_kernel_reads_every_number_once(block: int, steps: int, warps: int, device: str) -> None:
    x = torch.randint(-8, 8, (2 * 3 * block * steps,), generator=torch.Generator().manual_seed(0))
    x = x.to(device, torch.float16)
    assert torch.equal(read_sums(x, block, steps, warps), x.float().view(-1, block * steps).sum(1))


@pytest.mark.parametrize(
    ("changes", "nodes"), [({}, 6), ({"tree_nodes": 4}, 4), ({"tree_nodes": 4, "lookup_branches": True}, 4)]
)
def test_the_parts_of_a_round_add_up_to_it_with_a_negative_residual(
    pair: GlideMixin, changes: dict[str, Any], nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that take 5 ms alone do not fit into a round of 9 ms. Only "accept + compact" changes the cache."""
    lengths: list[int] = []

    def timed(work: Callable[[], object]) -> float:
        work()
        lengths.append(int(engine.cache.lengths))
        return 5.0

    monkeypatch.setattr(parts, "captured_ms", timed)
    engine = filled(pair, "tree", **changes)
    assert engine.drafter.nodes == nodes
    with torch.no_grad():
        found = parts_of_round(engine, 9.0)
    assert sum(found.values()) == pytest.approx(9.0)
    assert found["accept + compact"] == 5.0 and found["residual"] == -6.0
    assert set(lengths[:-1]) == {20} and lengths[-1] > 20


def run_of(**changes: object) -> engine_runs.Run:
    prompts = {"chat": [[1, 2], [3]], "4k": [[4, 5, 6]]}
    settings = dict(engine="ours", method="vanilla", setting="defaults", target="t", draft=None, prompts=prompts)
    return engine_runs.Run(**(settings | dict(concurrent=[3], tokens=5, dtype="float32") | changes))  # type: ignore[arg-type]


def script(folder: Path, commands: str) -> Path:
    """An interpreter that runs these commands instead of a module."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{commands}\n")
    python.chmod(0o755)
    return python


def test_decoding_excludes_the_prompt_and_concurrent_prompts_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which a prompt takes 10 s per token and each new token 1 s."""
    now = [0.0]
    batches = []

    def generate(prompts: list[list[int]], lengths: list[int], requests: int) -> list[list[int]]:
        assert requests == (1 if len(prompts) == 1 else 3)
        now[0] += 10 * sum(map(len, prompts)) + sum(lengths)
        batches.append(prompts)
        return [[prompt[0]] * length for prompt, length in zip(prompts, lengths, strict=True)]

    monkeypatch.setattr(engine_runs, "perf_counter", lambda: now[0])
    result = engine_runs.measure(run_of(), generate)
    assert result["single"] == {"chat": 1.0, "4k": 1.0}
    assert batches[-1] == 6 * [[1, 2], [3]] and result["concurrent"] == {"3": 60 / 240}
    assert [answer[0] for answer in result["answers"]] == [1, 3, 4, *6 * [1, 3]]
    # An engine that drafts from earlier answers has not answered a prompt before it counts.
    assert batches[:4] == [[[2, 1]], [[2, 1]], [[3]], [[3]]]


def test_the_table_counts_answers_equal_to_vanilla_and_names_failures() -> None:
    result = {"single": {"chat": 1234.4}, "concurrent": {"8": 5.0}}
    names = {"engine": "sglang", "setting": "defaults"}
    rows = [
        {"method": "vanilla", "answers": [[1], [2]]} | names | result,
        {"method": "glide", "answers": [[1], [3]]} | names | result,
        {"method": "ngram", "error": "out of memory"} | names,
    ]
    engines.count_same(rows)
    text = engines.table(rows, ["chat"], [8]).splitlines()
    assert text[3] == "| sglang | glide | defaults | 1,234 | 5 | 1/2 |"
    assert text[4] == "| sglang | ngram | defaults | failed: out of memory |  |  |"


def test_the_processes_of_an_engine_end_with_its_run(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    python = script(tmp_path, f"sleep 1000 < /dev/null > {pipe} 2>&1 &\necho '{{\"single\": 1}}'")
    assert engines.run_alone(run_of(), str(python), limit=60) == {"single": 1}
    # The end of the file is read once no process has the pipe open for writing.
    assert select.select([reader], [], [], 20)[0] and os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.slow
def test_the_whole_benchmark_runs(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Both stages and variants, all losses, ZeRO-3, the profile, and the efficiency against an earlier call."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(training.dist, "destroy_process_group", lambda: None)
    arguments = ["--shapes", "tiny", "--rows", "2", "--tokens", "40", "--steps", "1", "--accumulation", "1"]

    def run(*more: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["training", *arguments, *more])
        training.main()
        return capsys.readouterr().out.splitlines()

    printed = run()
    cases = json.loads(printed[-1])["cases"]
    assert [(case["stage"], case["variant"], case["loss"]) for case in cases] == [
        (stage, *kind)
        for stage in (1, 2)
        for kind in [("base", "ce"), *(("sinkpi-slicing", loss) for loss in training.LOSSES)]
    ]
    assert all(case["tokens"] == 80 and case["micro_batch_ms"] > 0 and case["tflops"] > 0 for case in cases)
    assert all(sum(case["parts"].values()) == pytest.approx(1) for case in cases)
    assert all(min(case["parts"].values()) > 0 for case in cases)
    target = sum(p.numel() for p in training.random_pair("tiny", "cpu").model.parameters()) + 512 * 64
    assert cases[0]["target_gib"] * 2**30 == 2 * target
    (tmp_path / "one.json").write_text("\n".join(printed))
    printed = run("--zero", "3", "--stages", "2", "--losses", "ce", "--profile", "--one_gpu", f"{tmp_path}/one.json")
    cases = json.loads(printed[-1])["cases"]
    assert len(cases) == 2 and all(case["efficiency"] > 0 for case in cases)
    assert any(line.strip().startswith("aten::mm ") for line in printed)
