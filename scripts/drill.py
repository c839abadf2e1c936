"""`make drill`: damage a training run at random moments of its saves, and resume from what is left.

A trial starts or resumes a run of two ranks that saves after every step, waits for a save, and applies one fault of
`drill_faults`. After each trial a checkpoint must load that is at most one save older than the last logged step (two,
if the newest one was damaged), and no rank may outlive a dead one by more than a minute. Faults change every second
trial; ZeRO-1 and ZeRO-3 alternate.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longspec.cli.train import ROOT
from longspec.pipeline.training import launch_line
from longspec.replacing import write_atomically
from longspec.train.checkpoint import read_draft
from longspec.train.generations import STATES, find_latest
from scripts.drill_faults import CPU_RANKS, END_LIMIT_S, KINDS, Live, environment, last_step, wait_until

SUMMARY = "summary.json"
TEXT_FILES = 20
VOCAB_SIZE = 512


@dataclass
class Trial:
    """One fault and its consequences."""

    zero_stage: int
    kind: str
    """Name of the fault, a key of KINDS."""
    in_a_save: bool
    """Whether a save was in progress."""
    logged_step: int
    checkpoint_step: int
    """Step of the newest checkpoint that loads."""
    ended_after_s: float
    """Seconds from the fault to the end of the last process."""
    problem: str = ""
    """Reason why the trial failed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/drill"))
    options = parser.parse_args()
    if options.output.exists() and not (options.output / SUMMARY).is_file():
        parser.error(f"--output {options.output}: not the output of a drill; give another folder")
    shutil.rmtree(options.output, ignore_errors=True)
    target, texts = prepare(options.output.resolve())
    chance = random.Random(options.seed)
    trials = []
    for number in tqdm(range(options.trials), unit="trial"):
        zero_stage, kind = (1, 3)[number % 2], list(KINDS)[number // 2 % len(KINDS)]
        trials.append(drill(options.output.resolve() / f"zero{zero_stage}", target, texts, zero_stage, kind, chance))
        tqdm.write(" ".join(f"{name} {value}" for name, value in asdict(trials[-1]).items()))
    failed = [trial for trial in trials if trial.problem]
    write_atomically(options.output / SUMMARY, json.dumps([asdict(trial) for trial in trials], indent=1) + "\n")
    in_a_save = sum(trial.in_a_save for trial in trials)
    print(f"{len(trials)} trials, {in_a_save} during a save, {len(failed)} failed")
    return 1 if failed else 0


def prepare(folder: Path) -> tuple[Path, Path]:
    """Write a random target, and training texts from the standard library. Returns their paths."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:TEXT_FILES]
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in library]
    data, target = folder / "texts.jsonl", folder / "target"
    write_atomically(data, "".join(json.dumps({"text": text}) + "\n" for text in texts), make_folder=True)

    bytes_and_pairs = ByteLevelBPETokenizer()
    bytes_and_pairs.train_from_iterator(texts, VOCAB_SIZE, special_tokens=["</s>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_and_pairs, eos_token="</s>", pad_token="</s>")
    tokenizer.save_pretrained(target)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=1,
        head_dim=64,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(target)
    return target, data


def drill(output: Path, target: Path, texts: Path, zero_stage: int, kind: str, chance: random.Random) -> Trial:
    """Start or resume the run in `output`, apply a fault around a save, and check the checkpoints."""
    before = last_step(output)
    act, saves_lost = KINDS[kind]
    trial = Trial(zero_stage, kind, False, -1, -1, -1)
    with output.with_suffix(".log").open("w") as log:
        command = endless_run(output, target, texts, zero_stage)
        run = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True)
        live = Live(run, output, chance)
        try:
            time.sleep(chance.uniform(0, 1.2 * wait_for_a_save(live, before)))
            trial.in_a_save = (output / STATES[0]).exists()
            trial.ended_after_s = round(act(live), 1)
            trial.logged_step = last_step(output)
            latest = find_latest(output)
            assert latest is not None, "no checkpoint"
            with redirect_stdout(StringIO()):  # DeepSpeed prints
                read_draft(latest[0])
            trial.checkpoint_step = latest[1].step
            assert trial.checkpoint_step >= trial.logged_step - saves_lost, "the checkpoint is too old"
            assert trial.ended_after_s < END_LIMIT_S, "ranks outlived a dead one"
        except Exception as error:  # the drill looks for any error
            trial.problem = f"{type(error).__name__}: {error}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    return trial


def endless_run(output: Path, target: Path, texts: Path, zero_stage: int) -> list[str]:
    """The command of an endless run that saves after every step."""
    overrides = {
        "model_name_or_path": str(target),
        "data.files": [str(texts)],
        "data.cache_dir": str(output.parent / "cache"),
        "output_dir": str(output),
        "deepspeed": f"zero{zero_stage}",
        "resume": "latest",
        "save_steps": 1,
        "max_steps": 100_000,
    }
    return launch_line("tiny_glide_stage1_sinkpi-slicing", overrides, CPU_RANKS)


def wait_for_a_save(live: Live, before: int) -> float:
    """Wait until the run has finished one save and starts the next. Returns the seconds of the first save."""
    began = ended = 0.0
    staged, launched = live.output / STATES[0], time.time()

    def saving_again() -> bool:
        nonlocal began, ended
        saving = False
        with suppress(FileNotFoundError):
            # The previous trial may have left an older one.
            saving = staged.stat().st_ctime > launched
        if saving and not began:
            began = time.monotonic()
        elif began and not saving and not ended:
            ended = time.monotonic()
        return bool(last_step(live.output) >= before + 2 and ended and saving)

    wait_until(saving_again, live)
    return ended - began


if __name__ == "__main__":
    sys.exit(main())
