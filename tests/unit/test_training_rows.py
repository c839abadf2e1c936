"""Rows of training: packing, order, collation and position ids; and the scores of held-out rows."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pairs import Handed
from tiny_tokenizer import byte_tokenizer
from torch import Tensor
from training_fixtures import make_work, single_rank_config, write_answers

from longspec.data.collators import IGNORED, Collator
from longspec.data.packing import pack
from longspec.errors import UserError
from longspec.train.config_schema import TrainConfig
from longspec.train.engine import build_pair
from longspec.train.evaluation import Evaluation, held_out_row_count
from longspec.train.inputs import read_inputs
from longspec.train.loss import DraftLoss
from longspec.train.micro_batches import batch_positions
from longspec.train.positions import anchor_offset_positions, contiguous_positions, micro_step_generator
from longspec.train.sampler import ResumableSampler


def walk(rows: int, batch: int, world: int, start: int, stop: int, seed: int = 42) -> list[list[list[int]]]:
    """The micro-batches of each rank."""
    return [list(ResumableSampler(rows, batch, rank, world, seed, start, stop)) for rank in range(world)]


@pytest.mark.parametrize(("rows", "batch", "world"), [(12, 2, 3), (7, 2, 2), (5, 4, 3), (1, 1, 2)])
def test_every_row_comes_once_an_epoch(rows: int, batch: int, world: int) -> None:
    micro_steps = 4 * rows
    ranks = walk(rows, batch, world, 0, micro_steps)
    sequence = [row for step in range(micro_steps) for rank in range(world) for row in ranks[rank][step]]
    for epoch in range(len(sequence) // rows):
        assert sorted(sequence[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_a_later_start_continues_the_same_walk_and_epochs_and_seeds_have_others() -> None:
    assert walk(13, 2, 2, 9, 20) == [rank[9:] for rank in walk(13, 2, 2, 0, 20)]
    first, second = walk(50, 50, 1, 0, 2)[0]
    assert first != second and first != walk(50, 50, 1, 0, 1, seed=43)[0][0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of a parent")
def test_loading_processes_end_with_a_rank_that_is_killed_while_they_wait_to_write() -> None:
    """Batches fill the pipe of each process, and the other one keeps it open."""
    script = """
import os
from types import SimpleNamespace
import torch
from longspec.train.sampler import ResumableSampler, loader
rows = SimpleNamespace(rows=range(100), collate=lambda rows: {"labels": torch.zeros(100_000)})
batches = iter(loader(rows, ResumableSampler(100, 1, 0, 1, 0, 0, 100), 2, 8))
next(batches)
print("loaded", flush=True)
os._exit(1)
"""
    # Ends when no process has stdout open any more.
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("loaded\n", 1)


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_no_epoch_follows_the_order_of_the_corpus(seed: int) -> None:
    """Packed rows are in corpus order, too, and a batch should not come from one document."""
    rows = pack(np.full(600, 64), 64)
    samples = np.concatenate([rows[row] for batch in walk(600, 8, 1, 0, 225, seed)[0] for row in batch])
    for epoch in samples.reshape(3, 600):
        assert abs(np.corrcoef(epoch, np.arange(600))[0, 1]) < 0.2


def naive_best_fit(lengths, max_length):
    """The tokens of each row of a best-fit-decreasing packing that looks at every open row, ascending."""
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(room)) if room[row] >= length]
        if not fitting:
            room.append(max_length)
            fitting = [len(room) - 1]
        best = min(fitting, key=lambda row: room[row])
        room[best] -= length
    return sorted(max_length - left for left in room)


@pytest.mark.parametrize("max_length", [7, 64, 1024])
def test_rows_are_those_of_the_naive_best_fit(max_length):
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, max_length + 1, 300)
        rows = pack(lengths, max_length)
        assert sorted(rows.samples.tolist()) == list(range(len(lengths)))
        filled = [int(lengths[row].sum()) for row in rows]
        assert sorted(filled) == naive_best_fit(lengths.tolist(), max_length)


PAD = EOS = 2  # one id for both, as many tokenizers have it
ROWS = [
    [{"input_ids": [5, 6, 7, EOS], "prompt_length": 2}, {"input_ids": [8, 9, EOS], "prompt_length": 0}],
    [{"input_ids": [3, 4, EOS], "prompt_length": 1}],
]
X = -100


def test_every_real_token_but_each_first_one_is_learnt_and_segments_cover_the_padding():
    batch = Collator(PAD)(ROWS)
    assert batch["input_ids"].tolist() == [[5, 6, 7, EOS, 8, 9, EOS], [3, 4, EOS, PAD, PAD, PAD, PAD]]
    assert batch["labels"].tolist() == [[X, 6, 7, EOS, X, 9, EOS], [X, 4, EOS, X, X, X, X]]
    answers = Collator(PAD, answer_only=True)(ROWS)["labels"]
    assert answers.tolist() == [[X, X, 7, EOS, X, 9, EOS], [X, 4, EOS, X, X, X, X]]
    assert batch["cu_seqlens"].tolist() == [0, 4, 7, 10, 14]
    batch = Collator(PAD, pad_to=8)(ROWS)
    assert batch["cu_seqlens"].tolist() == [0, 4, 7, 8, 11, 16] and batch["cu_seqlens"].dtype == torch.int32
    for name in ("input_ids", "labels"):
        assert batch[name].shape == (2, 8) and batch[name].dtype == torch.int64


CU = torch.tensor([0, 3, 10, 16, 24], dtype=torch.int32)  # 24 tokens as 2 rows of 12 would cut a segment: 1 x 24
SHAPE = (1, 24)


def draw(lengths: list[int], max_offset: int, longest: int, seed: int = 0) -> list[torch.Tensor]:
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(seed)
    positions = anchor_offset_positions(borders, (1, sum(lengths)), max_offset, longest, generator)
    return list(positions[0].split(lengths))


def test_contiguous_positions_restart_at_each_segment() -> None:
    assert contiguous_positions(CU, SHAPE)[0].tolist() == [*range(3), *range(7), *range(6), *range(8)]
    assert contiguous_positions(torch.tensor([0, 4, 8, 12]), (3, 4)).tolist() == [[0, 1, 2, 3]] * 3


def test_sinks_stay_and_the_rest_of_a_segment_jumps_as_one() -> None:
    seen = set()
    for seed in range(20):
        for segment in draw([9, 3, 40, 5], max_offset=500, longest=4096, seed=seed):
            assert segment[:4].tolist() == list(range(min(4, len(segment))))
            if len(segment) > 4:
                offset = int(segment[4]) - 4
                assert segment[4:].tolist() == [offset + j for j in range(4, len(segment))]
                seen.add(offset)
    assert len(seen) > 20, "packed segments must draw offsets of their own"


def test_offsets_are_uniform_from_zero_to_the_largest_inclusive() -> None:
    """With T = 6 and max_offset 10, o is uniform in 0 … 4, both ends included."""
    counts = torch.stack([segment[4] - 4 for segment in draw([6] * 5000, 10, 4096)]).bincount()
    assert len(counts) == 5
    assert counts.min() > 880 and counts.max() < 1120  # 1000 expected, standard deviation 28


def test_offsets_leave_headroom_before_the_last_position() -> None:
    """The largest offset is min(max_offset, max_positions - 1000) - T, or 0 if that is negative or T over 1200."""
    longest = max(int(segment[4]) - 4 for segment in draw([8] * 2000, 15000, 1100))
    assert longest == 1100 - 1000 - 8
    for positions in (1004, 64):
        assert all(int(segment[4]) == 4 for segment in draw([8] * 50, 15000, positions))
    short, long = draw([1200, 1201], max_offset=30000, longest=131072, seed=3)
    assert long.tolist() == list(range(1201)) and int(short[4]) > 4


VOCAB = byte_tokenizer().get_vocab()
NEVER: Any = SimpleNamespace(agreed=lambda: False)


@pytest.fixture
def load(tmp_path: Path):  # type: ignore[no-untyped-def]
    """The tiny first stage, with separate training and held-out texts."""
    make_work(tmp_path, texts=3, held_out=6)
    return partial(single_rank_config, tmp_path, f"evaluation.files={tmp_path}/held_out.jsonl")


def plain_scores(model: Any, inputs: Any, config: TrainConfig, depth: int, rows: int) -> dict[str, float]:
    """The metrics from whole logits, with one forward pass per lag and loops over tokens."""
    losses: list[Tensor] = []
    right: dict[int, list[bool]] = {lag: [] for lag in range(1, depth + 1)}
    runs = []
    for row in range(rows):
        batch = inputs.collate_held_out([inputs.held_out[row]])
        labels, segments = batch["labels"], batch["cu_seqlens"]
        generator = micro_step_generator(config.seed, row, 0)
        shape = tuple(labels.shape)
        positions = batch_positions(batch, config.variant, inputs.max_positions, generator)
        guesses = []
        for lag in right:
            lags = torch.full((len(segments) - 1,), lag)
            head = Handed(lambda hidden, target_hidden, labels, lm_head: lm_head(hidden)[0])
            logits = model(**batch, position_ids=positions, lags=lags, objective=head)
            targets = labels[0, 1:]
            losses.append(F.cross_entropy(logits[:-1], targets, ignore_index=-100, reduction="none")[targets != -100])
            guesses.append(logits.argmax(-1).tolist())
            right[lag] += [guesses[-1][i - 1] == int(labels[0, i]) for i in range(1, shape[1]) if labels[0, i] != -100]
        for root in range(shape[1] - depth):
            if (labels[0, root : root + depth + 1] != -100).all():
                correct = [guesses[d - 1][root + d - 1] == int(labels[0, root + d]) for d in range(1, depth + 1)]
                runs.append(correct.index(False) if False in correct else depth)
    shares = {f"eval_top1_lag_{lag}": sum(hits) / len(hits) for lag, hits in right.items()}
    loss = float(torch.cat(losses).mean())
    return shares | {"eval_loss": loss, "eval_ce": loss, "eval_acceptance_length": 1 + sum(runs) / len(runs)}


@pytest.mark.parametrize(
    ("variant", "depth", "options"),
    [("sinkpi-slicing", 5, []), ("base", 4, ["model.kv_layers=[0]", "model.target_feature=true"])],
)
@torch.no_grad()
def test_metrics_are_those_of_whole_logits(
    load: Any, one_rank: None, variant: str, depth: int, options: list[str]
) -> None:
    """All terms. The head prefers two common bytes, so that some chains are right and others wrong."""
    config = load(f"variant={variant}", "evaluation.rows=3", *options)
    inputs = read_inputs(config)
    assert inputs.held_out is not None and len(inputs.held_out) >= 3
    model: Any = build_pair(config, None)
    model.lm_head.weight[[VOCAB["e"], VOCAB["t"]]] *= 8
    # The part of DeepSpeed's engine that an evaluation uses.
    engine = mock.Mock(side_effect=model, device=torch.device("cpu"))
    count = held_out_row_count(config, inputs)
    metrics = Evaluation(config, engine, inputs, DraftLoss("ce"), count).run(NEVER)
    assert metrics.pop("eval_seconds") > 0 and count == 3
    expected = plain_scores(model, inputs, config, depth, count)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert math.isclose(metrics[name], value, rel_tol=1e-5), name
    assert engine.method_calls == [mock.call.eval(), mock.call.train()]
    assert 0 < expected["eval_top1_lag_1"] < 1 and expected["eval_acceptance_length"] > 1


def test_only_answers_are_scored(load: Any, tmp_path: Path) -> None:
    """Training counts every token, an evaluation only those that the draft would propose."""
    answers = write_answers(tmp_path / "answers.jsonl", count=3)
    inputs = read_inputs(load(f"evaluation.files={answers}", "data.pack=false"))
    assert inputs.held_out is not None
    for (segment,) in inputs.held_out:
        prompt = segment["prompt_length"]
        labels = inputs.collate_held_out([[segment]])["labels"][0]
        trained = inputs.collate([[segment]])["labels"][0]
        assert prompt > 1 and (labels[:prompt] == IGNORED).all() and (labels[prompt:] == trained[prompt:]).all()
        assert (trained[1:] != IGNORED).all()


def test_rows_are_the_first_ones_or_all(load: Any, tmp_path: Path) -> None:
    """Rows without a single chain are refused in one line."""
    answers = write_answers(tmp_path / "answers.jsonl", count=7)
    for limit, count in (("3", 3), ("null", 7), ("100", 7)):
        config = load(f"evaluation.files={answers}", f"evaluation.rows={limit}", "data.pack=false")
        assert held_out_row_count(config, read_inputs(config)) == count
    answers.write_text('{"text": "abc"}\n')
    config = load(f"evaluation.files={answers}")
    with pytest.raises(UserError, match=r"evaluation\.files: none of the first 1 rows has 6 consecutive tokens"):
        held_out_row_count(config, read_inputs(config))
