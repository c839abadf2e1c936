"""A draft extracted from DeepSpeed's state keeps its training options in every output format."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_tokenizer import byte_tokenizer
from training_fixtures import make_target, single_rank_config, write_texts
from typer.testing import CliRunner

from longspec.cli.app import app
from longspec.errors import UserError
from longspec.models.draft_files import draft_settings, load_draft
from longspec.models.draft_layer import DraftOptions
from longspec.models.target_sample import take_sample
from longspec.train.checkpoint import save_checkpoint
from longspec.train.engine import build_engine, build_pair
from longspec.train.inputs import read_inputs
from longspec.train.markers import Progress, Run
from longspec.train.resume import with_draft_options


def test_the_options_of_training_survive_extraction(one_rank: None, tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    write_texts(tmp_path / "texts.jsonl", count=3)
    config = single_rank_config(tmp_path, "model.window=48", "model.kv_layers=[1]", "model.target_feature=true")
    engine = build_engine(config, build_pair(config, None))
    save_checkpoint(engine, byte_tokenizer(), config, Progress(1, 1), Run())
    out = tmp_path / "out"
    trained = load_draft(out / "checkpoint-last")
    for form in ("alone/draft.pth", "folder", "hub"):
        more = ["--hf"] if form == "hub" else []
        given = [f"{out}/last_ds", f"{tmp_path}/{form}", *more]
        assert CliRunner().invoke(app, ["extract", *given]).exit_code == 0
        draft = load_draft(tmp_path / form)
        assert all(torch.equal(weight, trained[name]) for name, weight in draft.items())
        assert draft_settings(tmp_path / form).options == DraftOptions(48, (1,), True)
        assert draft_settings(tmp_path / form).target == take_sample(engine.module, str(tmp_path / "target"))
        stage = replace(config, draft_model_name_or_path=str(tmp_path / form))
        plain = replace(stage, model=replace(config.model, kv_layers=[], target_feature=False))
        for state, saved in ((None, str(tmp_path / form)), (out / "last_ds", None)):
            assert with_draft_options(plain, state, saved) == with_draft_options(stage, state, saved) == stage
            with pytest.raises(
                UserError, match=r"^config key model\.kv_layers: \(0,\), but the draft at .* has \(1,\);"
            ):
                with_draft_options(replace(stage, model=replace(config.model, kv_layers=[0])), state, saved)
        assert with_draft_options(stage, None, None) == stage
        assert read_inputs(stage).draft is not None
        with pytest.raises(UserError, match=r"model\.window: 512.*trained with 48"):
            read_inputs(replace(stage, model=replace(config.model, window=512)))
