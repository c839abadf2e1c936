"""Saving and reading the checkpoints of a run (see `generations` for the folders)."""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_NAME

from longspec.errors import UserError, os_errors
from longspec.models.draft import ARCHITECTURE_KEY
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME, draft_of_pair
from longspec.models.draft_layer import OPTION_KEYS
from longspec.models.draft_saving import save_draft_file, save_draft_folder
from longspec.models.target_cache import resolve_target
from longspec.models.target_files import read_config
from longspec.models.target_sample import TargetSample, read_sample
from longspec.models.weight_files import read_metadata
from longspec.ranks.agreement import from_rank_zero
from longspec.train.config import absolute_paths, read_config_file, to_yaml
from longspec.train.config_schema import CONFIG_NAME, TrainConfig
from longspec.train.generations import BEST, DRAFTS, STATES, complete_saves, marker_of
from longspec.train.markers import Marker, Run, damage, write_marker
from longspec.train.shards import MASTERS, Shards
from longspec.untrusted import read_json

logger = logging.getLogger(__name__)

EVALUATION_NAME = "evaluation.json"
"""File in `checkpoint-best` with the metrics of its evaluation."""
TARGET_NAME = "target.json"
"""File in a saved DeepSpeed state with the sample of the target."""
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
"""Ends of the names of weight files, also of other libraries."""


def save_checkpoint(engine: Any, tokenizer: Any, config: TrainConfig, marker: Marker) -> None:
    """Save the newest generation of a run. All ranks call it; each writes its shard and rank 0 everything else.

    marker: that of the save, without files. Raises UserError if a file cannot be written, or if rank 0 does not see the
    shards of all ranks. The earlier generations stay as they are in that case.
    """
    output = Path(config.output_dir)
    state_folder = output / STATES[0]

    @_write_errors(output, marker.step)
    def clear_staging() -> None:
        complete_saves(output, config.overwrite_output_dir)

    @_write_errors(output, marker.step)
    def complete() -> None:
        if (shards := len(list(state_folder.rglob("*_optim_states.pt")))) != marker.world_size:
            raise UserError(
                f"{state_folder}: rank 0 sees {shards} of the {marker.world_size} shards that the ranks wrote; "
                "output_dir must be one folder that all hosts share"
            )
        target = engine.module.draft_target
        _write_draft(output / DRAFTS[0], draft, config, target, tokenizer)
        _write_config(state_folder, config)
        (state_folder / TARGET_NAME).write_text(json.dumps(target.entries() if target else {}) + "\n")
        # The marker of the draft folder comes last, because it makes the whole generation valid.
        write_marker(state_folder, marker)
        write_marker(output / DRAFTS[0], marker)
        complete_saves(output, config.overwrite_output_dir)

    # Rank 0 clears the staging folders before any rank writes, and completes the save once all ranks have written.
    from_rank_zero(clear_staging)
    with _write_errors(output, marker.step):
        engine.save_checkpoint(str(state_folder), tag=f"step{marker.step}", exclude_frozen_parameters=True)
    # A collective under ZeRO-3, so it cannot be part of what rank 0 does alone.
    draft = gather_draft(engine.module)
    from_rank_zero(complete)


def save_best(model: Any, tokenizer: Any, config: TrainConfig, metrics: dict[str, float], marker: Marker) -> None:
    """Save the current draft as `checkpoint-best`, with the `metrics` of its evaluation. All ranks call it."""
    output = Path(config.output_dir)
    draft = gather_draft(model)

    @_write_errors(output, marker.step)
    def write() -> None:
        complete_saves(output, config.overwrite_output_dir)
        folder = output / BEST[0]
        _write_draft(folder, draft, config, model.draft_target, tokenizer)
        # The marker covers the metrics, so a resumed run can trust them.
        (folder / EVALUATION_NAME).write_text(json.dumps({"step": marker.step, **metrics}, indent=2) + "\n")
        write_marker(folder, marker)
        complete_saves(output, config.overwrite_output_dir)

    from_rank_zero(write)


def read_best(config: TrainConfig, run: Run) -> float:
    """The acceptance length of `checkpoint-best`; -inf without one; warns if it is not of this run and rows."""
    folder = Path(config.output_dir) / BEST[1]
    if not folder.exists():
        return -math.inf
    if (problem := damage(folder)) is None:
        saved = marker_of(folder).run
        # Digests only, because files may have moved. Another number of rows gives another mean of the same files.
        files, own_files = ([digest for _, digest in each.contents.held_out] for each in (saved, run))
        rows = read_config_file(folder / CONFIG_NAME).evaluation.rows
        if (saved.id, files, rows) == (run.id, own_files, config.evaluation.rows):
            return json.loads((folder / EVALUATION_NAME).read_text())["eval_acceptance_length"]
        problem = f"{folder} is of another run or was the best on other held-out rows"
    logger.warning("%s; the next evaluation chooses a new %s", problem, BEST[1])
    return -math.inf


def _write_draft(
    folder: Path, draft: dict[str, Tensor], config: TrainConfig, target: TargetSample | None, tokenizer: Any
) -> None:
    folder.mkdir()
    save_draft_file(draft, folder / DRAFT_WEIGHTS_NAME, config.model.draft_options, target)
    tokenizer.save_pretrained(folder)
    _write_config(folder, config)


def _write_config(folder: Path, config: TrainConfig) -> None:
    (folder / CONFIG_NAME).write_text(to_yaml(absolute_paths(config)))


@contextmanager
def _write_errors(output: Path, step: int) -> Iterator[None]:
    """Turn errors of a lost or full disk into a UserError."""
    with os_errors(
        f"{output}: the checkpoint of step {step} could not be written",
        "earlier checkpoints are kept; free space or repair the folder, then continue with resume=latest",
    ):
        yield


def gather_draft(model: nn.Module) -> dict[str, Tensor]:
    """The draft's weights and vocabulary list on the CPU, without prefix, on rank 0; {} on the others.

    All ranks call it. Under ZeRO-3 one parameter at a time is gathered. DeepSpeed's consolidation would also gather the
    frozen target.
    """
    state: dict[str, Tensor] = {}
    draft: Any = model.draft_model
    for name, weight in (*draft.named_parameters(), *draft.named_buffers()):
        with deepspeed.zero.GatheredParameters(weight, enabled=hasattr(weight, "ds_id")):
            if dist.get_rank() == 0:
                state[name] = weight.detach().cpu().clone()
    return state


def read_draft(folder: Path) -> dict[str, Tensor]:
    """The draft's weights in a saved DeepSpeed state, without the target. Raises UserError unless it is complete."""
    if not (folder / "latest").is_file():
        raise UserError(f"{folder}: not a DeepSpeed checkpoint of a training run; give its {STATES[1]} folder")
    if problem := damage(folder):
        raise UserError(f"{problem}; give the {STATES[1]} or {STATES[2]} folder of a run")
    return saved_draft(folder)


def saved_draft(folder: Path) -> dict[str, Tensor]:
    """The draft in an undamaged DeepSpeed state: fp32 master weights in the model's dtype, and its vocabulary list."""
    # Rounded as in the run, so that the draft equals the one saved for users.
    dtype = getattr(torch, read_config_file(folder / CONFIG_NAME).model.torch_dtype)
    shards = Shards(folder)
    return {name: weight.to(dtype) for name, weight in shards.parameters(MASTERS)} | shards.vocabulary_maps


def extract_draft(checkpoint: Path, output: Path, hf: bool = False, int8: bool = False) -> int:
    """Write the draft in a run's `last_ds` or `last_2ds` folder. Returns the number of its parameters.

    output: a .pth file, a folder for DRAFT_WEIGHTS_NAME, or with `hf` a folder in Hugging Face form, with `int8`
    in 8 bits. Raises UserError for a damaged checkpoint, for `int8` without `hf`, and for a folder of other weights.
    """
    if int8 and not hf:
        raise UserError("--int8: only with --hf")
    if hf:
        _check_replaceable(output)
    draft = read_draft(checkpoint)
    run, target_file = read_config_file(checkpoint / CONFIG_NAME), checkpoint / TARGET_NAME
    sample = read_sample(read_json(target_file), f"{target_file}: ")
    with os_errors(f"{output}: cannot be written"):
        if hf:
            target = read_config(resolve_target(run.model_name_or_path))
            save_draft_folder(draft, target, output, run.model.draft_options, target=sample, int8=int8)
        else:
            file = output if output.suffix == ".pth" else output / DRAFT_WEIGHTS_NAME
            save_draft_file(draft, file, run.model.draft_options, sample)
    return len(draft)


def _check_replaceable(folder: Path) -> None:
    """Raise UserError for a folder with a `config.json` or weights that are not of a draft in Hugging Face form."""
    config, weights = folder / "config.json", folder / SAFE_WEIGHTS_NAME
    # The weights are written first, and name the options, too.
    stated = read_json(config) if config.exists() else read_metadata(weights) if weights.exists() else {}
    is_draft = not stated.keys().isdisjoint((ARCHITECTURE_KEY, *OPTION_KEYS.values()))
    own = {DRAFT_WEIGHTS_NAME, *((config.name, weights.name) if is_draft else ())}
    held = {file.name for file in folder.glob("*") if file == config or file.suffix.lower() in WEIGHT_SUFFIXES}
    for name in sorted(held - own)[:1]:
        raise UserError(f"{folder}: holds {name}, which is not of a draft that --hf wrote; give another folder")


def locate(config: TrainConfig) -> TrainConfig:
    """`config` with `model_name_or_path` resolved to a target if it is a checkpoint folder or a saved pair.

    A checkpoint folder names both the target of its run and its draft. A saved pair, in a folder or on the hub,
    also brings its draft. A `draft_model_name_or_path` in `config` takes precedence. Raises UserError for a damaged
    folder or an unreadable configuration.
    """
    draft = config.draft_model_name_or_path
    if (saved_config := config.saved_config) is not None:
        folder = saved_config.parent
        if problem := damage(folder):
            raise UserError(f"{problem}; give {DRAFTS[1]} or {DRAFTS[2]} of a run")
        target = read_config_file(saved_config).model_name_or_path
        return replace(
            config, model_name_or_path=target, draft_model_name_or_path=draft or str(folder / DRAFT_WEIGHTS_NAME)
        )
    # Nothing needs to be looked up: the user named both.
    if draft is not None:
        return config
    resolved = resolve_target(config.model_name_or_path)
    # Raises the error for a wrong name, before the draft is looked for.
    read_config(resolved)
    saved = draft_of_pair(resolved)
    return replace(config, draft_model_name_or_path=None if saved is None else str(saved))
