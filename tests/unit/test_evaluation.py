"""Held-out scores, compared with plain formulas on whole logits, and rows that are too short for a chain."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from pairs import Handed
from tiny_tokenizer import byte_tokenizer
from torch import Tensor
from training_fixtures import make_target, single_rank_config, write_answers, write_texts

from longspec.data.collators import IGNORED
from longspec.errors import UserError
from longspec.train.config_schema import TrainConfig
from longspec.train.engine import build_pair
from longspec.train.evaluation import Evaluation, held_out_row_count
from longspec.train.inputs import read_inputs
from longspec.train.loss import DraftLoss
from longspec.train.micro_batches import batch_positions
from longspec.train.positions import micro_step_generator

VOCAB = byte_tokenizer().get_vocab()
NEVER: Any = SimpleNamespace(agreed=lambda: False)


@pytest.fixture
def load(tmp_path: Path):  # type: ignore[no-untyped-def]
    """The tiny first stage, with separate training and held-out texts."""
    make_target(tmp_path / "target")
    write_texts(tmp_path / "texts.jsonl", count=3)
    held_out = write_texts(tmp_path / "held_out.jsonl", count=6, seed=5)
    return partial(single_rank_config, tmp_path, f"evaluation.files={held_out}")


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
    engine = engine_of(model)
    count = held_out_row_count(config, inputs)
    metrics = Evaluation(config, engine, inputs, DraftLoss("ce"), count).run(NEVER)
    assert metrics.pop("eval_seconds") > 0 and count == 3
    expected = plain_scores(model, inputs, config, depth, count)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert math.isclose(metrics[name], value, rel_tol=1e-5), name
    assert engine.method_calls == [mock.call.eval(), mock.call.train()]
    assert 0 < expected["eval_top1_lag_1"] < 1 and expected["eval_acceptance_length"] > 1


def engine_of(model: Any) -> mock.Mock:
    """The part of DeepSpeed's engine that an evaluation uses."""
    return mock.Mock(side_effect=model, device=torch.device("cpu"))


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
