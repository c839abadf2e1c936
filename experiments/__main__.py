"""Ablation arms and the results page of a pair: `python -m experiments --config FILE [--output_dir DIR]`.

`longspec draft TARGET --config FILE` comes first: it writes the text, and trains and measures the draft.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from longspec.errors import reports_user_errors
from longspec.extras import demo_extra
from longspec.signals import StopSignals


@reports_user_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Train the arms that are missing, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("--config", default="experiments/smollm2.yaml", help="settings of `longspec draft`")
    parser.add_argument("--output_dir", help="folder of `longspec draft`, default: outputs/TARGET")
    parser.add_argument("--arms", nargs="*", metavar="NAME", help="arms to train, default: all")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(argv)
    with demo_extra():
        from experiments.arms import read_experiment, train_arm, write_results
        from longspec.pipeline.settings import load_settings

    settings = load_settings(options.config, options.overrides)
    experiment = read_experiment(settings)
    root = Path(options.output_dir or f"outputs/{Path(settings.target).name}")
    with StopSignals(at_once=True):
        for name in experiment.arms if options.arms is None else options.arms:
            train_arm(settings, experiment, root, name)
        command = shlex.join(["python", "-m", "experiments", *(sys.argv[1:] if argv is None else argv)])
        write_results(settings, experiment, root, command)


if __name__ == "__main__":
    main()
