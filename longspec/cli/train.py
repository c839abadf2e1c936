"""The command `longspec train`: runs the trainer on a configuration by name."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from longspec.cli.options import command, option
from longspec.errors import UserError
from longspec.extras import extra

ROOT = Path(__file__).resolve().parents[2]
TRAINER = "trainer_base_ds_mul_fs_tp.py"
CONFIGS = Path("conf", "exp")
LAUNCH = "Launch"


def config_names(folder: Path = ROOT / CONFIGS) -> list[str]:
    """The names of the configurations in `folder`."""
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _complete(incomplete: str) -> list[str]:
    return [name for name in config_names() if name.startswith(incomplete)]


@dataclass(frozen=True)
class LaunchOptions:
    num_gpus: int | None = option(None, "Number of ranks.", LAUNCH, min=1, show_default="all GPUs")
    include: str | None = option(None, "Hosts and GPUs, such as localhost:0,1.", LAUNCH)
    master_port: int | None = option(None, "Port of rank 0.", LAUNCH, min=1, max=65535, show_default="29500")
    config_dir: Path | None = option(None, "Configuration folder.", LAUNCH, show_default=str(CONFIGS))
    dry_run: bool = option(False, "Check the configuration and print the launch line only.", LAUNCH)


@command()
def train(
    config: Annotated[
        str,
        typer.Argument(help="Name of a file in the configuration folder, without .yaml.", autocompletion=_complete),
    ],
    options: LaunchOptions,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that replace those of the configuration: key=value.")
    ] = None,
) -> None:
    """Train a draft: check a configuration, print DeepSpeed's launch line for it and run it."""
    if options.include is not None and options.num_gpus is not None:
        raise UserError("--include, --num_gpus: give one of them")
    parts = [] if options.num_gpus is None else gpu_options(options.num_gpus)
    for name in ("include", "master_port"):
        if (value := getattr(options, name)) is not None:
            parts += [f"--{name}", str(value)]
    line = launch_line(config, overrides or [], parts, options.config_dir)
    with extra("train"):
        from longspec.train.config import load_config
    load_config(line[line.index("-cp") :])  # so that an error is not followed by the launcher's messages
    print(shlex.join(line), flush=True)
    if not options.dry_run:
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or each of the launcher's processes remarks it
        os.execv(line[0], line)


def gpu_options(count: int) -> list[str]:
    """Options of DeepSpeed's launcher for `count` ranks, on the devices of CUDA_VISIBLE_DEVICES if it is set.

    Raises UserError if it names fewer.
    """
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    on_gpus = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    # The launcher takes numbers only, not the names of devices.
    if not on_gpus or not all(device.isdigit() for device in visible):
        return ["--num_gpus", str(count)]
    if count > len(visible):
        raise UserError(f"--num_gpus: {count}, but CUDA_VISIBLE_DEVICES names {len(visible)}")
    # With --num_gpus the launcher would ignore the variable.
    return ["--include", f"localhost:{','.join(visible[:count])}"]


def launch_line(config: str, overrides: list[str], options: list[str], config_dir: Path | None = None) -> list[str]:
    """The command line of a training run. options: those of DeepSpeed's launcher. Raises UserError."""
    trainer = ROOT / TRAINER
    folder = (config_dir or ROOT / CONFIGS).absolute()
    if not trainer.is_file():
        raise UserError(f"{trainer}: not found; training runs from a clone of the repository (pip install -e .)")
    if not (folder / f"{config}.yaml").is_file():
        names = ", ".join(config_names(folder)) or "none"
        raise UserError(f"{config}: no configuration in {folder}; there are: {names}")
    for override in overrides:
        if "=" not in override:
            raise UserError(f"{override}: not an override; write key=value")
    # The launcher would repeat the whole command after the error that ended the run.
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "critical", *options]
    return [*launcher, str(trainer), "-cp", str(folder), "-cn", config, *overrides]
