"""Drafts of several architectures on the same text: `python -m experiments.drafts --config FILE [--output_dir DIR]`.

One command writes the text, trains and measures every arm with every seed, and writes the page. It continues where an
earlier run stopped. Section `experiment` of the settings:

    arms       drafts: architecture and options, values of the trainer's configuration for stage 1, and limits
    baselines  methods without a draft, measured once
    methods    methods measured with each draft
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
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
    parser.add_argument("--seeds", nargs="*", type=int, default=[0], help="default: 0")
    parser.add_argument("--arms", nargs="*", metavar="NAME", help="arms to train, default: all; none: only the page")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(argv)
    with demo_extra():
        from experiments.comparison import measure_arm, read_comparison, train_arm
        from experiments.drafts_page import write_results
        from longspec.locks import locked
        from longspec.pipeline.answers import CHAT
        from longspec.pipeline.files import settings_file
        from longspec.pipeline.run import steps_of
        from longspec.pipeline.settings import load_settings, settings_yaml
        from longspec.replacing import write_atomically

    settings = load_settings(options.config, options.overrides)
    comparison = read_comparison(settings)
    root = Path(options.output_dir or f"outputs/drafts-{Path(settings.target).name}")
    chosen = list(comparison.arms) if options.arms is None else options.arms
    if unknown := sorted(set(chosen) - set(comparison.arms)):
        raise UserError(f"--arms {unknown[0]}: no such arm; use {', '.join(comparison.arms)}")
    with StopSignals(at_once=True), locked(root):
        write_atomically(settings_file(root), settings_yaml(settings))
        text = steps_of(settings, root)
        for step in (CHAT, "prompts", "answers"):
            if chosen and step in text:
                print(f"text: {step}", flush=True)
                text[step]()
        for seed in options.seeds:
            for name in chosen:
                print(f"arm {name}, seed {seed}", flush=True)
                train_arm(settings, comparison, root, name, seed)
                measure_arm(settings, comparison, root, name, seed)
        command = shlex.join(["python", "-m", "experiments.drafts", *(sys.argv[1:] if argv is None else argv)])
        print(f"report: {write_results(settings, comparison, root, command)}")


if __name__ == "__main__":
    main()
