"""The experiment's target: trained in time, on what its settings say, with transformers' loss."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pairs import tiny_config
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from scripts.pipeline.target_model import CONFIGS, HEAD_DIM, warm_up_hold_decay
from scripts.reproduce import target as target_module
from scripts.reproduce.settings import PRESETS
from scripts.reproduce.target import (
    Batches,
    Clock,
    Progress,
    TargetSettings,
    TargetTrainer,
    arguments,
    compile_layers,
    held_out_batches,
    next_token_loss,
)
from scripts.reproduce.tokens import ANSWER_IDS, HELD_OUT_IDS, ID, TEXT_IDS

SETTINGS = TargetSettings(short=8, long=32, micro_batch=64, accumulation=2, long_share=0.25, held_out_rows=6)


class Time:
    """Passes as it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds_a_step", [0.1, 1.0, 7.0])
def test_the_learning_rate_comes_down_in_time_on_any_machine(seconds_a_step: float) -> None:
    """100 steps or 100 seconds, whichever comes first: the last step has next to nothing, and none is too late."""
    time = Time()
    clock = Clock(steps=100, seconds=100.0, now=time)
    factors, shares, step = [], [], 0
    while clock.share(step) < 1:
        shares.append(clock.share(step))
        factors.append(warm_up_hold_decay(step, 3, shares[-1]))
        time.now += seconds_a_step
        step += 1
    assert step == (100 if seconds_a_step <= 1 else 15)
    assert shares == sorted(shares)
    assert max(factors) == 1 and min(factors) > 0
    assert factors[-1] <= 2.01 * max(0.01, seconds_a_step / 100)
    assert factors[2:] == sorted(factors[2:], reverse=True)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    for name, first, count in ((TEXT_IDS, 0, 700), (ANSWER_IDS, 1000, 500), (HELD_OUT_IDS, 2000, 400)):
        np.arange(first, first + count, dtype=ID).tofile(tmp_path / name)
    return tmp_path


def test_rows_are_short_then_long_and_change_between_two_steps(tokens: Path) -> None:
    """The last quarter of the time has long rows, of text and of prompts with their answers in turn."""
    time = Time()
    batches = iter(Batches(tokens, SETTINGS, Clock(10_000, 40.0, time)))
    shapes, firsts = [], []
    for _ in range(40):  # seconds, a step each
        for _ in range(SETTINGS.accumulation):
            ids = next(batches)["input_ids"]
            shapes.append(tuple(ids.shape))
            firsts.append(int(ids[0, 0]))
            time.now += 0.5
            assert (ids.diff(dim=1) == 1).all()  # a row is a piece of the corpus as it lies there
    assert shapes == [(8, 8)] * 60 + [(2, 32)] * 20
    assert all(first < 1000 for first in firsts[:60])
    assert [first >= 1000 for first in firsts[60:]] == [False, True] * 10


def test_all_rows_are_seen_before_one_comes_again(tokens: Path) -> None:
    batches = iter(Batches(tokens, SETTINGS, Clock(10_000, 1e9)))
    rows = torch.cat([next(batches)["input_ids"] for _ in range(10)])  # of 87
    assert len(rows.unique(dim=0)) == 80


def test_held_out_batches_are_as_large_as_training_ones_so_nothing_is_compiled_twice(tokens: Path) -> None:
    batches = held_out_batches(tokens, replace(SETTINGS, held_out_rows=20))
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(8, 8)] * 2
    assert all((batch["input_ids"] >= 2000).all() for batch in batches)


def test_loss_and_gradients_are_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "LOSS_CHUNK", 7)  # of 3 · 11 tokens
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config("llama", tie_word_embeddings=True)).double()
    ids = torch.randint(61, (3, 12))
    ours, theirs = next_token_loss(model, ids), model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_layers_compute_in_half_precision_in_training_and_in_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "bf16_is_faster", lambda: True)
    model = LlamaForCausalLM(tiny_config("llama"))
    dtypes: list[torch.dtype] = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, __, out: dtypes.append(out.dtype))
    trainer = TargetTrainer(model, arguments(tmp_path, SETTINGS))
    batch = {"input_ids": torch.randint(61, (2, 8), device=model.device)}
    trainer.compute_loss(model, batch).backward()
    trainer.prediction_step(model, batch)
    assert dtypes == [torch.bfloat16] * 2
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_one_graph_serves_all_layers_at_one_length_in_training_and_evaluation(tmp_path: Path) -> None:
    """The limit leaves no time for a compilation of each layer."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model = LlamaForCausalLM(tiny_config("llama", num_hidden_layers=4))
    trainer = TargetTrainer(model, arguments(tmp_path, SETTINGS))
    compile_layers(model, backend)
    short, long = (torch.randint(61, shape, device=model.device) for shape in ((2, 8), (1, 16)))
    for ids in (short, long, short):
        trainer.compute_loss(model.train(), {"input_ids": ids}).backward()
        trainer.prediction_step(model.eval(), {"input_ids": short})
    torch._dynamo.reset()
    assert len(graphs) == 2


def test_progress_ends_the_training_and_spreads_the_held_out_losses_over_it(tmp_path: Path) -> None:
    time, evaluated = Time(), []
    progress = Progress(tmp_path, Clock(10_000, 120.0, time))
    for step in range(1, 200):
        time.now += 2.5
        control = SimpleNamespace(should_training_stop=False, should_log=False, should_evaluate=False)
        progress.on_step_end(None, SimpleNamespace(global_step=step), control)
        evaluated += [step] if control.should_evaluate else []
        if control.should_training_stop:
            break
    assert step == 48
    assert evaluated == list(range(4, 49, 4))


@pytest.mark.parametrize("preset", ["h200", "24gb"])
@pytest.mark.parametrize("family", CONFIGS)
def test_targets_are_of_the_size_that_makes_a_draft_small_beside_them(preset: str, family: str) -> None:
    """150M to 400M parameters in 24 layers or more, three query heads to a KV head, 16k tokens and their answer."""
    settings = PRESETS[preset](family, None)
    shape = settings.target
    assert shape.layers >= 24
    assert shape.hidden_size // HEAD_DIM == 3 * shape.kv_heads
    assert shape.positions >= 2 * 16384 and shape.vocab_size <= np.iinfo(ID).max
    assert shape.long == settings.corpus.window == settings.stages[1].max_length == settings.stages[2].max_length
    assert settings.evaluation.contexts == settings.corpus.contexts
    with torch.device("meta"):
        tokenizer = SimpleNamespace(bos_token_id=0, eos_token_id=1, pad_token_id=2)
        model = target_module.fresh_target(shape, tokenizer)
        assert isinstance(model, type(AutoModelForCausalLM.from_config(model.config)))
    assert 150e6 <= sum(weight.numel() for weight in model.parameters()) <= 400e6
