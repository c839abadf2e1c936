"""Fixtures of the training tests: a tiny target with a byte tokenizer, JSONL files, and the real launcher."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import groups
from forked_ranks import Rank, exit_code, kill, start_forked
from pairs import Handed, save_target
from tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from torch import Tensor
from training_reference import plain_loss

from longspec.models.draft_files import load_draft
from longspec.pipeline.processes import free_port
from longspec.ranks import agreement
from longspec.ranks.agreement import Termination
from longspec.train.config import load_config
from longspec.train.config_schema import TrainConfig
from longspec.train.distributed import start_ranks
from longspec.train.engine import build_pair, cosine_with_warmup
from longspec.train.inputs import read_inputs
from longspec.train.positions import contiguous_positions
from longspec.train.recipe import MUON_FROM, has_muon
from longspec.train.run import train
from longspec.train.sampler import ResumableSampler

ROOT = Path(__file__).resolve().parents[1]
TINY = "tiny_glide_stage1_sinkpi-slicing"
SHARDED = ("deepspeed=zero3", "+deepspeed.zero_optimization.stage3_param_persistence_threshold=0")
"""ZeRO-3, in which even tiny weights are cut."""
WORDS = ("the", "target", "reads", "a", "prompt", "and", "its", "draft", "guesses", "what", "comes", "next")
NEEDS_MUON = pytest.mark.skipif(
    not (has_muon() and hasattr(torch.optim, "Muon")), reason=f"needs torch 2.9 and deepspeed {MUON_FROM}"
)


def make_target(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """A random target of 3 layers with its tokenizer."""
    save_target(folder, family, vocab_size=VOCAB_SIZE + 3, initializer_range=0.1, **overrides)
    save_tokenizer(folder)
    return folder


def write_texts(path: Path, count: int = 40, words: int = 60, seed: int = 0) -> Path:
    """Write plain text records of uneven lengths."""
    choice = random.Random(seed)
    texts = [" ".join(choice.choices(WORDS, k=choice.randint(words // 4, words))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make_work(work: Path, texts: int = 40, held_out: int = 40, **overrides: Any) -> Path:
    """Write `target`, and `texts.jsonl` and `held_out.jsonl` of these numbers of records."""
    make_target(work / "target", **overrides)
    write_texts(work / "texts.jsonl", texts)
    write_texts(work / "held_out.jsonl", held_out, seed=1)
    return work


def write_answers(path: Path, count: int = 40) -> Path:
    """Write records with a prompt and an answer, of uneven lengths."""
    choice = random.Random(1)

    def text() -> str:
        return " ".join(choice.choices(WORDS, k=choice.randint(3, 25)))

    records = [{"problem": text(), "solution": text()} for _ in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank in this process, without W&B; the body of a fixture."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(F, "linear", F.linear)  # DeepSpeed replaces it for good
    for name, value in agreement.ALONE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(groups, "_WORLD_GROUP", None)  # that of a test before is gone
    agreement.waiting_group.cache_clear()
    start_ranks()
    yield
    dist.destroy_process_group()


def overrides_of(work: Path, output: Path, *more: str) -> list[str]:
    """The overrides of a run with the target, texts and cache in `work`."""
    data = [f"data.files={work}/texts.jsonl", f"data.cache_dir={work}/cache"]
    return [f"model_name_or_path={work}/target", f"output_dir={output}", *data, *more]


def tiny_config(*overrides: str) -> TrainConfig:
    """The configuration of the tiny first stage."""
    config = load_config(["-cp", str(ROOT / "conf/exp"), "-cn", TINY, *overrides])
    assert config is not None
    return config


def single_rank_config(work: Path, *overrides: str) -> TrainConfig:
    """A small run of one rank with its output in `work`, one row per step."""
    batch = ["gradient_accumulation_steps=1", "per_device_train_batch_size=1"]
    return tiny_config(*overrides_of(work, work / "out", "data.num_workers=0"), *batch, *overrides)


def refused_training(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """The only error line of a run in this process, which must end with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        train(config, Termination())
    errors = capsys.readouterr().err
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in errors
    return line


TRAINER = "./trainer_base_ds_mul_fs_tp.py"
LIMIT_S = 600
"""Seconds after which a launch counts as hanging, on the busiest machine."""


def launch_line(experiment: str, *overrides: str, ranks: int = 2, script: str = TRAINER) -> list[str]:
    """The documented launch command, or another script with the same arguments."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
    return [*launcher, "--master_port", str(free_port()), script, "-cp", "conf/exp/", "-cn", experiment, *overrides]


def launch_environment(device: str = "cpu", **more: str) -> dict[str, str]:
    """The environment of a launch, on the CPU or on GPUs."""
    chosen = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **chosen, **more}


def deepspeed_launch(
    experiment: str, *overrides: str, ranks: int = 2, script: str = TRAINER, device: str = "cpu", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a launch command and return its result, whatever the exit code."""
    return subprocess.run(
        launch_line(experiment, *overrides, ranks=ranks, script=script),
        cwd=ROOT,
        env=launch_environment(device, **environment),
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )


class Forked(NamedTuple):
    """Ranks that have ended: the first exit code that is not 0, that of each rank, and the output of all."""

    code: int
    codes: list[int | None]
    stdout: str
    stderr: str


def run_ranks(script: str, *arguments: str, ranks: int = 2, **environment: str) -> Forked:
    """Run a script on forked ranks on the CPU, whatever they return."""
    with TemporaryDirectory() as folder:
        logs = Path(folder) / "stdout", Path(folder) / "stderr"
        for log in logs:
            log.touch()
        started = start_forked(script, list(arguments), ranks, free_port(), launch_environment(**environment), *logs)
        code = exit_code(started, LIMIT_S)
        return Forked(code, [rank.exitcode for rank in started], logs[0].read_text(), logs[1].read_text())


def start_ranks_of(
    experiment: str, *overrides: str, log: Path, script: str = TRAINER, **environment: str
) -> list[Rank]:
    """Start what a launch line starts on two ranks on the CPU, without the launcher; all output goes to `log`."""
    arguments = ["-cp", "conf/exp/", "-cn", experiment, *overrides]
    log.touch()
    return start_forked(script, arguments, 2, free_port(), launch_environment(**environment), log, log)


def launch(
    experiment: str, *overrides: str, ranks: int = 2, script: str = TRAINER, device: str = "cpu", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ranks, whatever they return: by the launcher on GPUs, forked on the CPU, where its start takes longest."""
    if device != "cpu":
        return deepspeed_launch(experiment, *overrides, ranks=ranks, script=script, device=device, **environment)
    run = run_ranks(script, "-cp", "conf/exp/", "-cn", experiment, *overrides, ranks=ranks, **environment)
    return subprocess.CompletedProcess([], run.code, run.stdout, run.stderr)


def launched(experiment: str, *overrides: str, ranks: int = 2, script: str = TRAINER, device: str = "cpu") -> str:
    """The stderr of a launch that must succeed."""
    result = launch(experiment, *overrides, ranks=ranks, script=script, device=device)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return result.stderr


def error_line(run: subprocess.CompletedProcess[str]) -> str:
    """The only error line of a launch that ended with exit code 2."""
    errors = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert run.returncode == 2 and len(errors) == 1 and "Traceback" not in run.stderr, run.stderr[-3000:]
    return errors[0]


@contextmanager
def background(*overrides: str, log: Path, **how: str) -> Iterator[list[Rank]]:
    """Two ranks in the background, which are killed (kill -9) in the end."""
    ranks = start_ranks_of(TINY, *overrides, log=log, **how)
    try:
        yield ranks
    finally:
        kill(ranks)


def wait_until(done: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S / 2
    while not done():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.01)


def wait_for_step(output: Path, log: Path, step: int = 2) -> None:
    wait_until(lambda: (output / "metrics.jsonl").exists() and len(metrics(output)) >= step, log)


def metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def timeless(output: Path) -> list[dict[str, float]]:
    """The metrics without times."""
    return [{name: value for name, value in line.items() if "seconds" not in name} for line in metrics(output)]


def equal_drafts(one: Path, other: Path) -> bool:
    """Whether two files or folders hold the same draft, bit for bit."""
    first, second = load_draft(one), load_draft(other)
    return first.keys() == second.keys() and all(torch.equal(weight, second[name]) for name, weight in first.items())


def lose_newest(output: Path) -> None:
    """Remove the newest generation of a run's checkpoints."""
    for name in ("last_ds", "checkpoint-last"):
        shutil.rmtree(output / name)


def plain_training(config: TrainConfig, steps: int, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and draft of the base variant after training like `ranks` ranks in one process: one batch per step,
    torch's losses on whole logits, and torch's optimizers."""
    inputs = read_inputs(config)
    model: Any = build_pair(config, None)
    draft, factor = list(model.draft_model.parameters()), cosine_with_warmup(steps, config.warmup_ratio)
    muon = [weight for weight in draft if weight.ndim == 2 and config.optimizer == "muon"]
    adamw = [weight for weight in draft if not any(weight is one for one in muon)]
    optimizers: dict[torch.optim.Optimizer, float] = {
        torch.optim.AdamW(adamw, betas=(0.9, 0.95), weight_decay=config.weight_decay): 1.0
    }
    if muon:
        scale = 0.2 * model.config.hidden_size**0.5
        optimizers[torch.optim.Muon(muon, weight_decay=config.weight_decay / scale, momentum=0.95)] = scale
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps * ranks
    objective = Handed(partial(_mean_loss, config.loss))
    losses = []
    for step, numbers in enumerate(ResumableSampler(len(inputs.rows), rows, 0, 1, config.seed, 0, steps)):
        batch = inputs.collate([inputs.rows[number] for number in numbers])
        positions = contiguous_positions(batch["cu_seqlens"], tuple(batch["input_ids"].shape))  # type: ignore[arg-type]
        loss = model(**batch, position_ids=positions, objective=objective)
        model.draft_model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft, config.max_grad_norm)
        for optimizer, scale in optimizers.items():
            optimizer.param_groups[0]["lr"] = scale * config.learning_rate * factor(step)
            optimizer.step()
        losses.append(loss.item())
    return losses, model.draft_model.state_dict()


def _mean_loss(loss: str, hidden: Tensor, target_hidden: Tensor | None, labels: Tensor, lm_head: Any) -> Tensor:
    return plain_loss(loss, hidden, target_hidden, labels, lm_head) / (labels[:, 1:] != -100).sum()
