"""Drafts of several architectures on the same text: `python -m experiments.drafts --config FILE [--output_dir DIR]`.

One command writes the text, trains and measures every arm with every seed, and writes the page, again after each job.
It continues where an earlier run stopped. Section `experiment` of the settings:

    arms       drafts: architecture and options, values of the trainer's configuration for stage 1, and limits
    baselines  methods without a draft, measured once
    forced     teacher-forced methods, measured with each seed
    decoding   methods that decode, for the time per round, measured with the first seed
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from longspec.errors import UserError, reports_user_errors
from longspec.extras import demo_extra
from longspec.signals import StopSignals


@reports_user_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the page of what is there."""
    parser = argparse.ArgumentParser(prog="python -m experiments.drafts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default="experiments/drafts_smollm2.yaml", help="settings")
    parser.add_argument("--output_dir", help="default: outputs/drafts-TARGET")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    parser.add_argument("--arms", nargs="*", metavar="NAME", help="arms to train, default: all; none: only the page")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(argv)
    if min(options.seeds) < 0:
        raise UserError(f"--seeds {min(options.seeds)}: must be at least 0")
    with demo_extra():
        from experiments.comparison import check_arms, check_unchanged, read_comparison
        from experiments.drafts_page import write_results
        from experiments.jobs import is_done, planned_jobs, run_jobs
        from longspec.locks import locked
        from longspec.pipeline.answers import CHAT
        from longspec.pipeline.files import run_settings
        from longspec.pipeline.prompts import prompts_are_written
        from longspec.pipeline.run import steps_of
        from longspec.pipeline.settings import load_settings, settings_yaml
        from longspec.pipeline.sources import check_folders

    settings = load_settings(options.config, options.overrides)
    comparison = read_comparison(settings)
    root = Path(options.output_dir or f"outputs/drafts-{Path(settings.target).name}")
    chosen = list(comparison.arms) if options.arms is None else options.arms
    if chosen and not prompts_are_written(settings, root):
        check_folders(settings)
    check_arms(settings, comparison, root, chosen, options.seeds)
    check_unchanged(settings, comparison, root, chosen, options.seeds)
    command = shlex.join(["python", "-m", "experiments.drafts", *(sys.argv[1:] if argv is None else argv)])
    write_page = partial(write_results, settings, comparison, root, sorted(set(options.seeds)), command)
    failed = []
    with StopSignals(at_once=True), locked(root), run_settings(root, settings_yaml(settings)):
        if chosen:
            text = steps_of(settings, root)
            for step in (CHAT, "prompts", "answers"):
                if step in text:
                    print(f"text: {step}", flush=True)
                    text[step]()
            planned = planned_jobs(comparison, chosen, options.seeds)
            done = {job for job in planned if is_done(job, settings, comparison, root)}
            print(f"jobs: {len(done)} of {len(planned)} are done", flush=True)
            failed = run_jobs(planned, done, root, comparison.jobs_per_gpu, write_page)
        if (page := write_page()) is None:
            raise UserError(f"{root}: no arm is measured yet")
        print(f"report: {page}")
    if failed:
        raise UserError(f"{', '.join(map(str, failed))}: failed, see above; the same command tries again")


if __name__ == "__main__":
    main()
