"""`scripts/reproduce.sh`: a target and its drafts from nothing, and the paper's claims measured on them."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the experiment is of one GPU, whatever the machine has

from longspec.errors import UserError, reports_user_errors
from scripts.pipeline.machine import CommandFailed, gpus
from scripts.pipeline.steps import Steps
from scripts.reproduce.ablations import UNTRAINED, arm_settings, evaluate_arms
from scripts.reproduce.evaluate import evaluate
from scripts.reproduce.report import report
from scripts.reproduce.run import Run
from scripts.reproduce.settings import PRESETS, Settings
from scripts.reproduce.training import ABLATIONS, train_arms, train_pairs

FAMILIES = ("llama", "qwen2")
GPU_PRESETS = ("h200", "24gb")


@reports_user_errors
def main() -> None:
    """Raises SystemExit: 1 if a step failed, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="scripts/reproduce.sh", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="h200")
    parser.add_argument("--text", type=Path, help="folder of JSONL files: meetings with queries, worked solutions")
    parser.add_argument("--family", choices=(*FAMILIES, "both"), default="llama")
    known = (*ABLATIONS, *UNTRAINED)
    parser.add_argument("--ablation", nargs="+", choices=known, default=[], help="on a run's target, these")
    parser.add_argument("--output", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    if options.text and not options.text.is_dir():
        raise UserError(f"--text {options.text}: no such folder")
    if options.preset in GPU_PRESETS and not gpus():
        raise UserError(f"--preset {options.preset}: needs a CUDA device, and there is none; use --preset cpu")
    signal.signal(signal.SIGTERM, stop)
    try:
        for family in FAMILIES if options.family == "both" else (options.family,):
            text = str(options.text.resolve()) if options.text else None
            root = options.output.resolve() / f"reproduce-{options.preset}" / family
            reproduce(Run(root, family, options.preset), PRESETS[options.preset](family, text), options.ablation)
    except CommandFailed as error:
        print(f"\n{error}", file=sys.stderr)
        raise SystemExit(1) from None


def reproduce(run: Run, settings: Settings, ablations: Sequence[str]) -> None:
    """Do what is not done yet, and report. With ablations the main draft gets no more time to be measured in."""
    start = time.perf_counter()
    steps, failure = train_pairs(run, settings)
    main = replace(settings.evaluation, limit_s=0.0) if ablations else settings.evaluation
    evaluate(run.root / "evaluation", run, main)
    if ablations and not failure:
        failure = ablate(run, steps, ablations, settings)
    report(run.root / "report", run)
    print(f"{time.perf_counter() - start:.0f} s; {run.root / 'report'}")
    if failure:
        raise failure


def ablate(run: Run, steps: Steps, names: Sequence[str], settings: Settings) -> BaseException | None:
    """Train the arms that the ablations need, and evaluate them all; what kept one from being trained."""
    evaluation = arm_settings(settings.evaluation)
    arms, failure = train_arms(run, steps, [name for name in names if name in ABLATIONS], settings)
    for name in names:
        folder = run.root / "ablations" / name
        if name in UNTRAINED:
            UNTRAINED[name](folder, run, evaluation)
        else:
            evaluate_arms(folder, arms[name], evaluation)
    return failure


def stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends what runs, too; the same command goes on from there."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
