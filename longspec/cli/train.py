"""The command `longspec train`: runs the trainer on a configuration by name."""

import os
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longspec.cli.options import command, option
from longspec.errors import UserError
from longspec.extras import extra

if TYPE_CHECKING:
    from longspec.train.config_schema import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
TRAINER = "trainer_base_ds_mul_fs_tp.py"
CONFIGS = Path("conf", "exp")
LAUNCH = "Launch"
LAUNCHER_OPTIONS = ("--log_level", "critical")
"""Options of DeepSpeed's launcher. At other levels it repeats the whole command after the error that ended the run."""
HOSTFILE = Path("/job/hostfile")
"""The hosts of a launch, which DeepSpeed's launcher reads if the file exists."""
COUNTED_BYTES = 2**30
"""Largest data whose records a dry run counts."""


def _complete(incomplete: str) -> list[str]:
    return sorted(file.stem for file in (ROOT / CONFIGS).glob(f"{incomplete}*.yaml"))


@dataclass(frozen=True)
class LaunchOptions:
    num_gpus: int | None = option(None, "Number of ranks.", LAUNCH, min=1, show_default="all GPUs")
    include: str | None = option(None, "Hosts and GPUs, such as localhost:0,1.", LAUNCH)
    master_port: int | None = option(None, "Port of rank 0.", LAUNCH, min=1, max=65535, show_default="29500")
    config_dir: Path | None = option(None, "Configuration folder.", LAUNCH, show_default=str(CONFIGS))
    dry_run: bool = option(False, "Check the configuration and print what follows from it and the launch line.", LAUNCH)


@command()
def train(
    config: Annotated[
        str, typer.Argument(help="Name of a file in the configuration folder, without .yaml.", autocompletion=_complete)
    ],
    options: LaunchOptions,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that replace those of the configuration: key=value.")
    ] = None,
) -> None:
    """Train a draft: check a configuration, print DeepSpeed's launch line for it and run it."""
    if options.include is not None and options.num_gpus is not None:
        raise UserError("--include, --num_gpus: give one of them")
    arguments = [*LAUNCHER_OPTIONS, *([] if options.num_gpus is None else gpu_options(options.num_gpus))]
    for name in ("include", "master_port"):
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name}", str(value)]
    trainer = trainer_line(config, overrides or [], options.config_dir)
    with extra("train"):
        from longspec.train.config import load_config
    ranks = known_ranks(options)
    # Checked here, so that an error is not followed by the launcher's messages.
    settings = load_config(trainer[1:], ranks)
    if options.dry_run and settings is not None:
        from longspec.train.run import check_start

        check_start(settings)
        print(plan(settings, ranks))
    print(shlex.join([sys.executable, "-m", "deepspeed.launcher.runner", *arguments, *trainer]), flush=True)
    if not options.dry_run:
        if not on_gpus():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or each of the launcher's processes remarks it
        run_launcher([*arguments, *trainer])


def run_launcher(arguments: list[str]) -> None:
    """Run DeepSpeed's launcher in this process, whose stop signals raise SystemExit instead of KeyboardInterrupt. Ranks
    that it leaves get SIGTERM, and the function waits for them. Raises SystemExit if a rank fails."""
    import psutil
    from deepspeed.launcher.runner import main

    try:
        main(arguments)
    finally:
        launchers = psutil.Process().children()
        ranks = [rank for launcher in launchers for rank in launcher.children()]
        # Not to launch.py, which kills its ranks 30 s after a SIGTERM. It ends after them.
        for process in ranks or launchers:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(launchers)


def on_gpus() -> bool:
    """Whether DeepSpeed trains on GPUs."""
    import torch

    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def known_ranks(options: LaunchOptions) -> int | None:
    """The number of ranks of a launch: that of the options, or of all GPUs; None if neither tells it."""
    import torch

    if HOSTFILE.exists():
        return None
    if options.num_gpus is not None:
        return options.num_gpus
    if options.include is None:
        return torch.cuda.device_count() if on_gpus() else None
    devices = [host.partition(":")[2] for host in options.include.split("@")]
    return sum(len(numbers.split(",")) for numbers in devices) if all(devices) else None


def plan(config: "TrainConfig", ranks: int | None) -> str:
    """What a run reads and how long it takes, as far as is known without counting tokens. ranks: None if unknown.
    Raises UserError for data without a record, and for first lines that are no JSON objects."""
    from longspec.data.lines import data_files, first_lines, text_lines
    from longspec.data.records import parse_record
    from longspec.train.resume import rows_per_step, steps_over

    data, files = config.data, data_files(config.data.files)
    evaluated = data_files(config.evaluation.files) if config.evaluation.files else []
    for line in [*first_lines(files), *(first_lines(evaluated) if evaluated else [])]:
        parse_record(*line)
    size, records = sum(map(os.path.getsize, files)), 0
    lines = [f"data: {size:,} bytes, files: {len(files)}"]
    if size <= COUNTED_BYTES:
        records = sum(1 for file in files for _ in text_lines(file))
        lines[0] += f", records: {records:,}"
    steps = config.max_steps
    if ranks is not None:
        rows = rows_per_step(config, max(1, ranks // config.tp_size))
        lines.append(f"step: {rows:,} rows of up to {data.max_length:,} tokens, {rows * data.max_length:,} in all")
        # Packed and split rows depend on the number of tokens.
        if records and not data.pack and data.overflow == "truncate":
            lines.append(f"epoch: {records / rows:,.1f} steps, if all records are used")
            steps = steps_over(config, records, rows)
    return "\n".join(lines if steps is None else [*lines, f"run: {steps:,} steps"])


def gpu_options(count: int) -> list[str]:
    """DeepSpeed's options for `count` ranks, on CUDA_VISIBLE_DEVICES if set. Raises UserError if it names fewer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    # The launcher takes numbers only, not the names of devices.
    if not on_gpus() or not all(device.isdigit() for device in visible):
        return ["--num_gpus", str(count)]
    if count > len(visible):
        raise UserError(f"--num_gpus: {count}, but CUDA_VISIBLE_DEVICES names {len(visible)}")
    # With --num_gpus the launcher would ignore the variable.
    return ["--include", f"localhost:{','.join(visible[:count])}"]


def trainer_line(config: str, overrides: list[str], config_dir: Path | None = None) -> list[str]:
    """The trainer and its arguments. Raises UserError."""
    trainer = ROOT / TRAINER
    folder = (config_dir or ROOT / CONFIGS).absolute()
    if not trainer.is_file():
        raise UserError(f"{trainer}: not found; training runs from a clone of the repository (pip install -e .)")
    for override in overrides:
        if "=" not in override:
            raise UserError(f"{override}: not an override; write key=value")
    return [str(trainer), "-cp", str(folder), "-cn", config, *overrides]
