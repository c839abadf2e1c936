"""Saving and loading a run's checkpoints. Global rank 0 writes (not local rank 0); see `generations`."""

import errno
import json
import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspec.errors import UserError, first_line
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME, draft_of_pair, save_draft_file
from longspec.models.draft_layer import DraftOptions
from longspec.models.target_cache import resolve_target
from longspec.models.target_files import read_config
from longspec.train.config import CONFIG_NAME, TrainConfig, is_checkpoint, read_config_file, to_yaml
from longspec.train.distributed import from_every_rank, from_rank_zero
from longspec.train.generations import BEST, DRAFTS, STATES, settle
from longspec.train.seals import Progress, Run, damage, describe, read_seal, seal
from longspec.train.shards import MASTERS, Shards, adopt

logger = logging.getLogger(__name__)

EVALUATION_NAME = "evaluation.json"
"""What `checkpoint-best` was chosen for."""
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save_checkpoint(
    engine: Any, tokenizer: Any, config: TrainConfig, progress: Progress, output_dir: str | Path, run: Run | None = None
) -> None:
    """Save `run` as the newest generation. Every rank takes part; global rank 0 writes all but the others' shards.

    It is sealed from every rank's own report of what it wrote. Raises UserError if a file cannot be written, or if
    rank 0 does not see one of another rank; then the generations before stay as they are.
    """
    output = Path(output_dir)
    state, draft_folder = output / STATES[0], output / DRAFTS[0]

    def clear() -> None:
        with _writing(output, progress):
            settle(output)

    def complete() -> None:
        with _writing(output, progress):
            _write_draft(draft_folder, draft, config.model.draft_options, tokenizer)
            _write_config(state, config)
            _write_config(draft_folder, config)
            seal(state, progress, run, reports)
            seal(draft_folder, progress, run)
            settle(output)

    from_rank_zero(clear)
    with _writing(output, progress):
        with _recorded(engine) as written:
            engine.save_checkpoint(str(state), tag=f"step{progress.step}", exclude_frozen_parameters=True)
        report = describe(state, written)
    reports = from_every_rank(report)
    draft = gather_draft(engine.module)
    from_rank_zero(complete)


@contextmanager
def _recorded(engine: Any) -> Iterator[list[Path]]:
    """The files that this rank's engine writes meanwhile, as DeepSpeed's checkpoint engine is told to."""
    written: list[Path] = []
    save = engine.checkpoint_engine.save

    def record(state_dict: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        written.append(Path(path))
        return save(state_dict, path, *args, **kwargs)

    engine.checkpoint_engine.save = record
    try:
        yield written
    finally:
        engine.checkpoint_engine.save = save


def save_best(
    model: nn.Module,
    tokenizer: Any,
    config: TrainConfig,
    progress: Progress,
    metrics: dict[str, float],
    run: Run | None = None,
) -> None:
    """Keep the present draft as `checkpoint-best`, and in it the `metrics` it was chosen for. Every rank takes part."""
    output = Path(config.output_dir)
    draft = gather_draft(model)

    def write() -> None:
        with _writing(output, progress):
            settle(output)
            folder = output / BEST[0]
            _write_draft(folder, draft, config.model.draft_options, tokenizer)
            _write_config(folder, config)
            (folder / EVALUATION_NAME).write_text(json.dumps({"step": progress.step, **metrics}, indent=2) + "\n")
            seal(folder, progress, run)
            settle(output)

    from_rank_zero(write)


def read_best(config: TrainConfig, run: Run | None = None) -> float:
    """The held-out acceptance length of the draft in `checkpoint-best`, which a better one is to replace.

    -inf, and a warning, where another run or evaluation chose it or it is not as it was saved; -inf if there is none.
    """
    folder = Path(config.output_dir) / BEST[1]
    if not folder.exists():
        return -math.inf
    problem, saved = damage(folder), read_seal(folder)
    if problem is None and saved is not None:
        if run is not None and saved.run.id != run.id:
            problem = f"{folder} is of another run"
        elif not _same_held_out_rows(folder, saved.run, config, run):
            problem = f"{folder} was the best on other held-out rows"
        else:
            return json.loads((folder / EVALUATION_NAME).read_text())["eval_acceptance_length"]
    logger.warning("%s: the next evaluation replaces it", problem)
    return -math.inf


def _same_held_out_rows(folder: Path, saved: Run, config: TrainConfig, run: Run | None) -> bool:
    """Whether a best draft was chosen on the rows that `config` holds out: by content where both runs know it."""
    before, now = read_config_file(folder / CONFIG_NAME).evaluation, absolute_paths(config).evaluation
    if before.rows != now.rows:
        return False
    if saved.contents is None or run is None or run.contents is None:
        return before.files == now.files
    return [digest for _, digest in saved.contents.held_out] == [digest for _, digest in run.contents.held_out]


def _write_draft(folder: Path, draft: dict[str, Tensor], options: DraftOptions, tokenizer: Any) -> None:
    folder.mkdir()
    save_draft_file(draft, folder / DRAFT_WEIGHTS_NAME, options)
    tokenizer.save_pretrained(folder)


def _write_config(folder: Path, config: TrainConfig) -> None:
    (folder / CONFIG_NAME).write_text(to_yaml(absolute_paths(config)))


@contextmanager
def _writing(output: Path, progress: Progress) -> Iterator[None]:
    """Turn what a full, read-only or lost disk raises into one clear line: torch's writer hides the reason, tokenizers'
    the kind."""
    try:
        yield
    except Exception as error:  # tokenizers raises nothing more special
        signs = ("inline_container", *(f"(os error {number})" for number in FULL_DISK))
        if not (isinstance(error, OSError) or any(sign in str(error) for sign in signs)):
            raise
        try:
            free = f"{shutil.disk_usage(output).free / 2**20:.0f} MiB are free there"
        except OSError as gone:
            free = f"the folder: {gone.strerror}"
        raise UserError(
            f"{output}: the checkpoint of step {progress.step} could not be written ({first_line(error)}; {free}); "
            "the ones before it stay. Make room or mend the folder, then go on with resume=latest"
        ) from error


def gather_draft(model: nn.Module) -> dict[str, Tensor]:
    """The draft's weights on the CPU, without prefix, on global rank 0; {} on the others, which must call it too.

    Under ZeRO-3 one parameter at a time is gathered, and none of the target's.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in model.draft_model.named_parameters():  # type: ignore[union-attr, operator]
        with deepspeed.zero.GatheredParameters(parameter):
            if dist.get_rank() == 0:
                state[name] = parameter.detach().cpu().clone()
    return state


def read_draft(folder: str | Path) -> dict[str, Tensor]:
    """The draft's weights from a saved DeepSpeed state (`last_ds`), equal to `gather_draft` at that step.

    Needs neither the target nor as many ranks as saved it. Raises UserError for anything but a whole state.
    """
    folder = Path(folder)
    if not (folder / "latest").is_file():
        raise UserError(f"{folder}: no DeepSpeed checkpoint of ours; give the {STATES[1]} folder of a run")
    if problem := damage(folder):
        raise UserError(f"{problem}; give the {STATES[1]} or {STATES[2]} folder of a run")
    return saved_draft(folder)


def saved_draft(folder: Path) -> dict[str, Tensor]:
    """The draft's weights in a DeepSpeed state that is known to be whole: the optimizer's masters, rounded as by it."""
    dtype = getattr(torch, read_config_file(folder / CONFIG_NAME).model.torch_dtype)
    return {name: weight.to(dtype) for name, weight in Shards(folder).parameters(MASTERS)}


def load_state(engine: Any, folder: Path, progress: Progress) -> None:
    """Put a saved state into an engine that has not stepped yet and has its draft (see `saved_draft`)."""
    adopt(engine, Shards(folder))
    engine.global_steps = progress.step


def locate(config: TrainConfig) -> TrainConfig:
    """`config` with `model_name_or_path` a target, where it was one of our checkpoint folders.

    The target is then the one that checkpoint's run had, and the draft the one in it unless `config` names another. A
    saved pair, in a folder or on the hub, brings its draft, too.
    Raises UserError for a folder of DeepSpeed's state, one that is not whole, or one with an unreadable configuration.
    """
    if not is_checkpoint(config):
        if config.draft_model_name_or_path is None:
            target = resolve_target(config.model_name_or_path)
            read_config(target)  # first, so that a wrong name is reported as one
            saved = draft_of_pair(target)
            return replace(config, draft_model_name_or_path=None if saved is None else str(saved))
        return config
    folder = Path(config.model_name_or_path)
    if (folder / "latest").is_file():
        raise UserError(f"{folder}: DeepSpeed's state, not a target; give {DRAFTS[1]} (or {DRAFTS[2]}) beside it")
    if problem := damage(folder):
        raise UserError(f"{problem}; give {DRAFTS[1]} or {DRAFTS[2]} of a run")
    target = read_config_file(folder / CONFIG_NAME).model_name_or_path
    draft = config.draft_model_name_or_path or str(folder / DRAFT_WEIGHTS_NAME)
    return replace(config, model_name_or_path=target, draft_model_name_or_path=draft)


def absolute_paths(config: TrainConfig) -> TrainConfig:
    """Local paths made absolute, so that the saved configuration is true wherever it is read."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute()) if Path(path).exists() else path

    draft = config.draft_model_name_or_path
    held_out = config.evaluation.files
    held_out = None if held_out is None else [absolute(file) for file in held_out]
    return replace(
        config,
        data=replace(config.data, files=[absolute(file) for file in config.data.files]),
        evaluation=replace(config.evaluation, files=held_out),
        model_name_or_path=absolute(config.model_name_or_path),
        draft_model_name_or_path=None if draft is None else absolute(draft),
    )
