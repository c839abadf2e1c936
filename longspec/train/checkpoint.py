"""Checkpoints of a run: two generations, each whole or not there at all. Global rank 0 writes (not local rank 0).

An output folder holds, newest first,

    last_ds,  checkpoint-last       DeepSpeed's state without the frozen target, and beside it the draft for users
    last_2ds, checkpoint-2last      the same one save earlier

A save writes into `saving_*` folders and puts a marker into each as its last act. The marker of `saving_checkpoint`
decides: with it the save is whole and only renames are left, which `settle` finishes after a crash; without it the save
never was. So at any moment at least one generation is whole.
"""

import json
import logging
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from omegaconf import OmegaConf
from torch import Tensor, nn

from longspec.errors import UserError
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME, strip_prefix
from longspec.train.config import CONFIG_NAME, TrainConfig, is_checkpoint, read_config_file, to_yaml

logger = logging.getLogger(__name__)

MARKER = "complete.json"
STATES = ("saving_ds", "last_ds", "last_2ds")
RESUMED_KEYS = (
    *("seed", "loss", "variant.name", "variant.max_offset", "variant.depth", "model_name_or_path", "eos_token_id"),
    *("data.files", "data.max_length", "data.pack", "data.overflow", "data.answer_only", "data.chat_format"),
    *("data.aligners", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("model.torch_dtype", "deepspeed.zero_optimization.stage"),
)
"""What a resumed run must have as the run had that it goes on from: other values would be another run."""
DRAFTS = ("saving_checkpoint", "checkpoint-last", "checkpoint-2last")


@dataclass(frozen=True)
class Progress:
    """How far a checkpoint is, and how many ranks brought it there."""

    step: int
    world_size: int


def save_checkpoint(
    engine: Any, tokenizer: Any, config: TrainConfig, progress: Progress, output_dir: str | Path
) -> None:
    """Save the run as the newest generation. Every rank takes part; global rank 0 writes all but its shards."""
    output = Path(output_dir)
    state, draft_folder = output / STATES[0], output / DRAFTS[0]
    if dist.get_rank() == 0:
        settle(output)
    dist.barrier()
    engine.save_checkpoint(str(state), tag=f"step{progress.step}", exclude_frozen_parameters=True)
    draft = gather_draft(engine.module)
    dist.barrier()
    if dist.get_rank() == 0:
        draft_folder.mkdir()
        torch.save(draft, draft_folder / DRAFT_WEIGHTS_NAME)
        tokenizer.save_pretrained(draft_folder)
        for folder in (state, draft_folder):
            (folder / CONFIG_NAME).write_text(to_yaml(_absolute(config)))
            (folder / MARKER).write_text(json.dumps(asdict(progress)))
        settle(output)
    dist.barrier()


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
    if not (is_whole(folder) and (folder / "latest").is_file()):
        raise UserError(f"{folder}: no whole DeepSpeed checkpoint of ours; give the {STATES[1]} folder of a run")
    tag = (folder / "latest").read_text().strip()
    unsharded = folder / tag / "mp_rank_00_model_states.pt"  # ZeRO-1 and 2 have the weights whole
    if unsharded.is_file():
        return strip_prefix(torch.load(unsharded, map_location="cpu", weights_only=True)["module"])
    dtype = getattr(torch, read_config_file(folder / CONFIG_NAME).model.torch_dtype)
    masters = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag, exclude_frozen_parameters=True)
    return {name: weight.to(dtype) for name, weight in strip_prefix(masters).items()}


def settle(output: Path) -> None:
    """Finish the renames of a save that was whole, or remove one that was not. Safe to call again after a crash."""
    whole = is_whole(output / DRAFTS[0])
    for staged, last, second in ([output / name for name in names] for names in (STATES, DRAFTS)):
        if not staged.exists():
            continue
        if not whole:
            _remove(staged)
            continue
        if is_whole(last):
            _remove(second)
            last.rename(second)
        _remove(last)
        staged.rename(last)


def _remove(folder: Path) -> None:
    if folder.exists():
        (folder / MARKER).unlink(missing_ok=True)  # first: a folder that is half gone must not look whole
        shutil.rmtree(folder)


def is_whole(folder: Path) -> bool:
    return (folder / MARKER).is_file()


def read_progress(folder: Path) -> Progress:
    return Progress(**json.loads((folder / MARKER).read_text()))


def find_latest(output_dir: str | Path) -> tuple[Path, Progress] | None:
    """The newest whole DeepSpeed state in an output folder; None if no save ever began there.

    Says so in the log when that is the older one. Raises UserError if there are states but none is whole.
    """
    output = Path(output_dir)
    settle(output)
    newest, older = (output / name for name in STATES[1:])
    for folder in (newest, older):
        if is_whole(folder):
            if folder == older:
                logger.warning("%s is missing or not whole: going back to the older checkpoint %s", newest, older)
            return folder, read_progress(folder)
    if newest.exists() or older.exists():
        raise UserError(
            f"{output}: neither {STATES[1]} nor {STATES[2]} is whole (no {MARKER}); restore one of them, or train into "
            "another output_dir"
        )
    return None


def check_same_run(config: TrainConfig, folder: Path, progress: Progress, world_size: int) -> None:
    """Raise UserError if `config` differs from the run in `folder` in one of RESUMED_KEYS; it names each that does."""
    saved, now = (OmegaConf.structured(_absolute(c)) for c in (read_config_file(folder / CONFIG_NAME), config))
    pairs = {key: (OmegaConf.select(saved, key), OmegaConf.select(now, key)) for key in RESUMED_KEYS}
    pairs["number of ranks"] = (progress.world_size, world_size)
    if changes := [f"{key} was {before}, is {after}" for key, (before, after) in pairs.items() if before != after]:
        raise UserError(f"config key resume: {folder} is of another run: {'; '.join(changes)}; make them equal")


def load_state(engine: Any, folder: Path, progress: Progress) -> None:
    """Put a saved state into an engine that has not stepped yet: draft, optimizer and step count."""
    path, _ = engine.load_checkpoint(str(folder), load_module_strict=False)  # the frozen target is not in it
    if path is None or engine.global_steps != progress.step:
        raise RuntimeError(f"{folder}: DeepSpeed found step {engine.global_steps} there, not {progress.step}")


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
    if not is_whole(folder):
        raise UserError(f"{folder}: this checkpoint was not saved whole (no {MARKER}); give {DRAFTS[1]} or {DRAFTS[2]}")
    target = read_config_file(folder / CONFIG_NAME).model_name_or_path
    draft = config.draft_model_name_or_path or str(folder / DRAFT_WEIGHTS_NAME)
    return replace(config, model_name_or_path=target, draft_model_name_or_path=draft)


def _absolute(config: TrainConfig) -> TrainConfig:
    """Local paths made absolute, so that the saved configuration is true wherever it is read."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute()) if Path(path).exists() else path

    draft = config.draft_model_name_or_path
    files = [absolute(file) for file in config.data.files]
    return replace(
        config,
        data=replace(config.data, files=files),
        model_name_or_path=absolute(config.model_name_or_path),
        draft_model_name_or_path=None if draft is None else absolute(draft),
    )
