"""The start of a run: from a saved state, from a draft whose state is gone, or from nothing."""

import logging
import math
import secrets
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME, draft_settings, list_size
from longspec.models.draft_layer import FIXED, GLIDE, PUBLISHED
from longspec.train.config import CONFIG_NAME, read_config_file
from longspec.train.config_schema import DRAFT_DEFAULTS, TrainConfig
from longspec.train.contents import Contents, changes, contents_of
from longspec.train.distributed import data_parallel_rank_and_size
from longspec.train.generations import check_folders, drafts, find_draft, find_latest, marker_of, states
from longspec.train.markers import Progress, Run
from longspec.train.recipe import recipe_steps

logger = logging.getLogger(__name__)

RESUMED_KEYS = (
    *("seed", "loss", "variant.name", "variant.max_offset", "variant.depth", "eos_token_id", "optimizer"),
    *("learning_rate", "warmup_ratio", "weight_decay", "adam_betas", "max_grad_norm"),
    *("data.max_length", "data.pack", "data.overflow", "data.answer_only", "data.chat_format", "data.aligners"),
    *("data.templates", "data.chat_template_kwargs"),
    *("model.torch_dtype", "model.window"),
)
"""Keys that must have the same values as in the run that is resumed. `with_draft_options` compares the draft's own."""
LENGTH_KEYS = ("max_steps", "num_train_epochs")
"""Keys that may change, because a run can be extended."""


@dataclass(frozen=True)
class Start:
    """The point from which a launch starts."""

    run: Run
    state: Path | None = None
    """DeepSpeed state to load; None to start at step 0."""
    progress: Progress = field(default_factory=lambda: Progress(0, 0))
    draft: str | None = None
    """Draft file to start from without its optimizer state; None for the configured one."""


FRESH = Start(Run())
"""The start of a run without checkpoints."""


def where_to_start(config: TrainConfig, target: str) -> Start:
    """The start of a run, from what its output folder holds. Reads only. For rank 0, which holds the folder's lock.

    target: the folder or hub id that `config.model_name_or_path` resolves to. Raises UserError if the configuration,
    the data or the target differ from those of the checkpoint.
    """
    output = Path(config.output_dir)
    # Random, because two launches may start in the same second.
    launch = secrets.token_hex(8)
    check_folders(output)
    if config.resume is None and not config.overwrite_output_dir:
        _check_unused(output)

    state = find_latest(output) if config.resume else None
    contents = contents_of(config, target)
    if state is None:
        draft = find_draft(output) if config.resume else None
        run = Run(launch, launch, overwrites=config.overwrite_output_dir, contents=contents)
        return _start_without_state(config, run, draft)

    # The run keeps its id when it resumes, and each start has its own launch id.
    folder, progress = state
    _, world_size = data_parallel_rank_and_size()
    check_same_run(config, folder, world_size, contents)
    return Start(Run(marker_of(folder).run.id, launch, progress.step, contents=contents), folder, progress)


def _check_unused(output: Path) -> None:
    """Raise UserError if `output` holds a checkpoint, which a new run would replace."""
    saved_drafts = drafts(output)
    checkpoints = [*saved_drafts, *states(output)]
    if not checkpoints:
        return
    step = f" of step {marker_of(checkpoints[0]).progress.step}" if saved_drafts else ""
    raise UserError(
        f"config key output_dir: {output} holds a checkpoint{step} ({checkpoints[0].name}); give resume=latest to "
        "continue it, another output_dir, or overwrite_output_dir=true to replace it"
    )


def _start_without_state(config: TrainConfig, run: Run, draft: tuple[Path, Progress] | None) -> Start:
    if draft is None:
        if config.resume:
            logger.warning("resume: no checkpoint in %s yet; this run starts at step 0", config.output_dir)
        return Start(run)
    folder, progress = draft
    logger.warning(
        "resume: %s holds a draft of step %d (%s) but no DeepSpeed state; this run starts from that draft at step 0 "
        "with a new schedule and optimizer, and keeps the old draft as checkpoint-earlier-*",
        config.output_dir,
        progress.step,
        folder.name,
    )
    return Start(run, draft=str(folder / DRAFT_WEIGHTS_NAME))


def with_draft_options(config: TrainConfig, state: Path | None, draft: str | None) -> TrainConfig:
    """`config` with the options of the state or draft that training starts from: `FIXED` and `draft_vocabulary` of the
    section `model`.

    Raises UserError if `config` sets other values than the saved ones. The default values are always accepted.
    """
    if state is not None:
        source = str(state)
        saved_model = read_config_file(state / CONFIG_NAME).model
        saved, saved_size = saved_model.draft_options, saved_model.draft_vocabulary
    elif draft is not None:
        source = draft
        saved, saved_size = draft_settings(draft).options, list_size(draft)
    else:
        return config

    model, own = config.model, asdict(saved)
    taken: dict[str, Any]
    if model.architecture not in (GLIDE, saved.architecture):
        raise UserError(
            f"config key model.architecture: {model.architecture}, but the draft at {source} is a {saved.architecture} "
            "draft; omit it"
        )
    if saved.architecture == GLIDE:
        configured = asdict(model.draft_options)
        section, taken = "model", {name: _as_yaml(own[name]) for name in FIXED}
        stated = {name: configured[name] for name in FIXED if configured[name] != getattr(PUBLISHED, name)}
    else:
        section, stated = "model.architecture_options", model.architecture_options
        options = {name: _as_yaml(value) for name, value in (own | stated).items()}
        taken = DRAFT_DEFAULTS | {"architecture": saved.architecture, "architecture_options": options}
    for name, value in stated.items():
        is_fixed = saved.architecture == GLIDE or name != "window" or state is not None
        if is_fixed and _as_yaml(value) != _as_yaml(own.get(name)):
            raise UserError(
                f"config key {section}.{name}: {value}, but the draft at {source} has {own.get(name)}; omit it"
            )
    if model.draft_vocabulary not in (None, saved_size):
        size = "the whole vocabulary" if saved_size is None else f"a list of {saved_size} tokens"
        key = f"config key model.draft_vocabulary: {model.draft_vocabulary}"
        raise UserError(f"{key}, but the draft at {source} has {size}; omit it")
    return replace(config, model=replace(model, **taken, draft_vocabulary=saved_size))


def _as_yaml(value: Any) -> Any:
    """An option as a configuration has it."""
    return list(value) if isinstance(value, tuple) else value


def check_same_run(config: TrainConfig, folder: Path, world_size: int, contents: Contents) -> None:
    """Raise UserError with all differences if `config` is not a continuation of the run saved in `folder`.

    RESUMED_KEYS and the contents of data and target must be equal. The number of ranks, the micro-batch size and the
    ZeRO stage may change if the number of rows per step stays the same, and so may the length of the run. Logs warnings
    about changes that affect the steps to come.
    """
    saved, marker = read_config_file(folder / CONFIG_NAME), marker_of(folder)
    problems = [*_differences(saved, config, RESUMED_KEYS), *changes(marker.run.contents, contents)]

    saved_split = _batch_split(saved, marker.progress.world_size)
    split = _batch_split(config, world_size)
    # The number of rows per step fixes which rows each step trains on.
    if math.prod(saved_split) != math.prod(split):
        problems.append(
            f"rows per step (micro-batch x accumulation x ranks) was {math.prod(saved_split)}, is {math.prod(split)}"
        )
    if problems:
        raise UserError(f"config key resume: {folder} is of another run: {'; '.join(problems)}; make them equal")

    if longer := _differences(saved, config, LENGTH_KEYS):
        logger.warning(
            "resume: %s; from step %d on the learning rate follows the schedule of the new length",
            "; ".join(longer),
            marker.progress.step + 1,
        )
    if saved_split != split:
        # Lags and offsets are drawn per micro-step and rank (see `micro_step_generator`).
        logger.warning(
            "resume: micro-batch x accumulation x ranks was %s, is %s. The draft, the optimizer state, the step, the "
            "learning rate and the order of the data are kept; the random lags and offsets are not",
            " x ".join(map(str, saved_split)),
            " x ".join(map(str, split)),
        )


def _differences(saved: TrainConfig, current: TrainConfig, keys: tuple[str, ...]) -> list[str]:
    """One phrase for each of `keys` whose values differ."""
    pairs = {key: (attrgetter(key)(saved), attrgetter(key)(current)) for key in keys}
    return [f"{key} was {old}, is {new}" for key, (old, new) in pairs.items() if old != new]


def _batch_split(config: TrainConfig, world_size: int) -> tuple[int, int, int]:
    """Rows per micro-batch, micro-batches per step, and ranks. Their product is the number of rows per step."""
    return config.per_device_train_batch_size, config.gradient_accumulation_steps, world_size


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


def rows_per_step(config: TrainConfig) -> int:
    """Rows per optimizer step, over all ranks."""
    _, world_size = data_parallel_rank_and_size()
    return math.prod(_batch_split(config, world_size))
