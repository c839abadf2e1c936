"""The trainer on one rank: the engine's inputs, the order of a step, the unchanged target, and probes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from calls import noted
from training_fixtures import NEEDS_MUON, make_work, overrides_of, single_rank_config, tiny_config, write_answers

from longspec.data.collators import Collator
from longspec.errors import UserError
from longspec.models.draft_layer import GlideDecoderLayer
from longspec.train import resume
from longspec.train import trainer as trainer_module
from longspec.train.config_schema import TrainConfig
from longspec.train.engine import build_engine, build_pair
from longspec.train.inputs import Inputs, read_inputs
from longspec.train.positions import anchor_offset_positions, micro_step_generator, random_lags
from longspec.train.probe import probe
from longspec.train.resume import last_step
from longspec.train.trainer import Trainer

SEGMENTS = torch.tensor([0, 9, 16, 32], dtype=torch.int32)
MAX_POSITIONS = 4096


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and data."""
    folder = make_work(tmp_path_factory.mktemp("work"))
    write_answers(folder / "answers.jsonl")
    return folder


@pytest.fixture
def load(work: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """The tiny first stage."""
    return lambda *overrides: tiny_config(*overrides_of(work, tmp_path / "out", *overrides))


def handed_over(config: TrainConfig, rank: int, micro_step: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The engine's arguments for one micro-batch of 2 x 16 tokens on `rank`."""
    monkeypatch.setattr(trainer_module, "data_parallel_rank_and_size", lambda: (rank, 2))
    inputs = Inputs([[]], None, Collator(0), None, None, MAX_POSITIONS)  # type: ignore[arg-type]
    tokens = torch.arange(32).view(2, 16)
    batch = {"input_ids": tokens, "labels": tokens + 1, "cu_seqlens": SEGMENTS}
    pair = SimpleNamespace(draft_model=SimpleNamespace(vocabulary=None, trained_lags=None))
    trainer = Trainer(config, SimpleNamespace(device=torch.device("cpu"), module=pair), inputs, total_steps=1)
    return trainer.steps.micro_batch_inputs(micro_step, batch)


def test_slicing_draws_positions_and_lags_by_seed_step_and_rank(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions jump after the sinks, lags cover 1 … 5, and each micro-step of each rank has its own draw. The base
    variant has contiguous positions and no lags."""
    config = load("seed=3")
    lags, offsets, streams = set(), set(), set()
    for rank in (0, 1):
        for micro_step in range(30):
            given = handed_over(config, rank, micro_step, monkeypatch)
            generator = micro_step_generator(3, micro_step, rank)
            positions = anchor_offset_positions(SEGMENTS, (2, 16), 15000, MAX_POSITIONS, generator)
            assert torch.equal(given["position_ids"], positions)
            assert torch.equal(given["lags"], random_lags(3, 5, generator))
            assert torch.equal(given["labels"], given["input_ids"] + 1) and given["cu_seqlens"] is SEGMENTS
            lags |= set(given["lags"].tolist())
            offsets.add(int(positions[0, 4]) - 4)
            streams.add((*positions.flatten().tolist(), *given["lags"].tolist()))
    assert lags == {1, 2, 3, 4, 5}
    assert len(streams) == 60 and max(offsets) > 1000
    base = handed_over(load("variant=base"), 0, 0, monkeypatch)
    assert base["lags"] is None and base["position_ids"].flatten().tolist() == [*range(9), *range(7), *range(16)]


def test_bf16_keeps_rotary_frequencies_and_master_weights_in_fp32(load: Any, one_rank: None) -> None:
    """Some versions of transformers leave frequencies in bf16 under ZeRO-3, which would shift distant positions.
    Without fp32 master weights a small step would be rounded away."""
    config = load("model.torch_dtype=bfloat16")
    pair: Any = build_pair(config, None)
    frequencies = pair.model.rotary_emb.inv_freq.clone()
    pair.model.rotary_emb.to(torch.bfloat16)
    engine: Any = build_engine(config, pair)
    assert engine.module.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(engine.module.model.rotary_emb.inv_freq.cpu(), frequencies.cpu())
    assert {weight.dtype for weight in engine.module.parameters()} == {torch.bfloat16}
    masters = [weight for group in engine.optimizer.optimizer.param_groups for weight in group["params"]]
    assert masters and {weight.dtype for weight in masters} == {torch.float32}


def test_a_fresh_draft_is_the_same_in_every_dtype(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers drawn in bf16 would differ, on some machines only, so the dtype of the draws is checked, too."""
    dtypes = lambda draft, std: {weight.dtype for weight in draft.parameters()}  # noqa: E731
    drawn = noted(monkeypatch, GlideDecoderLayer, "reset_parameters", dtypes)
    pairs: list[Any] = [build_pair(load(f"model.torch_dtype={name}"), None) for name in ("float32", "bfloat16")]
    exact, rounded = (list(pair.draft_model.parameters()) for pair in pairs)
    assert all(torch.equal(one.bfloat16(), other) for one, other in zip(exact, rounded, strict=True))
    assert set.union(*drawn) == {torch.float32}


def test_under_zero_3_the_target_is_built_in_shards(load: Any, one_rank: None) -> None:
    """No rank holds the whole target. Weights, buffers and the fresh draft are the same as without ZeRO-3."""
    whole: Any = build_pair(load(), None)
    pair: Any = build_pair(load("deepspeed=zero3"), None)
    frozen = {name: weight for name, weight in pair.named_parameters() if not weight.requires_grad}
    assert len(frozen) == 30 and not any(weight.numel() for weight in frozen.values())
    for name, weight in whole.named_parameters():
        sharded = pair.get_parameter(name)
        with deepspeed.zero.GatheredParameters(sharded, enabled=name in frozen):
            assert torch.equal(sharded.cpu(), weight), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(pair.get_buffer(name).cpu(), buffer), name
    assert not any(hasattr(weight, "ds_id") for weight in build_pair(load(), None).parameters())


def test_a_run_that_goes_on_after_its_last_step_is_refused(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 rows per step, 20 rows are 2.5 steps."""
    monkeypatch.setattr(trainer_module, "data_parallel_rank_and_size", lambda: (0, 1))
    monkeypatch.setattr(resume, "data_parallel_rank_and_size", lambda: (0, 1))
    assert last_step(load("num_train_epochs=2"), 20, start_step=5) == 5
    for ends in ("num_train_epochs=2", "max_steps=5"):
        with pytest.raises(UserError, match="is of step 6, but this run ends with step 5"):
            last_step(load(ends), 20, start_step=6)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model._target_=longspec.train.models.llama_glide.LlamaGlyde.from_pretrained", "model._target_"),
        ("model._target_=collections.OrderedDict.fromkeys", "model._target_"),
        ("data.aligners=[{_target_: longspec.data.aligners.add_id_aligner, fields: x}]", r"data.aligners\[0\]"),
        ("tp_size=3", ".*num_key_value_heads 2 cannot be split for 3 ranks; tp_size must divide it"),
        ("eos_token_id=265", "eos_token_id"),
    ],
)
def test_what_only_the_target_or_an_import_can_tell_is_named_by_key(load: Any, override: str, key: str) -> None:
    with pytest.raises(UserError, match=rf"^(config key )?{key}.*\Z"):  # tp_size names the target
        read_inputs(load(override))


def config(work: Path, *overrides: str) -> TrainConfig:
    held_out = [f"evaluation.files={work}/answers.jsonl", "evaluation.rows=2"]
    return single_rank_config(work, "max_steps=3", *held_out, "model.torch_dtype=bfloat16", *overrides)


@NEEDS_MUON
def test_a_candidate_trains_as_if_it_were_alone(work: Path) -> None:
    """Every kind of difference is in one of the candidates, which run in both orders."""
    candidates = {
        "published": config(work),
        "layer": config(work, "model.kv_layers=[1]", "optimizer=muon", "learning_rate=1e-2"),
        "both": config(work, "model.kv_layers=[1,0]", "loss=distill", "learning_rate=1e-2"),
        "list": config(work, "model.draft_vocabulary=64", "model.mlp_size=16", "loss=acceptance"),
    }
    inputs = read_inputs(candidates["published"])
    held_out = {"short": (candidates["published"], inputs)}
    together = probe(candidates, inputs, held_out, "cpu")
    assert all(len(groups["short"]) == 2 and groups["short"][0][1] > 0 for groups in together.values())
    for name in reversed(candidates):
        assert probe({name: candidates[name]}, inputs, held_out, "cpu")[name] == together[name]


def test_candidates_that_need_other_batches_are_refused(work: Path) -> None:
    with pytest.raises(UserError, match="probe longer: data must be the same for all candidates"):
        configs = {"first": config(work), "longer": config(work, "data.max_length=64")}
        probe(configs, read_inputs(configs["first"]), {}, "cpu")
