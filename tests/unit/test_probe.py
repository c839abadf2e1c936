"""Probes: drafts that share the target's pass train as they would alone."""

from pathlib import Path

import pytest
from training_fixtures import NEEDS_MUON, make_target, single_rank_config, write_answers, write_texts

from longspec.errors import UserError
from longspec.train.config_schema import TrainConfig
from longspec.train.inputs import read_inputs
from longspec.train.probe import probe


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("probe")
    make_target(work / "target")
    write_texts(work / "texts.jsonl")
    write_answers(work / "answers.jsonl")
    return work


def config(work: Path, *overrides: str) -> TrainConfig:
    shared = [
        "max_steps=3",
        f"evaluation.files={work}/answers.jsonl",
        "evaluation.rows=2",
        "model.torch_dtype=bfloat16",
    ]
    return single_rank_config(work, *shared, "deepspeed=zero1", *overrides)


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
