"""`make drill`: harm a training run at random moments of its saves, and go on from what it left.

A trial starts or resumes a run of two ranks that saves after every step, waits for a save, and does what its kind
(see KINDS) says. After each there must be a checkpoint that loads and is at most one save older than the last logged
step (two, if the newest was damaged), and no rank may outlive a dead one by a minute. Kinds change every second trial,
ZeRO-1 and ZeRO-3 alternate.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path

import psutil
from tqdm import tqdm

from longspec.train.checkpoint import read_draft
from longspec.train.generations import STATES, find_latest, is_whole
from longspec.train.logging import METRICS_NAME
from scripts.demo.corpus import write_corpus
from scripts.demo.settings import tiny
from scripts.pipeline.files import TEXTS, read_jsonl, write_json
from scripts.pipeline.machine import CPU_RANKS, ROOT, TRAINER, free_port, launch_line
from scripts.pipeline.target_model import fresh_target
from scripts.pipeline.tokenizer import make_tokenizer

SUMMARY = "summary.json"
START_LIMIT_S, END_LIMIT_S = 180, 60


@dataclass
class Trial:
    """One fault and what was found after it."""

    zero_stage: int
    kind: str
    in_a_save: bool
    logged_step: int
    checkpoint_step: int
    ended_after_s: float
    problem: str = ""


@dataclass(frozen=True)
class Live:
    """A run that has come to a save."""

    launch: subprocess.Popen
    output: Path
    command: list[str]
    chance: random.Random

    @property
    def log(self) -> Path:
        return self.output.with_suffix(".log")

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.launch.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        found = [process for process in self.processes() if is_rank(process)]
        assert len(found) == CPU_RANKS, f"{len(found)} ranks"
        return found

    def killed(self, target: Callable[[], object]) -> float:
        """Call `target`, which is to end the run; the seconds until all of its processes have ended."""
        processes, start = self.processes(), time.monotonic()
        target()
        with suppress(subprocess.TimeoutExpired):
            self.launch.wait(timeout=2 * END_LIMIT_S)
        psutil.wait_procs(processes, timeout=END_LIMIT_S)  # ranks that outlive their launcher count
        return time.monotonic() - start

    def kill(self) -> float:
        return self.killed(lambda: os.killpg(self.launch.pid, signal.SIGKILL))


def all_ranks_killed(live: Live) -> float:
    return live.kill()


def one_rank_killed(live: Live) -> float:
    return live.killed(live.chance.choice(live.ranks()).kill)


def second_run(live: Live) -> float:
    """Whether it is to resume or to start afresh, it is refused, and the first run goes on."""
    more = live.chance.choice((["resume=latest"], ["resume=null"]))
    refused([*live.command, *more], "another run")
    step = last_step(live.output)
    wait_until(lambda: last_step(live.output) > step, live)
    return live.kill()


def rank_local_disks(live: Live) -> float:
    """Each rank has a folder of its own under the same relative path."""
    script = live.output.with_name("local.py")
    script.write_text(
        "import os, sys\n"
        "from longspec.train.trainer import main\n"
        f"folder = os.path.join({str(live.output)!r} + '_local', os.environ['RANK'])\n"
        "os.makedirs(folder, exist_ok=True)\n"
        "os.chdir(folder)\n"
        "main()\n"
    )
    command = [str(script) if part == TRAINER else part for part in live.command]
    refused([*command, "output_dir=out"], "is not one folder")
    return live.kill()


def full_disk(live: Live) -> float:
    """No file may grow past 200 kB: a shard is larger, the log and the metrics are not."""

    def fill() -> None:
        for rank in live.ranks():
            rank.rlimit(psutil.RLIMIT_FSIZE, (200_000, 200_000))

    ended = live.killed(fill)
    assert live.launch.returncode == 2, f"exit code {live.launch.returncode} with a full disk"
    assert "could not be written" in live.log.read_text(), "a full disk was not named"
    return ended


def file_deleted(live: Live) -> float:
    return damaged(live, lambda one, _: one.unlink())


def file_truncated(live: Live) -> float:
    return damaged(live, lambda one, _: os.truncate(one, live.chance.randrange(one.stat().st_size)))


def file_swapped(live: Live) -> float:
    def swap(one: Path, other: Path) -> None:
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)

    return damaged(live, swap)


def damaged(live: Live, harm: Callable[[Path, Path], object]) -> float:
    """Kill the run, then harm a file of its newest state, of which another one is given; an older state must do."""
    wait_until(lambda: is_whole(live.output / STATES[2]), live)
    ended = live.kill()
    found = find_latest(live.output)
    assert found is not None, "no checkpoint at all"
    one, other = live.chance.sample(sorted(found[0].rglob("*_optim_states.pt")), CPU_RANKS)
    harm(one, other)
    assert find_latest(live.output) not in (None, found), f"{one} is damaged, and nobody says so"
    return ended


KINDS: dict[str, tuple[Callable[[Live], float], int]] = {
    "all ranks killed": (all_ranks_killed, 1),
    "file swapped": (file_swapped, 2),
    "one rank killed": (one_rank_killed, 1),
    "second run": (second_run, 1),
    "full disk": (full_disk, 1),
    "file deleted": (file_deleted, 2),
    "rank-local disks": (rank_local_disks, 1),
    "file truncated": (file_truncated, 2),
}
"""What a trial does to a live run, which returns the seconds until it has ended, and how many saves that may cost."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/drill"))
    options = parser.parse_args()
    if options.output.exists() and not (options.output / SUMMARY).is_file():
        parser.error(f"--output {options.output}: there is something that no drill left; give another folder")
    shutil.rmtree(options.output, ignore_errors=True)
    target, texts = prepare(options.output.resolve())
    chance = random.Random(options.seed)
    trials = []
    for number in tqdm(range(options.trials), unit="trial"):
        zero_stage, kind = (1, 3)[number % 2], list(KINDS)[number // 2 % len(KINDS)]
        trials.append(drill(options.output.resolve() / f"zero{zero_stage}", target, texts, zero_stage, kind, chance))
        tqdm.write(" ".join(f"{name} {value}" for name, value in asdict(trials[-1]).items()))
    failed = [trial for trial in trials if trial.problem]
    write_json(options.output / SUMMARY, [asdict(trial) for trial in trials])
    in_a_save = sum(trial.in_a_save for trial in trials)
    print(f"{len(trials)} trials, {in_a_save} of them in a save: {len(failed)} failed")
    return 1 if failed else 0


def prepare(folder: Path) -> tuple[Path, Path]:
    """A target that has learnt nothing, and texts to train on."""
    settings, target = tiny("llama"), folder / "target"
    folder.mkdir(parents=True)
    write_corpus(folder, settings.corpus)
    texts = (record["text"] for record in read_jsonl(folder / TEXTS))
    shape = settings.target
    tokenizer = make_tokenizer(texts, shape.family, shape.vocab_size, shape.positions)
    tokenizer.save_pretrained(target)
    fresh_target(shape, tokenizer).save_pretrained(target)
    return target, folder / TEXTS


def drill(output: Path, target: Path, texts: Path, zero_stage: int, kind: str, chance: random.Random) -> Trial:
    """Start or resume the run in `output`, harm it about a save, and look at what is left."""
    before = last_step(output)
    act, saves_lost = KINDS[kind]
    trial = Trial(zero_stage, kind, False, -1, -1, -1)
    with output.with_suffix(".log").open("w") as log:
        command = endless_run(output, target, texts, zero_stage)
        run = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True)
        live = Live(run, output, command, chance)
        try:
            time.sleep(chance.uniform(0, 1.2 * wait_for_a_save(live, before)))
            trial.in_a_save = (output / STATES[0]).exists()
            trial.ended_after_s = round(act(live), 1)
            trial.logged_step = last_step(output)
            found = find_latest(output)
            assert found is not None, "no checkpoint at all"
            with redirect_stdout(StringIO()):  # DeepSpeed prints what it finds there
                read_draft(found[0])
            trial.checkpoint_step = found[1].step
            assert trial.checkpoint_step >= trial.logged_step - saves_lost, "too old"
            assert trial.ended_after_s < END_LIMIT_S, "ranks outlived a dead one"
        except Exception as error:  # whatever keeps a checkpoint from loading is what this is for
            trial.problem = f"{type(error).__name__}: {error}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    return trial


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "PYTHONPATH": paths}
    return os.environ | given


def refused(command: list[str], reason: str) -> None:
    """Run a launch line that must end with exit code 2 and one line that gives the reason."""
    command = [str(free_port()) if before == "--master_port" else part for before, part in pairwise(["", *command])]
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=START_LIMIT_S)
    errors = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert run.returncode == 2 and len(errors) == 1 and reason in errors[0], f"not refused: {run.stderr[-500:]}"


def endless_run(output: Path, target: Path, texts: Path, zero_stage: int) -> list[str]:
    """A run without end that saves after every step."""
    overrides = {
        "model_name_or_path": target,
        "data.files": f"[{texts}]",
        "data.cache_dir": output.parent / "cache",
        "output_dir": output,
        "deepspeed": f"zero{zero_stage}",
        "resume": "latest",
        "save_steps": 1,
        "max_steps": 100_000,
    }
    return launch_line(["--num_gpus", str(CPU_RANKS)], "tiny_glide_stage1_sinkpi-slicing", overrides)


def last_step(output: Path) -> int:
    """The last step that the run has logged, 0 before the first."""
    metrics = output / METRICS_NAME
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_for_a_save(live: Live, before: int) -> float:
    """Until the run has saved a step of its own and begins to save once more; how long that save took."""
    began = ended = 0.0
    staged, launched = live.output / STATES[0], time.time()

    def saving_again() -> bool:
        nonlocal began, ended
        saving = False
        with suppress(FileNotFoundError):
            saving = staged.stat().st_ctime > launched  # an older one was left by the trial before
        if saving and not began:
            began = time.monotonic()
        elif began and not saving and not ended:
            ended = time.monotonic()
        return bool(last_step(live.output) >= before + 2 and ended and saving)

    wait_until(saving_again, live)
    return ended - began


def wait_until(condition: Callable[[], bool], live: Live) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not condition():
        if live.launch.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run did not come to a save; see {live.log}")
        time.sleep(0.005)


def is_rank(process: psutil.Process) -> bool:
    command = process.cmdline()
    return any(part.endswith(TRAINER) for part in command) and any("local_rank" in part for part in command[:5])


if __name__ == "__main__":
    sys.exit(main())
