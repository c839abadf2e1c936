"""Settings and processes of `longspec draft`: one-line errors, stages, launches and their end."""

import json
import os
import signal
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_fixtures import make_chat_target

from experiments import drafts, jobs
from experiments.arms import read_experiment, share_text
from experiments.comparison import arm_folder, check_unchanged, read_comparison
from longspec.errors import UserError
from longspec.jobs.job import differences
from longspec.pipeline import answers, training
from longspec.pipeline.files import answers_file, read_jsonl, run_settings, settings_file, training_files
from longspec.pipeline.induction import layer_file
from longspec.pipeline.probes import best_candidate, probe_table
from longspec.pipeline.processes import launch, launch_line, running
from longspec.pipeline.settings import Settings, StageSettings, load_settings
from longspec.pipeline.training import batches, run_folder, stage_facts, train
from longspec.replacing import write_atomically
from longspec.signals import StopSignals
from longspec.train.config import load_config

ROOT = Path(__file__).resolve().parents[2]


def load(*overrides: str) -> Settings:
    return load_settings(ROOT / "experiments" / "smollm2.yaml", overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluation.tasks.lbc={contexts: [1], max_new_tokens: 1}", "evaluation.tasks: no lbc"),
        ("probes={a: {candidates: {b: {}}, rows: [9]}}", "key probes.a: needs candidates, a stage, and rows"),
        ("evaluation.methods=[{name: forest, prompts: 1}]", "no forest; use vanilla"),
        ("prompts.contexts=[9,1]", r"prompts.contexts: must be \[shortest, longest\]"),
        ("code.packages=many", "code.packages"),
        ("training.architecture=eagle4", "training.architecture: no eagle4; use glide, eagle3"),
        ("training.architecture_options.window=64", "options: not for glide; give training.architecture, too"),
        ("training.stages.stage1.answers=[chta]", "stages.stage1.answers: no chta; use chat, "),
        ("answers.source={prompts: [lcc], max_new_tokens: 1, batch_size: 1}", "reserved for code.train_files"),
        ("chat.train=-5", "key chat.train: -5; must be at least 0"),
        ("answers.code.batch_size=0", "key answers.code.batch_size: 0; must be at least 1"),
        ("evaluation.methods=[{name: tree, prompts: 1, tree_shape: [4, 0]}]", r"methods.0.tree_shape.1: 0; must be"),
        ("prompts.test=0", "key prompts.test: 0; must be at least 1"),
        ("training.stages.stage1.answers=[source]", r"stages.stage1.answers: \[source\] has no held-out text"),
        ("chat.trian=5", "^chat.trian=5: key chat.trian: "),
        ("chat={test: 1]", r"expected ',' or '}', but got ']' in .* line 1, column 9"),
        ("hours", "^hours: not an override; write key=value"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(override)


def test_counts_may_be_0_values_of_the_trainer_anything_and_a_map_is_replaced() -> None:
    """A section keeps its other values. Another architecture than GLIDE goes without probes."""
    load("chat.train=0", "code.train_files=0", "prompts.train.lcc=0", "seed=0", "evaluation.tasks.lcc.contexts=[0]")
    settings = load("training.stages.stage1.overrides={a: -1}", "probes={layers: {candidates: {a: {b: -1}}}}")
    assert settings.probes and not load("training.architecture=eagle3", "probes={a: {candidates: {}}}").probes
    settings = load("probes={a: {candidates: {}}}", "probes={}", "prompts.train={lcc: 3}", "chat={test: 3}")
    assert not settings.probes and settings.prompts.train == {"lcc": 3} and settings.chat.train > 0


@pytest.mark.parametrize("file", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_experiment_is_valid(file: Path) -> None:
    settings = load_settings(file)
    if file.stem.startswith("drafts_"):
        assert read_comparison(settings).arms
    elif settings.experiment:
        assert read_experiment(settings).goals


def test_a_folder_trained_with_another_config_of_the_trainer_is_refused(tmp_path: Path) -> None:
    """The learning rate is only in the trainer's config, which may change while the experiment's settings do not."""
    settings = load(f"target={make_chat_target(tmp_path / 'target')}", "probes={}")
    facts = stage_facts(settings.training.stages["stage1"], 0)
    assert facts["trainer.model.kv_layers"] == [18]
    for split in ("train", "validation"):
        write_atomically(answers_file(tmp_path, "chat", split), "{}\n", make_folder=True)
    other = json.dumps(facts | {"trainer.learning_rate": 2e-3})
    write_atomically(run_folder(tmp_path, 0) / "stage1" / "settings.json", other, make_folder=True)
    problem = r"made with other settings \(trainer\.learning_rate: 0\.002 there, 0\.004 here\); use another"
    with pytest.raises(UserError, match=problem):
        train("stage1", settings, tmp_path)


def test_records_to_replay_are_spread_over_their_run(tmp_path: Path) -> None:
    """U+2028 ends a line for `str.splitlines`, but not in JSONL. Runs without text are left out."""
    stage = load().training.stages["stage2"]
    stage.answers, stage.replay = ["code"], {"chat": 3, "short": 9, "gsm8k": 1}
    for name in ("code", "chat", "short"):
        lines = [json.dumps({"text": f"{name}\u2028{n}"}, ensure_ascii=False) + "\n" for n in range(7)]
        write_atomically(answers_file(tmp_path, name, "train"), "".join(lines), make_folder=True)
    whole, *parts = map(Path, training_files(tmp_path, stage))
    assert whole == answers_file(tmp_path, "code", "train")
    texts = [[record["text"] for record in read_jsonl(part)] for part in parts]
    assert texts == [[f"chat\u2028{n}" for n in (0, 2, 4)], [f"short\u2028{n}" for n in range(7)]]


def test_a_step_runs_on_as_many_gpus_as_divide_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows per step stays the same, so that a run continues on another number of GPUs."""
    stage = load("training.stages.stage1.micro_batch=5").training.stages["stage1"]
    for gpus, expected in ((0, (1, 4, 4)), (1, (1, 4, 4)), (3, (2, 4, 2)), (8, (8, 2, 1)), (40, (16, 1, 1))):
        monkeypatch.setattr(training.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert batches("stage1", stage) == expected
    stage.tokens_per_step = 1500
    with pytest.raises(UserError, match=r"stages\.stage1: tokens_per_step 1500 is not a multiple of max_length 1024"):
        batches("stage1", stage)


def test_stage_1_takes_the_layer_of_the_best_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = "{none: {model.kv_layers: []}, two: {model.kv_layers: [2]}, three: {model.kv_layers: [3]}}"
    probes = f"probes={{layers: {{candidates: {candidates}, adopt: true}}}}"
    settings = load(probes, f"target={make_chat_target(tmp_path / 'target')}")
    trained: list[dict[str, Any]] = []
    monkeypatch.setattr(training, "launch_line", lambda config, overrides, ranks: trained.append(overrides))
    monkeypatch.setattr(training, "launch", lambda _, folder, steps: (folder / "checkpoint-last").mkdir() or 0.0)
    for name, split in product(("chat", *settings.answers), ("train", "validation")):
        write_atomically(answers_file(tmp_path, name, split), "{}\n", make_folder=True)
    with pytest.raises(UserError, match=r"layers\.json: no such file; stage 1 takes its layers"):
        train("stage1", settings, tmp_path)
    # (correct tokens, chains) per row; the longer texts decide between two and three.
    short, long = [(10.0, 10.0), (30.0, 10.0)], [(5.0, 10.0)]
    scores = {"none": {"short": [(10.0, 10.0), (5.0, 10.0)], "long": long}, "two": {"short": short, "long": long}}
    scores["three"] = {"short": short, "long": [(9.0, 10.0)]}
    write_atomically(tmp_path / "probes" / "layers.json", json.dumps(scores), make_folder=True)
    assert best_candidate(scores) == "three"
    rows = probe_table(scores).set_index("candidate")
    assert (rows["short"]["two"], rows["short, relative"]["none"]) == ("3.000", "")
    assert rows["short, relative"]["two"].startswith("+71.4% ±")
    for stage in ("stage1", "stage2"):  # killed while they save their last step
        write_atomically(run_folder(tmp_path, 0) / stage / "metrics.jsonl", '{"step": 6000}\n', make_folder=True)
        with pytest.raises(UserError, match=f"{stage}: training ended before its last step"):
            train(stage, settings, tmp_path)
    assert "model.kv_layers" not in trained[1]
    assert (trained[0]["model.kv_layers"], trained[0]["draft_model_name_or_path"]) == ([3], None)
    given = [Path(trained[1][name]) for name in ("draft_model_name_or_path", "output_dir")]
    assert given == [run_folder(tmp_path, 0) / name for name in ("stage1/checkpoint-last", "stage2")]
    settings.seed, settings.probes, settings.training.choose_layer = 1, {}, True
    write_atomically(layer_file(tmp_path), "[0, 0, 0.1, 0.9, 0]")
    with pytest.raises(UserError, match="stage1: training ended"):
        train("stage1", settings, tmp_path)
    assert trained[-1]["model.kv_layers"] == [3]


@pytest.mark.parametrize("stage", ["stage1", "stage2", "stage3"])
def test_the_trainer_takes_the_launch_line_of_every_stage(stage: str, tmp_path: Path) -> None:
    """Paths and texts with characters that are special to Hydra must reach the trainer unchanged."""
    name = load().training.stages[stage].config
    data = tmp_path / "it's a=b, folder" / "data.jsonl"
    write_atomically(data, '{"text": "a"}\n', make_folder=True)
    overrides = {"data.files": [str(data)], "output_dir": str(tmp_path / "out"), "max_steps": 3}
    overrides |= {"model_name_or_path": "target", "draft_model_name_or_path": None, "variant": "base"}
    templates = {"source": 'a "b"\n{prompt}', "article": "it's{prompt}", "report": "C:\\n{prompt}end\\"}
    overrides |= {"data.templates": templates, "adam_betas": [0.5, 1e-7]}
    line = launch_line(name, overrides, ranks=1)
    config = load_config(["-cp", str(ROOT / "conf" / "exp"), *line[line.index("-cn") :]])
    assert config and (config.loss, config.max_steps, config.draft_model_name_or_path) == ("distill", 3, None)
    assert config.data.files == [str(data)] and config.variant.name == "base"
    assert config.data.templates == templates and config.adam_betas == [0.5, 1e-7]


def test_arms_read_the_same_paths_as_the_recipe_and_so_share_its_cached_tokens(tmp_path: Path) -> None:
    write_atomically(answers_file(tmp_path, "chat", "train"), "{}\n", make_folder=True)
    share_text(tmp_path, tmp_path / "arm")
    stage = StageSettings(config="any", answers=["chat"], replay={"chat": 1})
    assert training_files(tmp_path / "arm", stage) == training_files(tmp_path, stage) != []


def test_an_arm_that_was_begun_with_other_settings_is_refused_before_the_run_is_changed(tmp_path: Path) -> None:
    settings = load_settings(ROOT / "experiments" / "drafts_smollm2.yaml")
    write_atomically(settings_file(tmp_path), "earlier")
    facts = run_folder(arm_folder(tmp_path, "eagle3", 1), 1) / "stage1" / "settings.json"
    write_atomically(facts, '{"steps": 1, "overrides": {"a": 1}}', make_folder=True)
    message = r"\(steps: 1 there, 640 here; overrides\.a: 1 there, not set here; "
    with pytest.raises(UserError, match=message), run_settings(tmp_path, "new"):
        check_unchanged(settings, read_comparison(settings), tmp_path, ["glide-last", "eagle3"], [0, 1])
    assert settings_file(tmp_path).read_text() == "earlier"


def test_a_null_in_a_mapping_is_a_value_and_a_missing_entry_is_null() -> None:
    assert differences({"a": {}, "b": None}, {"a": {"prompts": None}}) == "a.prompts: not set there, null here"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("experiment.jobs_per_gpu=0", "0; must be at least 1"),
        ("experiment.arms.eagle3.seeds=0", "0; must be at least 1"),
        ("code.folders=[/nope]", "/nope: no such folder"),
    ],
)
def test_an_experiment_that_cannot_run_is_refused_before_it_writes(
    override: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        drafts.main([override, "--output_dir", str(tmp_path)])
    assert capsys.readouterr().err == f"error: config key {override.split('=')[0]}: {problem}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 1), (2, 6)])
def test_text_is_written_by_as_many_processes_per_gpu_and_by_one_on_a_cpu(
    gpus: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(answers, "share_work", lambda work, settings, root, ranks, *names: started.append(ranks))
    answers.write_text([answers.CHAT], load_settings(ROOT / "experiments" / "drafts_smollm2.yaml"), tmp_path)
    assert started == [ranks]


def test_what_is_timed_has_a_gpu_to_itself_and_the_rest_shares() -> None:
    comparison = read_comparison(load_settings(ROOT / "experiments" / "drafts_smollm2.yaml"))
    planned = jobs.planned_jobs(comparison, list(comparison.arms), [1, 0])
    assert all(set(job.after) <= set(planned[:number]) for number, job in enumerate(planned))
    timed, ready = [str(job) for job in planned if job.alone], [job.name for job in planned if not job.after]
    assert timed[:3] == ["training-glide-last-0", "training-eagle3-0", "baselines-target-0"]
    assert timed[3:] == [f"decoding-{name}-0" for name in ("glide-last", "eagle3", "glide-18", "eagle3-window")]
    assert ready[4:] == ["eagle3-window", "eagle3-adamw"] and "training-eagle3-adamw-1" not in map(str, planned)
    alone, shared, start = jobs.Job("decoding", "a", 0, alone=True), jobs.Job("forced", "a", 0), jobs.next_start
    after = jobs.Job("forced", "b", 0, after=(alone,))
    assert start([alone, shared], set(), {"4": 1, "7": 2}, 2) == (alone, "7", 2)
    assert start([alone, shared], set(), {"4": 1, "7": 1}, 2) is None, "no later job overtakes it"
    assert start([after, shared], set(), {"4": 1, "7": 0}, 2) == (shared, "4", 1)
    assert start([after], {alone}, {"4": 1}, 2) == (after, "4", 1) and not start([after], set(), {"4": 2}, 2)


def test_a_launch_that_is_interrupted_may_save(tmp_path: Path) -> None:
    line = ["sh", "-c", "trap 'touch saved; exit 0' TERM; echo started; while :; do sleep 0.1; done"]
    with pytest.raises(KeyboardInterrupt), running(line, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "started\n"
        raise KeyboardInterrupt
    assert child.poll() == 0 and (tmp_path / "saved").exists()


def test_a_signal_during_a_fork_is_not_lost() -> None:
    """Python drops what a handler raises in the callbacks of a fork."""
    armed = [signal.SIGTERM]
    os.register_at_fork(after_in_parent=lambda: armed and os.kill(os.getpid(), armed.pop()))
    with pytest.raises(SystemExit), StopSignals(at_once=True), running([sys.executable, "-c", ""]):
        pytest.fail("not stopped")


def test_a_launch_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "training" / "stage1"
    write_atomically(folder / "log.txt", "an earlier run\n", make_folder=True)
    with pytest.raises(UserError, match=r"(?s)ended with code 3.*what went wrong"):
        launch([sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"], folder, steps=4)
    assert (folder / "log.txt").read_text().startswith("an earlier run\n")


def test_a_rank_that_waits_for_the_others_ends_with_its_launcher(tmp_path: Path) -> None:
    """Its launcher, which has put it into a session of its own as torchrun does, is killed."""
    settings = (Path(__file__).parents[1] / "tiny_draft.yaml").read_text()
    settings_file(tmp_path).write_text(settings.replace("target: ???", "target: none"))
    rank = [sys.executable, "-m", "longspec.pipeline", "write_share", str(tmp_path)]
    launcher = f"import subprocess; subprocess.Popen({rank}, start_new_session=True).wait()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen([sys.executable, "-c", launcher], env=os.environ | place | ranks, **pipes) as process:
            waiting, _ = server.accept()
            with waiting:
                process.kill()
                # The pipe is open until the rank has ended, which gives up by itself after five minutes.
                process.communicate(timeout=60)
