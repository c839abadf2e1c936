"""The plan of `longspec draft`: sizes that follow from target, machine and hours, and its refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pipeline_fixtures import make_chat_target
from training_fixtures import make_target
from transformers import Qwen2Config

from longspec.cli.train import CONFIGS, ROOT
from longspec.errors import UserError
from longspec.inference.load_pair import load_pair
from longspec.models.draft_files import DraftSettings
from longspec.pipeline import command, evaluation, run
from longspec.pipeline.cells import cells, prompt_digest
from longspec.pipeline.estimates import FILE_TOKENS, Estimate, Machine, Target, estimate
from longspec.pipeline.files import answers_file, prompts_file
from longspec.pipeline.induction import best_layer, layer_scores, prefix_matching
from longspec.pipeline.processes import hydra_overrides
from longspec.pipeline.settings import load_settings, settings_yaml
from longspec.pipeline.sizes import chosen_settings
from longspec.regenerate.settings import SPLITS
from longspec.replacing import write_atomically
from longspec.train.config import compose_config

Refusal = Callable[..., str]
GIB = 2**30
H100 = Machine(1, 80 * GIB, 1.0, "1 x H100")


def target(name: str, layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, **values: Any) -> Target:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": mlp}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return Target(name, Qwen2Config(**sizes, **values))


QWEN = target("qwen", 28, 1536, 8960, 12, 2, tie_word_embeddings=True)
TARGETS = {
    "135m": target("small", 30, 576, 1536, 9, 3, vocab_size=49152, max_position_embeddings=8192),
    "1.5b": QWEN,
    "8b": target("llama", 32, 4096, 14336, 32, 8, vocab_size=128256, max_position_embeddings=262144),
    "32b": target("qwq", 64, 5120, 27648, 40, 8),
}


@pytest.mark.parametrize(("size", "gpus", "hours"), [("135m", 1, 0.5), ("1.5b", 1, 0.5), ("8b", 1, 2), ("32b", 4, 2)])
def test_the_plan_fills_the_hours_and_is_a_valid_file(size: str, gpus: int, hours: float, tmp_path: Path) -> None:
    model, machine = TARGETS[size], replace(H100, gpus=gpus)
    settings = chosen_settings(model, machine, hours, 32768)
    assert 0.8 * hours < estimate(settings, model, machine).total / 3600 <= hours
    (tmp_path / "settings.yaml").write_text(settings_yaml(settings))
    assert load_settings(tmp_path / "settings.yaml") == settings
    assert list(settings.training.stages) == ["stage1", "stage2", "stage3"]
    for stage in settings.training.stages.values():
        assert stage.tokens_per_step % (stage.max_length * gpus) == 0 and stage.max_length <= model.positions
    assert settings.prompts.contexts[1] < settings.training.stages["stage2"].max_length
    assert settings.contexts == min(32768, model.positions)


def test_a_target_that_is_too_large_for_a_gpu_is_shared() -> None:
    settings = chosen_settings(TARGETS["32b"], replace(H100, gpus=4), 2, 32768)
    assert settings.tp_size == 2 and not settings.training.choose_layer
    for stage in settings.training.stages.values():
        config = compose_config(ROOT / CONFIGS, stage.config, hydra_overrides(stage.overrides))
        assert config.deepspeed.zero_optimization.stage == 3
    assert not any(method.kind == "forced" for method in settings.evaluation.methods)
    with pytest.raises(UserError, match="qwq: its weights have 61 GiB, which 1 of the GPUs here cannot share"):
        chosen_settings(TARGETS["32b"], replace(H100, memory=40 * GIB), 2, 32768)


def test_stage_1_reads_the_layer_with_the_strongest_induction_heads() -> None:
    assert best_layer(layer_scores(load_pair("smollm2-135m", device="cpu")[0].model)) == 18, "see docs/reproduce.md"
    heads = torch.stack([torch.eye(8), torch.eye(8).roll(3, 0)])  # the second attends to what followed a token before
    assert prefix_matching(heads[None]) == 1
    assert best_layer([1, 0.1, 0.1, 0.9, 0.8, 1]) == 4 and best_layer([1, 0.1, 0.1, 0.9, 0.7, 1]) == 3
    assert best_layer([1, 1, 0.1, 0.1, 0.2, 1]) is None and best_layer([1, 1]) is None


def test_stage_1_reads_about_as_many_tokens_of_source_files_as_of_the_targets_own_text() -> None:
    for hours in (0.3, 1):
        settings = chosen_settings(QWEN, H100, hours, 32768)
        tokens, seconds = (planned := estimate(settings, QWEN, H100)).tokens, planned.seconds
        assert settings.training.choose_layer and "layer" in seconds and "probes" not in seconds
        assert 1 < settings.code.train_files * FILE_TOKENS / (tokens["chat"] + tokens["answers"]) < 3, "read twice"
        assert {run.processes for run in settings.answers.values()} == {2}, "they share their processes"
        assert sorted(settings.training.stages["stage1"].answers) == ["chat", "chat", "short", "short", "source"]


def test_the_users_prompts_are_trained_on_and_measured_and_the_evaluation_of_a_draft_trains_nothing() -> None:
    settings = chosen_settings(QWEN, H100, 0.5, 32768, ["own.jsonl"], 90)
    assert settings.prompts.train["own"] == 90 and "own" in settings.answers["short"].prompts
    assert settings.evaluation.tasks["own"].contexts == [0]
    settings = chosen_settings(QWEN, H100, 0.1, 16384, draft="me/draft")
    assert settings.evaluation.draft == "me/draft" and settings.chat.train == 0 and settings.chat.test > 0
    assert not (settings.training.stages or settings.answers or settings.probes or settings.code.train_files)
    assert max(settings.evaluation.tasks["lcc"].contexts) < 16384 and settings.evaluation.methods[0].prompts > 3


def test_a_large_target_on_a_cpu_is_refused_with_an_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_chat_target(tmp_path / "target")
    monkeypatch.setattr(run, "ask", lambda: pytest.fail("asked before the refusal"))
    monkeypatch.setattr(Target, "read", classmethod(lambda cls, name, path: replace(QWEN, name=name)))
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: Machine(0, 16 * GIB, 1e-4, "2 CPU cores")))
    root = tmp_path / "out"
    line = refusal(command.main, [str(folder), "--output_dir", str(root)])
    assert not root.exists()
    assert "this would take about" in line and "hours on 2 CPU cores, more than twice --hours; run it on a" in line
    for more in ("hours=1e9", "seed=0"):  # the first one allows it
        command.main([str(folder), "--output_dir", str(root), "--dry_run", more])
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: the plan is for this machine, where the run is refused: ")
    assert note.endswith(line.removeprefix("error: "))


def test_a_target_that_cannot_be_trained_for_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    """One that is quantized, one without a chat template, and one with few positions."""
    file, plain = make_chat_target(tmp_path / "target") / "config.json", make_target(tmp_path / "plain")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    quantized = "is quantized; train the draft for the unquantized weights"
    short, few = make_target(tmp_path / "short", max_position_embeddings=1023), "1023 positions, fewer than the 1024"
    for folder, problem in {file.parent: quantized, plain: "has no chat template", short: few}.items():
        assert problem in refusal(command.main, [str(folder), "--yes", "--output_dir", str(tmp_path / "out")])
        assert not (tmp_path / "out").exists()


def test_a_dry_run_prints_a_file_for_config_and_the_folder_of_another_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With absolute paths, because the trainer runs in another folder."""
    folder = make_chat_target(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    command.main(["target", "--dry_run", "seed=7"])
    (file := tmp_path / "settings.yaml").write_text(capsys.readouterr().out)
    settings = load_settings(file)
    assert (settings.seed, settings.hours, settings.target) == (7, 0.5, str(folder))
    assert file.read_text().startswith(f"# target: {folder}, llama, ")
    error = refusal(command.main, [str(folder), "--output_dir", str(tmp_path), "--hours", "2", "--yes"])
    assert "holds a run with hours 0.5, not 2.0; choose another --output_dir" in error
    command.main([str(folder), "--output_dir", "new", "--dry_run", "training.architecture=eagle3"])  # with chosen sizes
    # More contexts than the target has positions are the same plan.
    command.main([str(folder), "--output_dir", str(tmp_path), "--contexts", "999999", "--dry_run"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target=x", "target=x: not an override; the argument TARGET names the target"),
        ("benchmarks=/nope", "config key benchmarks: /nope: no such folder"),
        ("code.folders=[/nope]", "config key code.folders: /nope: no such folder"),
        ("training.stages.stage1.overrides.foo=1", "config key training.stages.stage1.overrides.foo: no such key"),
        ("training.stages.stage2.overrides.max_steps=null", "stages.stage2.overrides.max_steps: null; omit it"),
        ("training.stages.stage2.overrides.model.window=1", "stages.stage2.overrides.model.window: 1; it must"),
        ("probes.layers.shared.foo=1", "config key probes.layers.shared.foo: no such key"),
        ("probes.layers.candidates.x={model.kv_layers: [99]}", "candidates.x.model.kv_layers: the draft's"),
        ("evaluation.methods=[{name: seq, prompts: 1, gamma: 600}]", "methods, seq.gamma: 600 levels, but the draft's"),
        ("evaluation.methods=[{name: seq, prompts: 1, temperatures: [-1]}]", "seq.temperatures: -1.0; it must"),
        ("evaluation.methods=[{name: forced, prompts: 1, drafter: lookup}]", "lookup needs a chain, as in 1,1,1,1"),
        ("--config=empty.yaml", "config key training.stages: empty, so there is no draft"),
        ("--text=/nope.jsonl", "no data file at '/nope.jsonl'"),
        ("--hours=nan", "error: --hours nan: must be a positive number"),
        ("--contexts=1023", "error: --contexts 1023: must be at least 1024, the tokens of a row of stage 1"),
        ("--hours=2", "--hours: not with --config, which has all sizes; change them there or by key=value"),
        ("--contexts=1024", "--contexts: not with --config"),
        ("--evaluate=smollm2-135m", "/drafts/smollm2-135m-instruct/config.json: a draft for a target with"),
        ("--evaluate=target", "/target: holds a target, and no draft; give the .pth file, folder or hub id of a draft"),
    ],
)
def test_a_mistake_is_found_before_any_work(
    override: str, message: str, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in values of the trainer and in files, which later steps read."""
    folder = make_chat_target(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    line = [str(folder), "--config", str(ROOT / "tests" / "tiny_draft.yaml"), "--output_dir", f"{tmp_path}/out"]
    empty = yaml.safe_load(Path(line[2]).read_text()) | {"training": {"stages": {}}, "probes": {}}
    (tmp_path / "empty.yaml").write_text(yaml.safe_dump(empty))
    command.main([*line, "--dry_run", "training.stages.stage1.overrides.optimizer=muon"])  # which a GPU takes
    for start in ("--yes", "--dry_run"):
        assert message in refusal(command.main, [*line, start, override])
    assert not (tmp_path / "out").exists()


def test_refused_settings_do_not_replace_those_of_the_folder(
    tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, measured = tmp_path / "out", []
    line = [str(make_chat_target(tmp_path / "target")), "--output_dir", str(root), "--yes"]
    write_atomically(prompts_file(root, "test", "everyday"), '{"id": 0, "length": 0}\n', make_folder=True)

    def measure(*_: object) -> None:
        measured.append(load_settings(root / "settings.yaml").evaluation.draft)  # as a child process reads them
        raise UserError("stopped here")

    monkeypatch.setattr(run, "steps_of", lambda *given: {"evaluation": partial(evaluation.evaluate, *given)})
    for name, value in (("share_work", measure), ("load_draft", str), ("state_digest", str)):
        monkeypatch.setattr(evaluation, name, value)
    for name in ("check_draft", "draft_settings"):
        monkeypatch.setattr(run, name, lambda *given: DraftSettings())
    for draft, message in ("a", "stopped here"), ("b", "draft: other content"), (None, "stopped here"):
        assert message in refusal(command.main, [*line, f"evaluation.draft={draft}"] if draft else line)
    assert measured == ["a", "a"]
    cell = next(cells(load_settings(root / "settings.yaml").evaluation, root))  # that of vanilla
    sample = {**cell.key, "options": cell.options, "id": 0, "prompt": prompt_digest(cell.prompts[0])}
    write_atomically(root / "evaluation" / "samples-1.jsonl", json.dumps(sample) + "\n")
    for override, change in (
        ("methods=[{name: vanilla, prompts: 1, tree_shape: [2]}]", "tree_shape: [4, 16, 16, 16, 16] there, [2] here"),
        ("methods=[{name: vanilla, prompts: 1, method: auto}]", 'method: "vanilla" there, "auto" here'),
        ("tasks={everyday: {contexts: [0], max_new_tokens: 9}}", "max_new_tokens: 256 there, 9 here"),
    ):
        error = refusal(command.main, [*line, f"evaluation.{override}"])
        assert f"contains samples of everyday, vanilla with other options ({change}); rename the method, or" in error
    assert "stopped here" in refusal(command.main, line)
    complete = "evaluation.methods=[{name: vanilla, prompts: 1}]"
    assert "draft: other content" in refusal(command.main, [*line, complete, "evaluation.draft=b"])


def test_steps_whose_files_are_complete_are_shown_as_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "seconds.jsonl").write_text('{"step": "chat", "seconds": 9.6, "estimate": 60.0}\n')
    settings, planned = chosen_settings(QWEN, H100, 0.5, 32768), Estimate({"chat": 60.0, "evaluation": 20.0}, {}, 0)
    files = [answers_file(tmp_path, "chat", split) for split in SPLITS]
    for file in files:
        write_atomically(file, "", make_folder=True)
    for chat, left in (("done in 10 s", "about 20 s left in all"), ("about 60 s", "about 80 s left in all")):
        done = run.finished(settings, tmp_path)
        assert f"  chat: {chat}" in run.plan_lines(settings, QWEN, H100, planned, tmp_path, done)
        run.run_steps(dict.fromkeys(planned.seconds, lambda: None), tmp_path, planned, done)
        assert f"step 1 of 2: chat, {chat}; {left}\n" in capsys.readouterr().out
        files[1].unlink(missing_ok=True)
    folder = run.run_folder(tmp_path, 0)
    (folder / "stage2").mkdir(parents=True)
    with pytest.raises(UserError, match=f"^{folder}/stage1: is missing, but {folder}/stage2 followed from"):
        run.finished(settings, tmp_path)
