"""The start of a run: from a saved state, from a draft whose state is gone, or from nothing."""

import logging
import math
import secrets
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any

from longspec.data.lines import content_digests
from longspec.errors import UserError
from longspec.models.content import target_digests
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME, draft_settings, list_size
from longspec.models.draft_layer import GLIDE, check_window
from longspec.models.target_files import read_config
from longspec.train.config import read_config_file
from longspec.train.config_schema import CONFIG_NAME, MODEL_DEFAULTS, TrainConfig
from longspec.train.distributed import data_parallel_rank_and_size
from longspec.train.generations import drafts, find_draft, find_latest, marker_of, states
from longspec.train.markers import Contents, Run
from longspec.train.recipe import recipe_steps

logger = logging.getLogger(__name__)

RESUMED_KEYS = (
    *("seed", "loss", "variant.name", "variant.max_offset", "variant.depth", "eos_token_id", "optimizer"),
    *("learning_rate", "warmup_ratio", "weight_decay", "adam_betas", "max_grad_norm"),
    *("data.max_length", "data.pack", "data.overflow", "data.answer_only", "data.chat_format", "data.aligners"),
    *("data.templates", "data.chat_template_kwargs"),
    "model.torch_dtype",
)
"""Keys that must have the same values as in the run that is resumed. `with_draft_options` compares the draft's own."""


@dataclass(frozen=True)
class Start:
    """The point from which a launch starts."""

    run: Run
    step: int = 0
    state: Path | None = None
    """DeepSpeed state to load; None to start at step 0."""
    draft: str | None = None
    """Draft file to start from without its optimizer state; None for the configured one."""


FRESH = Start(Run())


def where_to_start(config: TrainConfig, target: str) -> Start:
    """The start of a run, from what its output folder holds. Reads only. For rank 0, which holds the folder's lock.

    target: the folder or hub id that `config.model_name_or_path` resolves to. Raises UserError if the configuration,
    the data or the target differ from those of the checkpoint.
    """
    output = Path(config.output_dir)
    if config.resume is None and not config.overwrite_output_dir and (used := [*drafts(output), *states(output)]):
        raise UserError(
            f"config key output_dir: {output} holds a checkpoint ({used[0].name}); give resume=latest to continue it, "
            "another output_dir, or overwrite_output_dir=true to replace it"
        )
    state = find_latest(output) if config.resume else None
    contents = contents_of(config, target)
    if state is not None:
        folder, marker = state
        check_same_run(config, folder, data_parallel_rank_and_size()[1], contents)
        return Start(Run(marker.run.id, contents), marker.step, folder)

    # Random, because two launches may start in the same second.
    run = Run(secrets.token_hex(8), contents)
    draft = find_draft(output) if config.resume else None
    if draft is None:
        if config.resume:
            logger.warning("resume: no checkpoint in %s yet; this run starts at step 0", output)
        return Start(run)
    logger.warning(
        "resume: %s has no DeepSpeed state; this run starts from its draft of step %d at step 0 with a new schedule "
        "and optimizer, and keeps the old draft as checkpoint-earlier-*",
        draft[0],
        draft[1].step,
    )
    return Start(run, draft=str(draft[0] / DRAFT_WEIGHTS_NAME))


def contents_of(config: TrainConfig, target: str) -> Contents:
    """The digests of a run's data, all of which is read, and of `target`. Raises UserError for missing files."""
    sets = (config.data.files, config.evaluation.files)
    data, held_out = (content_digests(files) if files else [] for files in sets)
    return Contents(data, held_out, target_digests(target, read_config(target)))


def with_draft_options(config: TrainConfig, state: Path | None, draft: str | None) -> TrainConfig:
    """`config` with the options and the size of the vocabulary list of the state or draft that training starts from.

    Raises UserError if `config` sets other values than the saved ones. The default values are always accepted.
    """
    if state is not None:
        saved_model = read_config_file(state / CONFIG_NAME).model
        options, size = saved_model.draft_options, saved_model.draft_vocabulary
    elif draft is not None:
        options, size = draft_settings(draft).options, list_size(draft)
    else:
        return config

    model = config.model
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(options).items()}
    if state is None and "window" in model.architecture_options:
        # No weight depends on it.
        values["window"] = model.architecture_options["window"]
    is_glide = options.architecture == GLIDE
    prefix, own = ("", vars(model)) if is_glide else ("architecture_options.", model.architecture_options)
    shared: dict[str, Any] = {"architecture": options.architecture, "draft_vocabulary": size}
    saved = shared | {prefix + name: value for name, value in values.items() if name in own}
    stated = vars(model) | {prefix + name: value for name, value in own.items()}
    for name, value in saved.items():
        if stated[name] not in (value, MODEL_DEFAULTS.get(name, value)):
            raise UserError(
                f"config key model.{name}: {stated[name]}, but the draft at {state or draft} has {value}; omit it"
            )
    check_window(options.window, config.variant.largest_lag, "config key variant.depth")
    options_taken: dict[str, Any] = values if is_glide else {"architecture_options": values}
    return replace(config, model=replace(model, **shared, **options_taken))


def check_same_run(config: TrainConfig, folder: Path, world_size: int, contents: Contents) -> None:
    """Raise UserError with all differences if `config` is not a continuation of the run saved in `folder`.

    RESUMED_KEYS and the contents of data and target must be equal. The number of ranks, the micro-batch size and the
    ZeRO stage may change if the number of rows per step stays the same, and so may the length of the run. The random
    lags and offsets then differ, because they are drawn per micro-step and rank.
    """
    saved, marker = read_config_file(folder / CONFIG_NAME), marker_of(folder)
    values = {key: (attrgetter(key)(saved), attrgetter(key)(config)) for key in RESUMED_KEYS}
    values["rows per step"] = rows_per_step(saved, marker.world_size), rows_per_step(config, world_size)
    problems = [f"{key} was {old}, is {new}" for key, (old, new) in values.items() if old != new]
    if problems := problems + changes(marker.run.contents, contents):
        raise UserError(f"config key resume: {folder} is of another run: {'; '.join(problems)}; make them equal")


def changes(saved: Contents, current: Contents) -> list[str]:
    """The first difference in the data and in the target between a checkpoint and the run that resumes it."""
    lists = {"data.files": (saved.data, current.data), "model_name_or_path": (saved.target, current.target)}
    differences = []
    for key, (old, new) in lists.items():
        # Equal digests in order are the same data, which may have moved.
        pairs = (pair for pair in zip_longest(old, new, fillvalue=("no file", "")) if pair[0][1] != pair[1][1])
        for before, now in islice(pairs, 1):
            differences.append(f"{key}: the contents changed, was {' '.join(before)}, is {' '.join(now)}")
    return differences


def last_step(config: TrainConfig, rows: int, start_step: int) -> int:
    """The number of the run's last step. Raises UserError if that is before `start_step`."""
    total_steps = steps_over(config, rows, rows_per_step(config))
    if start_step > total_steps:
        raise UserError(
            f"config key resume: the checkpoint in {config.output_dir} is of step {start_step}, but this run ends with "
            f"step {total_steps}; raise max_steps or num_train_epochs"
        )
    return total_steps


def steps_over(config: TrainConfig, rows: int, batch: int) -> int:
    """The number of steps of a run over `rows` rows, with `batch` rows per step."""
    if config.max_steps is not None:
        return config.max_steps
    epochs = config.num_train_epochs
    return recipe_steps(rows, batch) if epochs is None else math.ceil(epochs * rows / batch)


def rows_per_step(config: TrainConfig, world_size: int | None = None) -> int:
    """Rows per optimizer step, over all ranks. world_size: None for the ranks of this launch."""
    ranks = data_parallel_rank_and_size()[1] if world_size is None else world_size
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * ranks
