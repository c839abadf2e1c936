"""Run an experiment: `python -m experiments STEP --config FILE [--text DIR] [--root DIR] [key=value ...]`."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longspec.errors import reports_user_errors
from longspec.extras import extra
from longspec.signals import StopSignals

if TYPE_CHECKING:
    from experiments.settings import Settings

STEPS = ("prompts", "regenerate", "probe", "train", "diagnose", "evaluate", "report")


@reports_user_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run one step or all of them. A step that was stopped resumes when it is run again."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("step", choices=[*STEPS, "all"])
    parser.add_argument("--config", default="experiments/smollm2.yaml", help="YAML file with the settings")
    parser.add_argument("--text", help="folder with gsm8k, qmsum and aime24; without it, these tasks are skipped")
    parser.add_argument("--root", help="folder for all output except the report")
    # One process's part: NUMBER/COUNT of the evaluation, or the names of the runs whose text it helps to write.
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    arguments = parser.parse_intermixed_args(argv)

    with extra("demo"):
        from experiments.processes import running
        from experiments.settings import load_settings

    folders = {name: getattr(arguments, name) for name in ("text", "root") if getattr(arguments, name)}
    overrides = [*(f"{name}={folder}" for name, folder in folders.items()), *arguments.overrides]
    settings = load_settings(arguments.config, overrides)
    options = [f"--config={arguments.config}", *overrides]

    began = time.perf_counter()
    with StopSignals(at_once=True):  # raises SystemExit, so that context managers stop child processes
        if arguments.step != "all":
            run_step(arguments.step, settings, options, arguments.part)
        for step in STEPS if arguments.step == "all" else ():
            # Each in its own process, so that its device memory is free for the next step.
            with running([sys.executable, "-m", "experiments", step, *options]) as child:
                if code := child.wait():
                    raise SystemExit(code)
    print(f"{arguments.step}: {time.perf_counter() - began:.0f} s", flush=True)


def run_step(step: str, settings: Settings, options: Sequence[str], part: str | None) -> None:
    """Run one step and import only what it needs.

    options: the command's options, for processes that the step starts. part: see `evaluation.evaluate` and
    `answers.write_answers`.
    """
    root = Path(settings.root)
    if step == "prompts":
        from experiments.answers import write_chat
        from experiments.prompts import write_prompts

        if part is None:
            write_prompts(settings, root, options)
        else:
            write_chat(settings, root, options, part)
    elif step == "regenerate":
        from experiments.answers import write_answers

        write_answers(settings, root, options, part)
    elif step == "probe":
        from experiments.probes import write_probes

        write_probes(settings, root)
    elif step == "train":
        from experiments.training import train

        train(settings, root)
    elif step == "diagnose":
        from experiments.diagnostics import write_diagnostics

        write_diagnostics(settings, root)
    elif step == "evaluate":
        from experiments.evaluation import evaluate

        evaluate(settings, root, options, part)
    else:
        from experiments.report import report

        report(settings, root, shlex.join(["python", "-m", "experiments", "all", *options]))


if __name__ == "__main__":
    main()
