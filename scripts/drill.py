"""`make drill`: kill -9 a training run at random moments of its saves, and go on from what it left.

Trials alternate between all ranks and one rank, and between ZeRO-1 and ZeRO-3. After each there must be a checkpoint
that loads and is at most one save older than the last logged step, and no rank may outlive a dead one by a minute.
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
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path

import psutil
from tqdm import tqdm

from longspec.train.checkpoint import read_draft
from longspec.train.generations import STATES, find_latest
from longspec.train.logging import METRICS_NAME
from scripts.demo.corpus import write_corpus
from scripts.demo.settings import tiny
from scripts.pipeline.files import TEXTS, read_jsonl, write_json
from scripts.pipeline.machine import CPU_RANKS, ROOT, TRAINER, launch_line
from scripts.pipeline.target_model import fresh_target
from scripts.pipeline.tokenizer import make_tokenizer

SUMMARY = "summary.json"
START_LIMIT_S, END_LIMIT_S = 180, 60


@dataclass
class Trial:
    """One kill and what was found after it."""

    zero_stage: int
    killed: str
    in_a_save: bool
    logged_step: int
    checkpoint_step: int
    ended_after_s: float
    problem: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/drill"))
    options = parser.parse_args()
    if options.output.exists() and not (options.output / SUMMARY).is_file():
        parser.error(f"--output {options.output}: there is something that no drill left; give another folder")
    shutil.rmtree(options.output, ignore_errors=True)
    target, texts = prepare(options.output.resolve())
    chance = random.Random(options.seed)
    trials = []
    for number in tqdm(range(options.trials), unit="kill"):
        zero_stage, killed = (1, 3)[number // 2 % 2], ("all ranks", "one rank")[number % 2]
        trials.append(drill(options.output.resolve() / f"zero{zero_stage}", target, texts, zero_stage, killed, chance))
        tqdm.write(" ".join(f"{name} {value}" for name, value in asdict(trials[-1]).items()))
    failed = [trial for trial in trials if trial.problem]
    write_json(options.output / SUMMARY, [asdict(trial) for trial in trials])
    in_a_save = sum(trial.in_a_save for trial in trials)
    print(f"{len(trials)} kills, {in_a_save} of them in a save: {len(failed)} left no good checkpoint")
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


def drill(output: Path, target: Path, texts: Path, zero_stage: int, killed: str, chance: random.Random) -> Trial:
    """Start or resume the run in `output`, kill it about a save, and look at what is left."""
    before = last_step(output)
    with output.with_suffix(".log").open("a") as log:
        command = endless_run(output, target, texts, zero_stage)
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            time.sleep(chance.uniform(0, 1.2 * wait_for_a_save(run, output, before)))
            in_a_save = (output / STATES[0]).exists()
            ended = kill(run, killed, chance)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    trial = Trial(zero_stage, killed, in_a_save, last_step(output), -1, round(ended, 1))
    try:
        found = find_latest(output)
        assert found is not None, "no checkpoint at all"
        with redirect_stdout(StringIO()):  # DeepSpeed prints what it finds there
            read_draft(found[0])
        trial.checkpoint_step = found[1].step
        assert trial.checkpoint_step >= trial.logged_step - 1, "older than one interval"
        assert ended < END_LIMIT_S, "ranks outlived a dead one"
    except Exception as error:  # whatever keeps a checkpoint from loading is what this is for
        trial.problem = f"{type(error).__name__}: {error}"
    return trial


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


def wait_for_a_save(run: subprocess.Popen, output: Path, before: int) -> float:
    """Until the run has saved a step of its own and begins to save once more; how long that save took."""
    deadline = time.monotonic() + START_LIMIT_S
    began = ended = 0.0
    while last_step(output) < before + 2 or not ended or not (output / STATES[0]).exists():
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run did not come to a save; see {output.with_suffix('.log')}")
        saving = (output / STATES[0]).exists()
        if saving and not began:
            began = time.monotonic()
        elif began and not saving and not ended:
            ended = time.monotonic()
        time.sleep(0.005)
    return ended - began


def kill(run: subprocess.Popen, killed: str, chance: random.Random) -> float:
    """kill -9 the whole run or one of its ranks; how many seconds its processes needed to end."""
    processes = psutil.Process(run.pid).children(recursive=True)
    ranks = [process for process in processes if is_rank(process)]
    assert len(ranks) == CPU_RANKS
    start = time.monotonic()
    if killed == "all ranks":
        os.killpg(run.pid, signal.SIGKILL)
    else:
        chance.choice(ranks).kill()
    with suppress(subprocess.TimeoutExpired):
        run.wait(timeout=2 * END_LIMIT_S)
    psutil.wait_procs(processes, timeout=END_LIMIT_S)  # ranks that outlive their launcher count
    return time.monotonic() - start


def is_rank(process: psutil.Process) -> bool:
    command = process.cmdline()
    return any(part.endswith(TRAINER) for part in command) and any("local_rank" in part for part in command[:5])


if __name__ == "__main__":
    sys.exit(main())
