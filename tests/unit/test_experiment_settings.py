"""Settings of the experiment: one-line errors, ablation arms, launch commands, and resumed evaluations."""

import json
from pathlib import Path

import pytest
from experiment_fixtures import make_chat_target

from experiments.cells import SampleFile, cells, prompt_digest, read_samples
from experiments.files import answers_file, read_jsonl, write_atomically
from experiments.settings import Settings, load_settings
from experiments.training import (
    arm_stages,
    final_draft,
    launch_line,
    stage_facts,
    summary,
    table,
    train,
    train_stage,
    training_files,
)
from longspec.errors import UserError
from longspec.train.config import load_config

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "experiments" / "smollm2.yaml"


def load(*overrides: str) -> Settings:
    return load_settings(PRESET, overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prompts.train.gsm9k=1", "prompts.train.gsm9k: no such group"),
        ("trainig.seeds=[1]", "trainig"),
        ("training.seeds=[]", "training.seeds: needs at least one seed"),
        ("evaluation.tasks.lbc={contexts: [1], max_new_tokens: 1}", "evaluation.tasks.lbc: no such task"),
        ("evaluation.methods=[{name: forest, prompts: 1}]", "no method forest"),
        ("evaluation.methods=[{name: tree, prompts: 99}]", "must be at most prompts.test"),
        ("evaluation.methods=[{name: forced, prompts: 1}]", "forced needs the greedy answers of a method vanilla"),
        ("evaluation.methods=[{name: forced, prompts: 1, last_tokens: 9}]", "last_tokens: must be more than the head"),
        ("goals=[{figure: speed, least: 1}]", r"goals\[0\]: no figure speed; use tokens per round"),
        ("goals=[{figure: tokens/s, least: 1, each: [id]}]", r"goals\[0\].each: must contain task and context only"),
        ("prompts.contexts=[9,1]", r"prompts.contexts: must be \[shortest, longest\]"),
        ("prompts.short_contexts=[9]", r"prompts.short_contexts: must be \[shortest, longest\]"),
        ("code.packages=many", "code.packages"),
        ("training.stages.stage1.answers=[chta]", "stages.stage1.answers: no run chta of the target; use chat, "),
        ("training.stages.stage2.replay.chta=5", "stages.stage2.replay: no run chta"),
        ("training.stages.stage2.replay.chat=-1", "stages.stage2.replay.chat: must not be negative"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load(override)
    assert "\n" not in str(error.value)


def test_forced_rounds_need_vanillas_answers_to_all_their_prompts() -> None:
    load("evaluation.methods=[{name: vanilla, prompts: 2}, {name: forced, prompts: 2, contexts: [1024]}]")
    for vanilla in ("prompts: 1", "prompts: 2, tasks: [lcc]", "prompts: 2, contexts: [7000]"):
        with pytest.raises(UserError, match="forced needs the greedy answers"):
            load(f"evaluation.methods=[{{name: vanilla, {vanilla}}}, {{name: forced, prompts: 2, contexts: [1024]}}]")


def test_arms_change_stages_and_leave_some_out() -> None:
    settings = load("training.arms={ce: {every: {overrides: {loss: ce}}, stage2: null, stage3: {steps: 7}}}")
    recipe, arm = arm_stages(settings, "recipe"), arm_stages(settings, "ce")
    assert list(recipe) == ["stage1", "stage2", "stage3"] and list(arm) == ["stage1", "stage3"]
    assert arm["stage1"].overrides == recipe["stage1"].overrides | {"loss": "ce"} and arm["stage3"].steps == 7
    assert arm["stage1"].answers == recipe["stage1"].answers
    assert final_draft(settings, Path("out"), "ce").parts[1:4] == ("training", "ce-0", "stage3")
    with pytest.raises(UserError, match=r"arms\.ce\.stage9: no such stage"):
        arm_stages(load("training.arms={ce: {stage9: null}}"), "ce")
    with pytest.raises(UserError, match=r"arms.ce: .*stepz"):
        arm_stages(load("training.arms={ce: {stage1: {stepz: 7}}}"), "ce")


def test_a_folder_trained_with_another_config_of_the_trainer_is_refused(tmp_path: Path) -> None:
    """The learning rate is only in the trainer's config, which may change while the experiment's settings do not."""
    settings = load()
    stage = settings.training.stages["stage1"]
    facts = stage_facts(stage, 0)
    assert facts["trainer.model.kv_layers"] == [18]
    for split in ("train", "validation"):
        write_atomically(answers_file(tmp_path, "chat", split), "{}\n")
    write_atomically(tmp_path / "stage1" / "settings.json", json.dumps(facts | {"trainer.learning_rate": 2e-3}))
    with pytest.raises(UserError, match=r"made with trainer\.learning_rate 0\.002, not 0\.004; use another --root"):
        train_stage(tmp_path / "stage1", stage, settings, tmp_path, "target", None, 0)


def test_records_to_replay_are_spread_over_their_run(tmp_path: Path) -> None:
    """U+2028 ends a line for `str.splitlines`, but not in JSONL. Runs without text are left out."""
    stage = load().training.stages["stage2"]
    stage.answers, stage.replay = ["code"], {"chat": 3, "short": 9, "gsm8k": 1}
    for name in ("code", "chat", "short"):
        lines = [json.dumps({"text": f"{name}\u2028{n}"}, ensure_ascii=False) + "\n" for n in range(7)]
        write_atomically(answers_file(tmp_path, name, "train"), "".join(lines))
    whole, *parts = map(Path, training_files(tmp_path, stage))
    assert whole == answers_file(tmp_path, "code", "train")
    texts = [[record["text"] for record in read_jsonl(part)] for part in parts]
    assert texts == [[f"chat\u2028{n}" for n in (0, 2, 4)], [f"short\u2028{n}" for n in range(7)]]


def test_all_runs_are_checked_before_the_first_starts(tmp_path: Path) -> None:
    target = make_chat_target(tmp_path / "target")
    for override, message in (
        ("training.arms.late={stage3: {tokens_per_step: 9000}}", "stage3: tokens_per_step 9000 is not a multiple"),
        ("training.arms.late={stage3: {answers: [poems]}}", r"late\.stage3\.answers: no run poems"),
        ("training.arms.late={every: {replay: {poems: 5}}}", r"late\.stage1\.replay: no run poems"),
        ("training.arms.late={stage3: {answers: [meetings]}}", "meetings/train.jsonl: no such file"),
    ):
        settings = load(override, f"target={target}")
        for name in {"chat", *settings.answers} - {"meetings"}:
            for split in ("train", "validation"):
                write_atomically(answers_file(tmp_path, name, split), "")
        with pytest.raises(UserError, match=message):
            train(settings, tmp_path)
    assert not (tmp_path / "training").exists()


@pytest.mark.parametrize("stage", ["stage1", "stage2", "stage3"])
def test_the_trainer_takes_the_launch_line_of_every_stage(stage: str, tmp_path: Path) -> None:
    """Paths with characters that are special to Hydra must reach the trainer unchanged."""
    name = load().training.stages[stage].config
    data = tmp_path / "it's a=b, folder" / "data.jsonl"
    data.parent.mkdir()
    data.write_text('{"text": "a"}\n')
    overrides = {"data.files": [str(data)], "output_dir": str(tmp_path / "out"), "max_steps": 3}
    overrides |= {"model_name_or_path": "target", "draft_model_name_or_path": None, "variant": "base"}
    line = launch_line(name, overrides, ranks=1)
    config = load_config(["-cp", str(ROOT / "conf" / "exp"), *line[line.index("-cn") :]])
    assert config is not None
    assert (config.loss, config.max_steps, config.draft_model_name_or_path) == ("distill", 3, None)
    assert config.data.files == [str(data)] and config.variant.name == "base"


def test_the_table_of_arms_pools_seeds(tmp_path: Path) -> None:
    settings = load("training.seeds=[0,1,2]", "training.arms={}")
    for seed, length in ((0, 2.0), (1, 3.0)):
        folder = tmp_path / "training" / f"recipe-{seed}" / "stage1"
        (folder / "checkpoint-last").mkdir(parents=True)
        steps = settings.training.stages["stage1"].steps
        last = {"step": steps, "loss": 1.0, "eval_acceptance_length": length}
        (folder / "metrics.jsonl").write_text('{"step": 1}\n' + json.dumps(last) + "\n")
    frame = table(settings, tmp_path)
    assert frame["seed"].tolist() == [0, 1]
    pooled = summary(frame).iloc[0]
    assert (pooled["arm"], pooled["seeds"], pooled["eval_acceptance_length"]) == ("recipe", 2, 2.5)
    assert pooled["sd over seeds"] == pytest.approx(0.5**0.5)


def test_an_evaluation_resumes(tmp_path: Path) -> None:
    """A sample with an incomplete line is measured again; samples of other prompts raise an error."""
    prompts = [{"id": f"lcc-test-{n}", "length": 1024, "prefix": f"x = {n}\n"} for n in range(3)]
    file = tmp_path / "prompts" / "test" / "lcc.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    methods = "evaluation.methods=[{name: tree, prompts: 2, temperatures: [0.0, 1.0], seeds: 2}]"
    grid = list(cells(load(methods).evaluation, tmp_path))
    assert [(cell.temperature, cell.seed) for cell in grid] == [(0.0, 0), (1.0, 0), (1.0, 1)]
    assert len({cell.prompt_seed(prompt["id"]) for cell in grid[1:] for prompt in cell.prompts}) == 4
    folder = tmp_path / "evaluation"
    samples = SampleFile(folder)
    samples.append({**grid[0].key, "id": prompts[0]["id"], "prompt": prompt_digest(prompts[0])})
    with samples.path.open("a") as handle:
        handle.write('{"task": "lcc", "con')
    again = SampleFile(folder)
    assert [prompt["id"] for prompt in again.missing(grid[0])] == ["lcc-test-1"]
    assert len(again.missing(grid[1])) == 2 and len(read_samples(folder)) == 1
    again.append({**grid[0].key, "id": prompts[1]["id"], "prompt": prompt_digest(prompts[1])})
    assert len(read_samples(folder)) == 2 and SampleFile(folder, part=1).missing(grid[0]) == []
    file.write_text(file.read_text().replace("x = 0", "x = 9"))
    (other, *_) = cells(load(methods).evaluation, tmp_path)
    with pytest.raises(UserError, match="samples of other prompts"):
        again.missing(other)
