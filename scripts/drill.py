"""`make drill`: damage a training run at random moments of its saves, and resume from what is left.

A trial starts or resumes a run of two ranks that saves after every step, and applies one fault at a random moment of a
save or right after it. After each trial a checkpoint must load that is at most one save older than the last logged
step (two, if the newest one was damaged), and no rank may outlive a dead one by more than a minute. Faults change every
second trial; ZeRO-1 and ZeRO-3 alternate.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
from tokenizers import ByteLevelBPETokenizer
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longspec.cli.train import ROOT, TRAINER
from longspec.pipeline.processes import launch_line
from longspec.replacing import write_atomically
from longspec.train.checkpoint import read_draft
from longspec.train.generations import METRICS_NAME, STATES, find_latest
from longspec.train.markers import is_whole

SUMMARY = "summary.json"
TEXT_FILES, VOCAB_SIZE, CPU_RANKS = 20, 512, 2
START_LIMIT_S = 180
"""Seconds in which a run must come to a save."""
END_LIMIT_S = 60
"""Seconds in which all processes must end after a fault."""
SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)


@dataclass(frozen=True)
class Live:
    """A run that saves after every step."""

    launch: psutil.Popen
    output: Path
    chance: random.Random

    @property
    def log(self) -> Path:
        return self.output.with_suffix(".log")

    def ranks(self) -> list[psutil.Process]:
        ranks = [process for process in self.launch.children(recursive=True) if is_rank(process)]
        assert len(ranks) == CPU_RANKS, f"{len(ranks)} ranks"
        return ranks

    def ended_by(self, act: Callable[[], object]) -> float:
        """Call `act`, which must end the run. Returns the seconds until all of its processes have ended."""
        processes, start = self.launch.children(recursive=True), time.monotonic()
        act()
        # Ranks may outlive their launcher.
        psutil.wait_procs([self.launch, *processes], timeout=2 * END_LIMIT_S)
        return time.monotonic() - start

    def kill(self) -> float:
        return self.ended_by(lambda: os.killpg(self.launch.pid, signal.SIGKILL))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():
            if self.launch.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run did not save in time; see {self.log}")
            time.sleep(0.005)


def one_rank_killed(live: Live) -> float:
    return live.ended_by(live.chance.choice(live.ranks()).kill)


def full_disk(live: Live) -> float:
    """No file may grow beyond 200 kB, which stops a shard but neither the log nor the metrics."""

    def fill() -> None:
        for rank in live.ranks():
            rank.rlimit(psutil.RLIMIT_FSIZE, (200_000, 200_000))

    ended = live.ended_by(fill)
    assert live.launch.returncode == 2, f"exit code {live.launch.returncode} with a full disk"
    assert "could not be written" in live.log.read_text(), "the log does not name the full disk"
    return ended


def file_deleted(live: Live) -> float:
    return damaged(live, lambda file, _: file.unlink())


def file_truncated(live: Live) -> float:
    return damaged(live, lambda file, _: os.truncate(file, live.chance.randrange(file.stat().st_size)))


def file_replaced(live: Live) -> float:
    return damaged(live, lambda file, other: file.write_bytes(other.read_bytes()))


def damaged(live: Live, damage: Callable[[Path, Path], object]) -> float:
    """Kill the run and damage its newest state: `damage` gets two of its shards. The older state must be used."""
    live.wait_until(lambda: is_whole(live.output / STATES[2]))
    ended = live.kill()
    latest = find_latest(live.output)
    assert latest is not None, "no checkpoint"
    file, other = live.chance.sample(sorted(latest[0].rglob("*_optim_states.pt")), CPU_RANKS)
    damage(file, other)
    assert find_latest(live.output) not in (None, latest), f"{file} is damaged, but its state is used"
    return ended


def signalled(live: Live) -> float:
    """Send a signal to a process of the launch. Every rank must end, and the last step must be saved."""
    process = live.chance.choice([live.launch, live.launch.children()[0], *live.ranks()])
    number = live.chance.choice(SIGNALS[:3] if is_rank(process) else SIGNALS)
    ended = live.ended_by(lambda: process.send_signal(number))
    latest = find_latest(live.output)
    assert live.launch.poll() is not None, f"{number.name}: the launch continued"
    assert "stopped after step" in live.log.read_text(), f"{number.name}: the log does not say that the run stopped"
    assert latest is not None and latest[1].step == last_step(live.output), f"{number.name}: the last step is lost"
    return ended


KINDS: dict[str, tuple[Callable[[Live], float], int]] = {
    "all ranks killed": (Live.kill, 1),
    "file replaced": (file_replaced, 2),
    "one rank killed": (one_rank_killed, 1),
    "full disk": (full_disk, 1),
    "file deleted": (file_deleted, 2),
    "signal": (signalled, 0),
    "file truncated": (file_truncated, 2),
}
"""Each fault, which returns the seconds until the run has ended, and the number of saves that it may cost."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/drill"))
    options = parser.parse_args()
    if options.output.exists() and not (options.output / SUMMARY).is_file():
        parser.error(f"--output {options.output}: not the output of a drill; give another folder")
    shutil.rmtree(options.output, ignore_errors=True)
    folder = options.output.resolve()
    prepare(folder)
    chance = random.Random(options.seed)
    trials = []
    for number in tqdm(range(options.trials), unit="trial"):
        zero_stage, kind = (1, 3)[number % 2], list(KINDS)[number // 2 % len(KINDS)]
        trials.append({"zero_stage": zero_stage, "kind": kind} | drill(folder, zero_stage, kind, chance))
        tqdm.write(json.dumps(trials[-1]))
        write_atomically(folder / SUMMARY, json.dumps(trials, indent=1) + "\n")
    failed = sum("problem" in trial for trial in trials)
    print(f"{len(trials)} trials, {failed} failed")
    return 1 if failed else 0


def prepare(folder: Path) -> None:
    """Write a random target, and training texts from the standard library."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:TEXT_FILES]
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in library]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    write_atomically(folder / "texts.jsonl", lines, make_folder=True)

    bytes_and_pairs = ByteLevelBPETokenizer()
    bytes_and_pairs.train_from_iterator(texts, VOCAB_SIZE, special_tokens=["</s>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_and_pairs, eos_token="</s>", pad_token="</s>")
    tokenizer.save_pretrained(folder / "target")
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, head_dim=64, eos_token_id=tokenizer.eos_token_id, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "target")


def drill(folder: Path, zero_stage: int, kind: str, chance: random.Random) -> dict[str, Any]:
    """Start or resume a run, apply a fault around a save, and check the checkpoints."""
    output = folder / f"zero{zero_stage}"
    saving = (output / STATES[0]).exists
    before, (act, saves_lost), facts = last_step(output), KINDS[kind], dict[str, Any]()
    overrides = {
        "model_name_or_path": str(folder / "target"),
        "data.files": [str(folder / "texts.jsonl")],
        "data.cache_dir": str(folder / "cache"),
        "output_dir": str(output),
        "deepspeed": f"zero{zero_stage}",
        "resume": "latest",
        "save_steps": 1,
        "max_steps": 100_000,
    }
    command = launch_line("tiny_glide_stage1_sinkpi-slicing", overrides, CPU_RANKS)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "PYTHONPATH": paths}
    with output.with_suffix(".log").open("w") as log:
        options = {"cwd": ROOT, "env": os.environ | settings, "stdout": log, "stderr": log}
        live = Live(psutil.Popen(command, start_new_session=True, **options), output, chance)
        try:
            live.wait_until(lambda: last_step(output) > before and not saving())
            live.wait_until(saving)
            start = time.monotonic()
            live.wait_until(lambda: not saving())
            duration = time.monotonic() - start
            live.wait_until(saving)
            time.sleep(chance.uniform(0, 1.2 * duration))
            facts["in_a_save"] = saving()
            facts["ended_after_s"] = round(act(live), 1)
            facts["logged_step"] = last_step(output)
            latest = find_latest(output)
            assert latest is not None, "no checkpoint"
            with redirect_stdout(StringIO()):  # DeepSpeed prints
                read_draft(latest[0])
            facts["checkpoint_step"] = latest[1].step
            assert latest[1].step >= facts["logged_step"] - saves_lost, "the checkpoint is too old"
            assert facts["ended_after_s"] < END_LIMIT_S, "ranks outlived a dead one"
        except Exception as error:  # the drill looks for any error
            facts["problem"] = f"{type(error).__name__}: {error}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(live.launch.pid, signal.SIGKILL)
    return facts


def last_step(output: Path) -> int:
    """The last step that the run has logged, 0 if there is none."""
    metrics = output / METRICS_NAME
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def is_rank(process: psutil.Process) -> bool:
    command = process.cmdline()
    return any(part.endswith(TRAINER) for part in command) and any("local_rank" in part for part in command[:5])


if __name__ == "__main__":
    sys.exit(main())
