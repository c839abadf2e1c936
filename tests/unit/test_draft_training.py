"""A run with each kind of draft on one rank: loss, evaluation, checkpoints, extracted drafts, resuming, next stage."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizer import SPECIAL_TOKENS, byte_tokenizer
from training_fixtures import make_work, metrics, refused_training, single_rank_config
from typer.testing import CliRunner

from longspec import generate
from longspec.cli.app import app
from longspec.errors import UserError
from longspec.models.draft_files import draft_settings, list_size, load_draft
from longspec.models.draft_layer import DraftOptions
from longspec.models.draft_saving import save_draft_file
from longspec.models.draft_vocabulary import listed_tokens
from longspec.models.eagle3_options import Eagle3Options
from longspec.models.llama import LlamaGlide
from longspec.models.target_files import read_config
from longspec.models.target_sample import take_sample
from longspec.ranks.agreement import Termination
from longspec.replacing import write_atomically
from longspec.train.checkpoint import read_draft
from longspec.train.config_schema import TrainConfig
from longspec.train.engine import build_pair
from longspec.train.inputs import check_list_split, read_inputs
from longspec.train.resume import with_draft_options
from longspec.train.run import train

pytestmark = pytest.mark.usefixtures("one_rank")
SIZE = 12
STEPS = 8
GLIDE = ("model.window=48", "model.kv_layers=[1]", "model.target_feature=true", "model.gradient_checkpointing=true")
EAGLE3 = ("model.architecture=eagle3", "model.architecture_options={window: 48, steps: 3}")
SETTINGS: dict[str, tuple[str, ...]] = {
    "glide": ("loss=ce",),
    "glide with options": (*GLIDE, "loss=mixed"),
    "eagle3": EAGLE3,
}
OPTIONS: dict[str, Any] = {
    "glide": DraftOptions(),
    "glide with options": DraftOptions(48, (1,), True),
    "eagle3": Eagle3Options(window=48, steps=3),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_work(tmp_path_factory.mktemp("data"), texts=12, held_out=4, tie_word_embeddings=True)


@pytest.fixture
def work(data: Path, tmp_path: Path) -> Path:
    for file in data.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def configured(work: Path, *overrides: str) -> TrainConfig:
    return single_rank_config(work, f"max_steps={STEPS}", "save_steps=100", "learning_rate=1e-2", *overrides)


def most_frequent_bytes(file: Path) -> list[int]:
    """EOS, then the most frequent bytes of the texts, SIZE in all, ascending."""
    tokenizer = byte_tokenizer()
    counts: Counter[int] = Counter()
    for line in file.read_text().splitlines():
        counts.update(tokenizer(json.loads(line)["text"])["input_ids"])
    assert not set(counts) & set(range(len(SPECIAL_TOKENS)))
    best = sorted(counts, key=lambda token: (-counts[token], token))[: SIZE - 1]
    return sorted([tokenizer.eos_token_id, *best])


@pytest.mark.parametrize(
    ("kind", "zero"), [*((kind, "zero1") for kind in SETTINGS), pytest.param("glide", "zero3", marks=pytest.mark.slow)]
)
def test_a_run(work: Path, kind: str, zero: str) -> None:
    """The loss falls. Weights, options, the list of the data's tokens and the target's sample are in checkpoints, the
    state, and extracted drafts of each form. A resumed run and the next stage, on other data, continue with them."""
    out, key = work / "out", f"model.draft_vocabulary={SIZE}"
    settings = (*SETTINGS[kind], f"deepspeed={zero}")
    evaluation = (f"evaluation.files={work}/held_out.jsonl", "evaluation.steps=4", "evaluation.rows=2")
    train(configured(work, key, *settings, *evaluation, "evaluation.keep_best=true"), Termination())
    losses = [line["loss"] for line in metrics(out)]
    assert len(losses) == STEPS and sum(losses[-3:]) < 0.9 * sum(losses[:3])
    last = metrics(out)[-1]
    assert last["eval_acceptance_length"] >= 1 and 0 < last["eval_top1_lag_1"] < 1

    saved = load_draft(out / "checkpoint-last")
    sample = take_sample(build_pair(configured(work), None), str(work / "target"))
    forms = {form: [f"{work}/{form}"] for form in ("alone/draft.pth", "folder")} | {"hf": [f"{work}/hf", "--hf"]}
    for form, arguments in forms.items():
        assert CliRunner().invoke(app, ["extract", f"{out}/last_ds", *arguments]).exit_code == 0
        assert draft_settings(work / form).target == sample
    for draft in (read_draft(out / "last_ds"), *(load_draft(work / form) for form in forms)):
        assert draft.keys() == saved.keys() and all(torch.equal(draft[name], saved[name]) for name in saved)
    pair = LlamaGlide.from_pretrained(work / "target", glide_path=work / "hf")
    assert generate(pair, [[5, 6, 7]], method="tree", tree_shape=(3, 4), max_new_tokens=8).stats.rounds

    train(configured(work, "resume=latest", f"max_steps={STEPS + 1}", *settings), Termination())
    assert len(metrics(out)) == STEPS + 1 and metrics(out)[-1]["loss"] < losses[0]
    before = load_draft(out / "checkpoint-last")
    next_stage = (f"data.files={work}/held_out.jsonl", f"output_dir={work}/next", "max_steps=1", "learning_rate=1e-9")
    draft_file = f"draft_model_name_or_path={out}/checkpoint-last/draft_model_weights.pth"
    own = SETTINGS[kind] if kind == "glide with options" else ()
    train(configured(work, *next_stage, draft_file, key, f"deepspeed={zero}", *own), Termination())
    torch.testing.assert_close(load_draft(work / "next" / "checkpoint-last"), before, rtol=0, atol=1e-6)

    tokens = most_frequent_bytes(work / "texts.jsonl")
    for folder in (out / "checkpoint-last", out / "checkpoint-best", work / "next" / "checkpoint-last", work / "hf"):
        assert draft_settings(folder).options == OPTIONS[kind]
        assert listed_tokens(load_draft(folder)["d2t"]).tolist() == tokens


def test_what_contradicts_the_draft_is_one_line(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(configured(work, "model.draft_vocabulary=40", "max_steps=1", *GLIDE), Termination())
    out, other = work / "out", f"output_dir={work}/other"
    file = f"{out}/checkpoint-last/draft_model_weights.pth"
    assert list_size(out / "checkpoint-last") == 40
    for more in (("resume=latest",), (f"draft_model_name_or_path={file}", other)):
        line = refused_training(configured(work, "model.draft_vocabulary=30", *GLIDE, *more), capsys)
        assert line.startswith("error: config key model.draft_vocabulary: 30, but the draft at ")
        assert line.endswith(" has 40; omit it")
    vocab = read_config(work / "target").vocab_size
    too_many = configured(work, f"model.draft_vocabulary={vocab}", other)
    assert f"only {vocab} tokens" in refused_training(too_many, capsys)

    stage = replace(configured(work, *GLIDE, "model.draft_vocabulary=40"), draft_model_name_or_path=file)
    plain = replace(stage, model=replace(stage.model, window=512, kv_layers=[], target_feature=False))
    wrong = replace(stage, model=replace(stage.model, kv_layers=[0]))
    for state, draft in ((None, file), (out / "last_ds", None)):
        assert with_draft_options(plain, state, draft) == with_draft_options(stage, state, draft) == stage
        with pytest.raises(UserError, match=r"^config key model\.kv_layers: \[0\], but the draft at .* has \[1\];"):
            with_draft_options(wrong, state, draft)
        deep = replace(plain, variant=replace(plain.variant, depth=plain.model.window))
        with pytest.raises(UserError, match=r"^config key variant\.depth: 512 levels, but the draft's window is "):
            with_draft_options(deep, state, draft)
    assert with_draft_options(stage, None, None) == stage and read_inputs(stage).draft is not None


def test_an_eagle3_draft_has_published_form_and_its_own_head(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(configured(work, *EAGLE3, "max_steps=1"), Termination())
    weights = ("pytorch_model.bin", "consolidated.00.pth", "q4.GGUF", "model-00001-of-00002.safetensors")
    for name in weights:
        write_atomically(work / name / name, "", make_folder=True)
    for name, held in {"target": "config.json", **{name: name for name in weights}, "hf": None, "hf/": None}.items():
        done = CliRunner().invoke(app, ["extract", f"{work}/out/last_ds", f"{work}/{name}", "--hf"])  # replaces drafts
        assert str(done.exception).startswith(f"{work}/{name}: holds {held}, which is not of a draft") or held is None
        assert done.exit_code == (held is not None)
    (work / "hf/config.json").unlink()  # a kill can leave the weights alone
    assert CliRunner().invoke(app, ["extract", f"{work}/out/last_ds", f"{work}/hf", "--hf"]).exit_code == 0
    assert json.loads((work / "hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    pair = LlamaGlide.from_pretrained(work / "target", glide_path=work / "hf")
    fresh = LlamaGlide.from_pretrained(work / "target", architecture="eagle3").draft_model
    assert not torch.equal(pair.draft_model.head.weight, fresh.head.weight)
    assert LlamaGlide.from_pretrained(work / "target", glide_path=work / "hf", window=16).draft_model.window == 16
    with pytest.raises(UserError, match="mlp_size: eagle3 has no such option"):
        LlamaGlide.from_pretrained(work / "target", glide_path=work / "hf", mlp_size=16)
    other = (EAGLE3[0], "model.architecture_options={window: 24}", "resume=latest")
    assert "architecture_options.window: 24" in refused_training(configured(work, *other), capsys)

    # A published draft may have an embedding of its own, which the saved states would lack.
    own = load_draft(work / "hf") | {"embed_tokens.weight": pair.model.embed_tokens.weight + 1}
    save_draft_file(own, work / "own.pth", Eagle3Options(window=48, steps=3))
    started = (f"draft_model_name_or_path={work}/own.pth", f"output_dir={work}/own", "max_steps=1")
    with pytest.raises(UserError, match=r"embed_tokens\.weight, which does not train"):
        train(configured(work, *started), Termination())


def test_every_rank_of_a_split_head_needs_tokens_of_the_list() -> None:
    tokens = torch.tensor([0, 3, 7])
    check_list_split(tokens, 8, 2)
    with pytest.raises(UserError, match=r"tp_size: 4; the draft's vocabulary of 3 tokens has none of rank 2's, 4 … 5"):
        check_list_split(tokens, 8, 4)
