"""The trainer's command-line arguments. This module imports neither torch nor DeepSpeed, so help is fast."""

import argparse


def launch_parser() -> argparse.ArgumentParser:
    """The parser of the trainer's arguments. Overrides are left to Hydra."""
    parser = argparse.ArgumentParser(description="Train a GLIDE draft for a frozen target.")
    parser.add_argument("-cp", "--config-path", default="conf/exp", help="folder with the experiments")
    parser.add_argument("-cn", "--config-name", required=True, help="experiment, a file in this folder")
    parser.add_argument("-c", "--cfg", choices=["job"], help="print the composed configuration and exit")
    # The launcher adds this argument.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the configuration, as in Hydra")
    return parser
