"""All experiments compose to valid configurations, and an error names its key."""

import math
import re
from dataclasses import is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import deepspeed
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from pairs import make_pair, tiny_config
from training_fixtures import NEEDS_MUON, ROOT, TINY, make_target, write_texts

from longspec.errors import UserError
from longspec.longbench.command import parse_options
from longspec.train import recipe
from longspec.train.checkpoint import locate
from longspec.train.config import compose_config, load_config, readable, to_yaml, typed
from longspec.train.config_schema import CONFIG_NAME, TrainConfig
from longspec.train.engine import cosine_with_warmup, engine_config

EXP = ROOT / "conf" / "exp"
# The others follow another recipe; test_pipeline_settings.py composes those of the experiments.
EXPERIMENTS = sorted(file.stem for name in ("qwq", "llama8b", "tiny") for file in EXP.glob(f"{name}_*.yaml"))
LONG = "longv2-32k-zero3_5e-6-ligce-nomask"
STAGES = ("", f"_{LONG}", f"_{LONG}_longcot_5e-6")
CONTRACT = [f"qwq_glide_8gpu_slim6b{variant}{stage}" for variant in ("", "_sinkpi-slicing") for stage in STAGES]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "target", "qwen2")


@pytest.fixture
def paths(tmp_path: Path, target: Path) -> list[str]:
    """The overrides that every tiny experiment needs."""
    write_texts(tmp_path / "data.jsonl", count=3)
    return [f"model_name_or_path={target}", f"data.files={tmp_path}/data.jsonl", f"output_dir={tmp_path}/out"]


def load(name: str, *overrides: str, folder: str | Path = EXP):  # type: ignore[no-untyped-def]
    return load_config(["--local_rank=1", "-cp", str(folder), "-cn", name, *overrides])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_checks(name: str, paths: list[str]) -> None:
    config = load(name, *paths)
    stage3 = "longcot" in name or "stage3" in name
    stage2 = not stage3 and ("longv2" in name or "stage2" in name)
    assert config.variant.name == ("sinkpi-slicing" if "sinkpi" in name else "base")
    assert config.deepspeed.zero_optimization["stage"] == (3 if stage2 or stage3 else 1)
    assert config.data.answer_only == stage3
    assert (config.draft_model_name_or_path is None) == (not stage2 and not stage3)
    assert ("Qwen2Glide" in config.model._target_) == ("llama8b" not in name)
    assert engine_config(config)["optimizer"]["params"]["betas"] == [0.9, 0.95]


def test_published_numbers() -> None:
    """Rates, batches, lengths of the published stages. Each starts from the draft before; other processes tokenize."""
    assert {other for name in CONTRACT for other in (name, name.replace("qwq", "llama8b"))} <= set(EXPERIMENTS)
    for variant in ("", "_sinkpi-slicing"):
        stages = [typed(compose_config(EXP, name)) for name in CONTRACT if ("sinkpi" in name) == bool(variant)]
        batches = [(c.per_device_train_batch_size, c.gradient_accumulation_steps) for c in stages]
        assert batches == [(2, 128), (1, 8), (1, 32)]
        assert [c.learning_rate for c in stages] == [5e-4, 5e-6, 5e-6]
        assert [c.data.max_length for c in stages] == [1024, 32768, 32768]
        for before, after in pairwise(stages):
            assert after.draft_model_name_or_path == f"{before.output_dir}/checkpoint-last/draft_model_weights.pth"
        for c in stages:
            assert c.model_name_or_path == "Qwen/QwQ-32B-Preview"
            assert c.data.num_proc > 1 and c.data.num_workers > 0
            assert (c.weight_decay, c.max_grad_norm, c.warmup_ratio, c.seed, c.save_steps) == (0.1, 1.0, 0.1, 42, 200)


def test_experiments_compose_with_plain_hydra_and_any_path(monkeypatch: pytest.MonkeyPatch, paths: list[str]) -> None:
    """conf/exp is the config root, and plain Hydra must find the groups from there."""
    with initialize_config_dir(str(EXP), version_base=None):
        assert compose(CONTRACT[-1]).model_name_or_path == "Qwen/QwQ-32B-Preview"
    monkeypatch.chdir(ROOT)
    assert load(TINY, *paths, folder="conf/exp/") == load(TINY, *paths, folder="conf/exp")


SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936}


@pytest.mark.parametrize(
    ("target_shape", "machine", "expected"),
    [
        # The recipe of the embedded draft (conf/exp/smollm2_glide_stage1_sinkpi-slicing.yaml).
        (("llama", SMOLLM2), (80, 1), ("muon", 4e-3, [18], 16384, 16, 1)),
        (("llama", SMOLLM2), (80, 8), ("muon", 4e-3, [18], 16384, 2, 1)),
        (("qwen3", QWEN3_8B), (80, 1), ("muon", 1.5e-3, [21], 32768, 8, 2)),
        (("mistral", QWEN3_8B | {"vocab_size": 32000}), (24, 1), ("muon", 1.5e-3, [21], None, 2, 8)),
        (("qwen2", {"num_hidden_layers": 1}), (0, 1), ("adamw", 4.2e-3, [], None, 16, 1)),
    ],
)
@NEEDS_MUON
def test_your_model_scales_the_recipe_to_target_and_device(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_shape: Any, machine: Any, expected: Any
) -> None:
    """machine: GiB of a GPU, 0 for a CPU, and number of GPUs."""
    (family, shape), (memory, gpus) = target_shape, machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: memory > 0)
    properties = SimpleNamespace(total_memory=memory * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(recipe, "launched_ranks", lambda: (0, gpus))
    tiny_config(family, **shape).save_pretrained(tmp_path / "target")
    named = f"model_name_or_path={tmp_path}/target"
    config = load("your-model", *paths, named)
    assert config.model._target_ == f"longspec.{family.capitalize()}Glide.from_pretrained"
    assert config.model.torch_dtype == ("bfloat16" if memory else "float32")
    model, batch = config.model, (config.per_device_train_batch_size, config.gradient_accumulation_steps)
    assert (config.optimizer, config.learning_rate, model.kv_layers, model.draft_vocabulary, *batch) == expected
    # What is given stands, and the rest follows from it; a draft to start or resume from keeps its architecture.
    given = load("your-model", *paths, named, "per_device_train_batch_size=1", "learning_rate=7e-3")
    assert given.gradient_accumulation_steps == math.prod(batch) and given.learning_rate == 7e-3
    assert load("your-model", *paths, named, "resume=latest").model.kv_layers == model.kv_layers
    (tmp_path / "run" / "last_ds").mkdir(parents=True)
    for more in (["draft_model_name_or_path=x.pth"], ["resume=latest", f"output_dir={tmp_path}/run"]):
        later = load("your-model", *paths, named, *more).model
        assert (later.kv_layers, later.draft_vocabulary) == ([], None)


def test_the_recipe_takes_more_epochs_of_less_data() -> None:
    """20,000 conversations of 300 tokens are some 6,000 rows."""
    assert [recipe.recipe_steps(rows, 16) for rows in (16, 160, 1600, 6000, 10**6)] == [24, 240, 1000, 3000, 6000]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("foo=1", "config key foo: no such key; docs/config.md lists all keys"),
        ("++learning_rat=1", "config key learning_rat: no such key; did you mean learning_rate?"),
        ("window=64", "config key window: no such key; did you mean model.window?"),
        (f"max_steps={10**400}", "max_steps"),
        ("save_steps=true", "config key save_steps: must be a valid integer, not True"),
        ("model.kv_layers=[1.0]", "config key model.kv_layers.0: must be a valid integer, not 1.0"),
        ("adam_betas=0.9", "config key adam_betas: must be a valid list, not 0.9"),
        ("adam_betas=[0.9]", "config key adam_betas: List should have at least 2 items"),
        ("resume=newest", "config key resume: must be 'latest' or null, not 'newest'"),
        ("~wandb.mode", "config key wandb.mode: not set; give wandb.mode=VALUE"),
        ("loss=mse", "loss"),
        ("deepspeed=zero9", "config key deepspeed: no 'zero9'; there are: zero1"),
        ("your-model; model_name_or_path=???; data.files=???", "key data.files, model_name_or_path: not set; give"),
        ("model.torch_dtype=int8", "model.torch_dtype"),
        ("+deepspeed.zero_optimisation.stage=1", "deepspeed.zero_optimisation"),
        ("+deepspeed.zero_optimization.offload_optimizer.device=nvme", "offload_optimizer.device"),
        ("deepspeed.zero_optimization.stage=4", "deepspeed.zero_optimization.stage"),
        ("model_name_or_path=null", "model_name_or_path"),
        ("learning_rate=nan", "learning_rate"),
        ("model.attn_implementation=flash", "attn_implementation"),
        ("evaluation.keep_best=true", "evaluation.keep_best"),
        ("data.files=[nowhere.jsonl]", "nowhere.jsonl"),
        ("evaluation.files=${data.files}", "evaluation.files"),
        # Before other values follow from it:
        ("your-model; model_name_or_path=???", "model_name_or_path: not set; give model_name_or_path=VALUE"),
        ("your-model; learning_rate=${rate}", "config key learning_rate: Interpolation key 'rate' not found"),
        ("your-model; data.max_length=long", "config key data.max_length"),
        ("your-model; model_name_or_path=nowhere/at/all", "nowhere/at/all"),
        ("no_such_experiment", "no_such_experiment"),
        ("model.draft_vocabulary=0", "model.draft_vocabulary: must be greater than 0, not 0"),
        ("model.architecture=eagle4", "no draft architecture 'eagle4'"),
        ("model.architecture=eagle3; model.kv_layers=[1]", "model.kv_layers: not for the architecture eagle3"),
        ("model.architecture=eagle3; model.architecture_options.window=3", "options.window: 3"),
        ("model.architecture_options.window=3", "model.architecture_options: not for the architecture glide"),
    ],
)
def test_a_wrong_key_or_value_is_named(given: str, key: str, paths: list[str]) -> None:
    overrides = [part for part in given.split("; ") if "=" in part or part.startswith("~")]
    name = TINY if given == "; ".join(overrides) else given.partition("; ")[0]
    with pytest.raises(UserError) as error:
        load(name, *paths, *overrides)
    assert key in str(error.value) and "\n" not in str(error.value)


@NEEDS_MUON
def test_muon_is_refused_if_deepspeed_does_not_train_with_it(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    muon = [*paths, "optimizer=muon", "model.torch_dtype=bfloat16"]
    assert engine_config(load(TINY, *muon))["optimizer"]["type"] == "Muon"
    offload = "+deepspeed.zero_optimization.offload_optimizer.device=cpu"
    for other in ("model.torch_dtype=float32", "deepspeed=zero2", "deepspeed=zero3", "tp_size=2", offload):
        with pytest.raises(UserError, match="key optimizer: muon needs ZeRO-1"):
            load(TINY, *muon, other)
    monkeypatch.setattr(deepspeed, "__version__", "0.19.7")
    with pytest.raises(UserError, match=r"key optimizer: must be adamw with deepspeed < 0\.19\.8"):
        load(TINY, *muon)


ODD_NAMES = ("run=3", "it's", "v[1]", "[x]", "ü", "日本", "a,b", "(1) {2}", 'a "b"', "#1", "a&b", "back\\slash'")


def test_a_path_may_hold_any_character(paths: list[str], tmp_path: Path) -> None:
    """As a value of its own and in a list, where a user separates paths by commas and quotes a path with one."""
    parser = OverridesParser.create()
    for path in (f"in/{name}" for name in ODD_NAMES):
        listed = f"'{path}'" if "," in path else path
        for text, value in ((path, path), (f"[{listed}, b.jsonl]", [path, "b.jsonl"])):
            assert parser.parse_override(readable(f"data.files={text}")).value() == value
    folder = tmp_path / "".join(ODD_NAMES).replace("/", "")
    folder.mkdir()
    assert load(TINY, *paths[:2], f"output_dir={folder}").output_dir == str(folder)


def test_numbers_of_the_environment_are_text(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("STEPS", "8"), ("RATE", "1e-4")):
        monkeypatch.setenv(name, text)
    keys = ["max_steps=${oc.env:STEPS}", "learning_rate=${oc.env:RATE}", "adam_betas=[${oc.env:RATE},0.9]"]
    config = load(TINY, *paths, *keys)
    assert (config.max_steps, config.learning_rate, config.adam_betas) == (8, 1e-4, [1e-4, 0.9])


def test_the_checks_create_no_output_folder(paths: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no_such_folder"):
        load(TINY, *paths, folder=tmp_path / "no_such_folder")
    load(TINY, *paths)
    assert not (tmp_path / "out").exists()


def test_a_window_exceeds_the_depth_that_is_trained(paths: list[str]) -> None:
    load(TINY, *paths, "model.window=6", "variant.depth=5")
    for window, variant in ((5, "variant.depth=5"), (4, "variant=base")):
        problem = rf"key model\.window: {window}; it must be greater than the largest trained lag, {window}"
        with pytest.raises(UserError, match=problem):
            load(TINY, *paths, f"model.window={window}", variant)


def test_saved_pairs_and_checkpoints_bring_their_drafts_to_training(paths: list[str], tmp_path: Path) -> None:
    """A checkpoint's draft replaces the experiment's default, but not one given on the command line."""
    config = load(TINY, *paths)
    make_pair(tmp_path / "target").save_pretrained(tmp_path / "pair")
    for name, draft in (("target", None), ("pair", str(tmp_path / "pair" / "draft"))):
        located = locate(replace(config, model_name_or_path=str(tmp_path / name)))
        assert located.draft_model_name_or_path == draft
    given = replace(config, model_name_or_path=str(tmp_path / "pair"), draft_model_name_or_path="given.pth")
    assert locate(given).draft_model_name_or_path == "given.pth"
    (tmp_path / CONFIG_NAME).write_text(to_yaml(config))
    stage2, target = "tiny_glide_stage2_sinkpi-slicing", f"model_name_or_path={tmp_path}"
    assert load(stage2, *paths).draft_model_name_or_path is not None
    assert load(stage2, *paths[1:], target).draft_model_name_or_path is None
    assert load(stage2, *paths[1:], target, "draft_model_name_or_path=x").draft_model_name_or_path == "x"


def test_every_key_and_flag_is_documented_and_print_config_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    documented = set(re.findall(r"`([^`]+)`", (ROOT / "docs" / "config.md").read_text()))
    keys = set()
    for name, kind in get_type_hints(TrainConfig).items():
        keys |= {f"{name}.{inner}" for inner in get_type_hints(kind)} if is_dataclass(kind) else {name}
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    options = capsys.readouterr().out.partition("\nexamples:")[0]
    flags = set(re.findall(r"--\w+", options)) - {"--help", "--no"}
    assert not (keys | flags) - documented
    assert load(TINY, "--cfg", "job") is None
    assert "gradient_accumulation_steps: 2" in capsys.readouterr().out


def test_schedule_warms_up_then_falls_to_zero() -> None:
    factor = cosine_with_warmup(100, 0.1)
    assert [factor(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factor(10) == 1 and factor(55) == pytest.approx(0.5)
    assert 0 < factor(99) < 0.001 and factor(100) == pytest.approx(0)
    assert all(cosine_with_warmup(1, ratio)(0) == 1 for ratio in (0, 0.1, 1))
