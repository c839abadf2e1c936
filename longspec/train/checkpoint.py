"""What a run saves and how it goes on from there. Global rank 0 writes (not local rank 0); see `generations`."""

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
from omegaconf import OmegaConf
from torch import Tensor, nn

from longspec.errors import UserError, first_line
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME, draft_of_pair, save_draft_file
from longspec.train.config import CONFIG_NAME, TrainConfig, is_checkpoint, read_config_file, to_yaml
from longspec.train.generations import BEST, DRAFTS, STATES, Progress, damage, seal, settle
from longspec.train.shards import MASTERS, Shards, adopt

logger = logging.getLogger(__name__)

RESUMED_KEYS = (
    *("seed", "loss", "variant.name", "variant.max_offset", "variant.depth", "model_name_or_path", "eos_token_id"),
    *("data.files", "data.max_length", "data.pack", "data.overflow", "data.answer_only", "data.chat_format"),
    *("data.aligners", "data.templates", "model.torch_dtype", "model.window", "optimizer"),
)
"""What a resumed run must have as the run had that it goes on from: other values would be another run."""
EVALUATION_NAME = "evaluation.json"
"""What `checkpoint-best` was chosen for."""
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save_checkpoint(
    engine: Any, tokenizer: Any, config: TrainConfig, progress: Progress, output_dir: str | Path
) -> None:
    """Save the run as the newest generation. Every rank takes part; global rank 0 writes all but the others' shards.

    Raises UserError where the disk is full, and then the generations before stay as they are.
    """
    output = Path(output_dir)
    state, draft_folder = output / STATES[0], output / DRAFTS[0]
    if dist.get_rank() == 0:
        settle(output)
    dist.barrier()
    with _disk_may_be_full(output, progress):
        engine.save_checkpoint(str(state), tag=f"step{progress.step}", exclude_frozen_parameters=True)
        draft = gather_draft(engine.module)
        dist.barrier()
        if dist.get_rank() == 0:
            _write_draft(draft_folder, draft, config.model.window, tokenizer)
            for folder in (state, draft_folder):
                _write_config(folder, config)
                seal(folder, progress)
            settle(output)
    dist.barrier()


def save_best(
    model: nn.Module, tokenizer: Any, config: TrainConfig, progress: Progress, metrics: dict[str, float]
) -> None:
    """Keep the present draft as `checkpoint-best`, and in it the `metrics` it was chosen for. Every rank takes part."""
    output = Path(config.output_dir)
    with _disk_may_be_full(output, progress):
        draft = gather_draft(model)
        if dist.get_rank() == 0:
            settle(output)
            folder = output / BEST[0]
            _write_draft(folder, draft, config.model.window, tokenizer)
            _write_config(folder, config)
            (folder / EVALUATION_NAME).write_text(json.dumps({"step": progress.step, **metrics}, indent=2) + "\n")
            seal(folder, progress)
            settle(output)
    dist.barrier()


def read_best(config: TrainConfig) -> float:
    """The held-out acceptance length of the draft in `checkpoint-best`, which a better one is to replace.

    -inf, and a warning, where another evaluation chose it or it is not as it was saved; -inf if there is none.
    """
    folder = Path(config.output_dir) / BEST[1]
    if not folder.exists():
        return -math.inf
    problem = damage(folder)
    if problem is None:
        saved, now = (run.evaluation for run in (read_config_file(folder / CONFIG_NAME), _absolute(config)))
        if (saved.files, saved.rows) == (now.files, now.rows):
            return json.loads((folder / EVALUATION_NAME).read_text())["eval_acceptance_length"]
        problem = f"{folder} was the best on other held-out rows"
    logger.warning("%s: the next evaluation replaces it", problem)
    return -math.inf


def _write_draft(folder: Path, draft: dict[str, Tensor], window: int, tokenizer: Any) -> None:
    folder.mkdir()
    save_draft_file(draft, folder / DRAFT_WEIGHTS_NAME, window)
    tokenizer.save_pretrained(folder)


def _write_config(folder: Path, config: TrainConfig) -> None:
    (folder / CONFIG_NAME).write_text(to_yaml(_absolute(config)))


@contextmanager
def _disk_may_be_full(output: Path, progress: Progress) -> Iterator[None]:
    """Turn what a full disk raises (torch's writer hides the reason, tokenizers' the kind) into one clear line."""
    try:
        yield
    except Exception as error:  # tokenizers raises nothing more special
        full = isinstance(error, OSError) and error.errno in FULL_DISK
        signs = ("inline_container", *(f"(os error {number})" for number in FULL_DISK))
        if not (full or any(sign in str(error) for sign in signs)):
            raise
        free = shutil.disk_usage(output).free / 2**20
        raise UserError(
            f"{output}: the checkpoint of step {progress.step} could not be written ({first_line(error)}; {free:.0f} "
            "MiB are free there); the ones before it stay. Make room, then go on with resume=latest"
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


def check_same_run(config: TrainConfig, folder: Path, progress: Progress, world_size: int) -> None:
    """Raise UserError if `config` differs from the run in `folder` in one of RESUMED_KEYS; it names each that does.

    Another number of ranks, another micro-batch or ZeRO stage are other ways to take the same steps, if each takes as
    many rows as before.
    """
    saved, now = (_absolute(c) for c in (read_config_file(folder / CONFIG_NAME), config))
    before, after = (OmegaConf.structured(run) for run in (saved, now))
    pairs = {key: (OmegaConf.select(before, key), OmegaConf.select(after, key)) for key in RESUMED_KEYS}
    cuts = [
        (run.per_device_train_batch_size, run.gradient_accumulation_steps, ranks)
        for run, ranks in ((saved, progress.world_size), (now, world_size))
    ]
    pairs["rows a step (micro-batch x accumulation x ranks)"] = (math.prod(cuts[0]), math.prod(cuts[1]))
    if changes := [f"{key} was {old}, is {new}" for key, (old, new) in pairs.items() if old != new]:
        raise UserError(f"config key resume: {folder} is of another run: {'; '.join(changes)}; make them equal")
    if cuts[0] != cuts[1]:
        logger.warning(
            "resume: micro-batch x accumulation x ranks was %d x %d x %d, is %d x %d x %d. Kept: the draft, the "
            "optimizer's master weights and moments, the step, the learning rate, the order of the data. Not kept: the "
            "lags and offsets that would have been drawn",
            *(*cuts[0], *cuts[1]),
        )


def load_state(engine: Any, folder: Path, progress: Progress) -> None:
    """Put a saved state into an engine that has not stepped yet and has its draft (see `saved_draft`)."""
    adopt(engine, Shards(folder))
    engine.global_steps = progress.step


def locate(config: TrainConfig) -> TrainConfig:
    """`config` with `model_name_or_path` a target, where it was one of our checkpoint folders.

    The target is then the one that checkpoint's run had, and the draft the one in it unless `config` names another. The
    folder of a saved pair brings its draft, too.
    Raises UserError for a folder of DeepSpeed's state, one that is not whole, or one with an unreadable configuration.
    """
    if not is_checkpoint(config):
        if config.draft_model_name_or_path is None and Path(config.model_name_or_path).is_dir():
            saved = draft_of_pair(config.model_name_or_path)
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


def _absolute(config: TrainConfig) -> TrainConfig:
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
