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
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from omegaconf import OmegaConf
from torch import Tensor, nn

from longspec.errors import UserError, first_line
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME, strip_prefix
from longspec.train.config import CONFIG_NAME, TrainConfig, is_checkpoint, read_config_file, to_yaml
from longspec.train.distributed import data_parallel_place
from longspec.train.generations import BEST, DRAFTS, STATES, Progress, damage, seal, settle

logger = logging.getLogger(__name__)

RESUMED_KEYS = (
    *("seed", "loss", "variant.name", "variant.max_offset", "variant.depth", "model_name_or_path", "eos_token_id"),
    *("data.files", "data.max_length", "data.pack", "data.overflow", "data.answer_only", "data.chat_format"),
    *("data.aligners", "model.torch_dtype", "model.window"),
)
"""What a resumed run must have as the run had that it goes on from: other values would be another run."""
SHARDED_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "deepspeed.zero_optimization.stage")
"""And what it must have besides if DeepSpeed's state is to fit, as it does with the same number of ranks."""
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
            _write_draft(draft_folder, draft, tokenizer)
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
            _write_draft(folder, draft, tokenizer)
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


def _write_draft(folder: Path, draft: dict[str, Tensor], tokenizer: Any) -> None:
    folder.mkdir()
    torch.save(draft, folder / DRAFT_WEIGHTS_NAME)
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
    tag = (folder / "latest").read_text().strip()
    unsharded = folder / tag / "mp_rank_00_model_states.pt"  # ZeRO-1 and 2 have the weights whole
    if unsharded.is_file():
        return strip_prefix(torch.load(unsharded, map_location="cpu", weights_only=True)["module"])
    dtype = getattr(torch, read_config_file(folder / CONFIG_NAME).model.torch_dtype)
    masters = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag, exclude_frozen_parameters=True)
    return {name: weight.to(dtype) for name, weight in strip_prefix(masters).items()}


def check_same_run(config: TrainConfig, folder: Path, progress: Progress, world_size: int) -> None:
    """Raise UserError if `config` differs from the run in `folder` in one of RESUMED_KEYS; it names each that does.

    Another number of ranks is another way to take the same steps, if all of them together take as many rows.
    """
    saved, now = (OmegaConf.structured(_absolute(c)) for c in (read_config_file(folder / CONFIG_NAME), config))
    keys = RESUMED_KEYS if progress.world_size != world_size else RESUMED_KEYS + SHARDED_KEYS
    pairs = {key: (OmegaConf.select(saved, key), OmegaConf.select(now, key)) for key in keys}
    rows = (
        run.per_device_train_batch_size * run.gradient_accumulation_steps * ranks
        for run, ranks in ((saved, progress.world_size), (now, world_size))
    )
    pairs["rows a step (micro-batch x accumulation x ranks)"] = tuple(rows)  # type: ignore[assignment]
    if changes := [f"{key} was {before}, is {after}" for key, (before, after) in pairs.items() if before != after]:
        raise UserError(f"config key resume: {folder} is of another run: {'; '.join(changes)}; make them equal")
    if progress.world_size != world_size:
        logger.warning(
            "resume: %d ranks go on where %d were. Kept: the draft's weights (in %s), the step, the learning rate, the "
            "order of the data. Not kept: the optimizer's moments and fp32 master weights, which start anew, and the "
            "lags and offsets that would have been drawn",
            *(world_size, progress.world_size, config.model.torch_dtype),
        )


def load_state(engine: Any, folder: Path, progress: Progress) -> None:
    """Put a saved state into an engine that has not stepped yet: draft, optimizer and step count.

    Of a state that other ranks saved only the step count is taken; the draft is then to be in the engine already.
    """
    if progress.world_size != data_parallel_place()[1]:
        engine.global_steps = progress.step
        return
    path, _ = engine.load_checkpoint(str(folder), custom_load_fn=_load_draft)
    if path is None or engine.global_steps != progress.step:
        raise RuntimeError(f"{folder}: DeepSpeed found step {engine.global_steps} there, not {progress.step}")


def _load_draft(src: dict[str, Tensor], dst: Any) -> None:
    """What of a saved state (under ZeRO-3 without the weights themselves) goes into the pair; named by DeepSpeed."""
    dst.draft_model.load_state_dict(strip_prefix(src))


def locate(config: TrainConfig) -> TrainConfig:
    """`config` with `model_name_or_path` a target, where it was one of our checkpoint folders.

    The target is then the one that checkpoint's run had, and the draft the one in it unless `config` names another.
    Raises UserError for a folder of DeepSpeed's state, one that is not whole, or one with an unreadable configuration.
    """
    if not is_checkpoint(config):
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
