"""A training run with an EAGLE-3 draft on one rank: loss, evaluation, checkpoints, resumed run and next stage."""

import json
from pathlib import Path

import pytest
import torch
from training_fixtures import make_target, metrics, single_rank_config, write_texts

from longspec import generate
from longspec.errors import UserError
from longspec.models.draft_files import draft_settings, load_draft
from longspec.models.draft_saving import save_draft_file
from longspec.models.eagle3_options import Eagle3Options
from longspec.models.llama import LlamaGlide
from longspec.ranks.agreement import Termination
from longspec.train.checkpoint import extract_draft, read_draft
from longspec.train.config_schema import TrainConfig
from longspec.train.run import train

pytestmark = pytest.mark.usefixtures("one_rank")
STEPS = 8


def configured(work: Path, *overrides: str) -> TrainConfig:
    return single_rank_config(work, f"max_steps={STEPS}", "save_steps=100", "learning_rate=1e-2", *overrides)


def test_a_run_with_an_eagle3_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss falls. Draft and options are in the checkpoint, the state and an extracted draft of the published form.
    A resumed run and the next stage continue with them."""
    make_target(tmp_path / "target")
    write_texts(tmp_path / "texts.jsonl", count=12)
    write_texts(tmp_path / "held_out.jsonl", count=2, seed=1)
    settings = ("model.architecture=eagle3", "model.architecture_options={window: 48, steps: 3}")
    evaluation = (f"evaluation.files={tmp_path}/held_out.jsonl", "evaluation.steps=8", "evaluation.rows=2")
    train(configured(tmp_path, *settings, "model.draft_vocabulary=20", *evaluation), Termination())
    losses = [line["loss"] for line in metrics(tmp_path / "out")]
    assert len(losses) == STEPS and sum(losses[-3:]) < 3 * 0.9 * losses[0]
    last = metrics(tmp_path / "out")[-1]
    assert last["eval_acceptance_length"] >= 1 and 0 < last["eval_top1_lag_1"] < 1

    extract_draft(tmp_path / "out" / "last_ds", tmp_path / "hf", hf=True)
    saved = load_draft(tmp_path / "out" / "checkpoint-last")
    for draft in (read_draft(tmp_path / "out" / "last_ds"), load_draft(tmp_path / "hf")):
        assert draft.keys() == saved.keys() and all(torch.equal(draft[name], saved[name]) for name in saved)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    options = Eagle3Options(window=48, steps=3)
    assert all(draft_settings(tmp_path / name).options == options for name in ("hf", "out/checkpoint-last"))
    pair = LlamaGlide.from_pretrained(tmp_path / "target", glide_path=tmp_path / "hf")
    fresh = LlamaGlide.from_pretrained(tmp_path / "target", architecture="eagle3").draft_model
    tokens = pair.draft_model.vocabulary
    assert not torch.equal(pair.draft_model.head.weight, fresh.head.weight[tokens])  # the head has trained, too
    assert generate(pair, [[5, 6, 7]], method="tree", max_new_tokens=8).stats.rounds

    with pytest.raises(UserError, match="window: an option of GLIDE"):
        LlamaGlide.from_pretrained(tmp_path / "target", glide_path=tmp_path / "hf", window=16)

    for more in (1, 2):
        train(configured(tmp_path, "resume=latest", f"max_steps={STEPS + more}", *settings), Termination())
    resumed = [line["loss"] for line in metrics(tmp_path / "out")]
    assert len(resumed) == STEPS + 2 and resumed[-1] < losses[0]
    other = (settings[0], "model.architecture_options={window: 24}")
    with pytest.raises(SystemExit):
        train(configured(tmp_path, "resume=latest", f"max_steps={STEPS + 3}", *other), Termination())
    assert "architecture_options.window: 24" in "".join(capsys.readouterr())
    draft = f"draft_model_name_or_path={tmp_path}/out/checkpoint-last/draft_model_weights.pth"
    for steps in (1, 2):
        next_stage = (draft, f"output_dir={tmp_path}/next", f"max_steps={steps}", "resume=latest")
        train(configured(tmp_path, *next_stage), Termination())
    assert draft_settings(tmp_path / "next" / "checkpoint-last").options == options
    assert load_draft(tmp_path / "next" / "checkpoint-last").keys() == saved.keys()

    # A published draft may have an embedding of its own, which the saved states would lack.
    own = saved | {"embed_tokens.weight": pair.model.embed_tokens.weight + 1}
    save_draft_file(own, tmp_path / "own.pth", options)
    started = (f"draft_model_name_or_path={tmp_path}/own.pth", f"output_dir={tmp_path}/own", "max_steps=1")
    with pytest.raises(UserError, match=r"embed_tokens\.weight, which does not train"):
        train(configured(tmp_path, *started), Termination())
