"""Where a run starts: from a saved state, from a draft whose state is gone, or from nothing."""

import logging
import math
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import OmegaConf

from longspec.errors import UserError
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME, draft_settings
from longspec.models.draft_layer import PUBLISHED
from longspec.train.checkpoint import absolute_paths
from longspec.train.config import CONFIG_NAME, TrainConfig, read_config_file
from longspec.train.contents import Contents, changes, contents_of
from longspec.train.distributed import data_parallel_place
from longspec.train.generations import check_folders, drafts, find_draft, find_latest, states
from longspec.train.seals import Progress, Run, read_seal

logger = logging.getLogger(__name__)

RESUMED_KEYS = (
    *("seed", "loss", "variant.name", "variant.max_offset", "variant.depth", "eos_token_id", "optimizer"),
    *("learning_rate", "warmup_ratio", "weight_decay", "adam_betas", "max_grad_norm"),
    *("data.max_length", "data.pack", "data.overflow", "data.answer_only", "data.chat_format", "data.aligners"),
    *("data.templates", "data.chat_template_kwargs"),
    *("model.torch_dtype", "model.window"),
)
"""Keys that must have the values of the run that is resumed; with others it would be another run."""
PATH_KEYS = ("data.files", "model_name_or_path")
"""Compared where a checkpoint has no digests of what was there."""
LENGTH_KEYS = ("max_steps", "num_train_epochs")
"""May change: a run can be extended."""


@dataclass(frozen=True)
class Start:
    """Where a launch starts. `state` is the saved state that it goes on from, `draft` a draft to warm-start from."""

    run: Run
    state: Path | None = None
    progress: Progress = field(default_factory=lambda: Progress(0, 0))
    draft: str | None = None


def where_to_start(config: TrainConfig, target: str) -> Start:
    """Reads the output folder and changes nothing there; for rank 0, which holds its lock.

    target: the folder or hub id that `config.model_name_or_path` stands for.

    Raises UserError if the launch line, the data or the target differ from the checkpoint's.
    """
    output, launch = Path(config.output_dir), secrets.token_hex(8)
    check_folders(output)
    if config.resume is None and not config.overwrite_output_dir and (held := [*drafts(output), *states(output)]):
        saved = read_seal(held[0]) if drafts(output) else None
        step = f" of step {saved.progress.step}" if saved else ""
        raise UserError(
            f"config key output_dir: {output} holds a checkpoint{step} ({held[0].name}); give resume=latest to go on "
            "from it, another output_dir, or overwrite_output_dir=true to replace it"
        )
    state = find_latest(output) if config.resume else None
    draft = find_draft(output) if config.resume and not state else None
    contents = contents_of(config, target)
    if state is None:
        run = Run(launch, launch, overwrites=config.overwrite_output_dir, contents=contents)
        return _without_state(config, run, draft)
    folder, progress = state
    saved = read_seal(folder)
    before = saved.run if saved else Run()
    check_same_run(config, folder, progress, data_parallel_place()[1], (before.contents, contents))
    return Start(Run(before.id, launch, progress.step, contents=contents), folder, progress)


def _without_state(config: TrainConfig, run: Run, draft: tuple[Path, Progress] | None) -> Start:
    if draft is None:
        if config.resume:
            logger.warning("resume: no checkpoint in %s yet, so this run starts at step 0", config.output_dir)
        return Start(run)
    folder, progress = draft
    logger.warning(
        "resume: %s holds a draft of step %d (%s) but no DeepSpeed state; this run starts from that draft at step 0, "
        "with a new schedule and optimizer, and keeps the old draft as checkpoint-earlier-*",
        *(config.output_dir, progress.step, folder.name),
    )
    return Start(run, draft=str(folder / DRAFT_WEIGHTS_NAME))


def with_draft_options(config: TrainConfig, state: Path | None, draft: str | None) -> TrainConfig:
    """`config` with `model.kv_layers` and `model.target_feature` of the saved run or draft that training goes on from.

    Raises UserError where `config` asks for others; the published ones, which are its defaults, ask for nothing.
    """
    if state is not None:
        source, saved = str(state), read_config_file(state / CONFIG_NAME).model.draft_options
    elif draft is not None:
        source, saved = draft, draft_settings(draft).options
    else:
        return config
    asked = config.model.draft_options
    for name in ("kv_layers", "target_feature"):
        now, was = getattr(asked, name), getattr(saved, name)
        if now not in (getattr(PUBLISHED, name), was):
            raise UserError(f"config key model.{name}: {now}, but the draft at {source} has {was}; leave it out")
    model = replace(config.model, kv_layers=list(saved.kv_layers), target_feature=saved.target_feature)
    return replace(config, model=model)


def check_same_run(
    config: TrainConfig,
    folder: Path,
    progress: Progress,
    world_size: int,
    contents: tuple[Contents | None, Contents | None] = (None, None),
) -> None:
    """Raise UserError if `config` differs from the run in `folder` in one of RESUMED_KEYS, or its data or target in
    contents; it names each that does.

    The number of ranks, the micro-batch and the ZeRO stage may change if each step takes as many rows as before. The
    run may have another length.

    contents: digests of data and target when the checkpoint was saved (None in older checkpoints) and now.
    """
    saved, now = (absolute_paths(c) for c in (read_config_file(folder / CONFIG_NAME), config))
    keys: tuple[str, ...] = RESUMED_KEYS
    changed: list[str] = []
    if contents[0] is None or contents[1] is None:
        logger.info("resume: %s has no digests of its data and target; only their paths are compared", folder)
        keys = (*RESUMED_KEYS, *PATH_KEYS)
    else:
        changed = changes(contents[0], contents[1])
    before, after = (OmegaConf.structured(run) for run in (saved, now))
    pairs = {key: (OmegaConf.select(before, key), OmegaConf.select(after, key)) for key in (*keys, *LENGTH_KEYS)}
    cuts = [
        (run.per_device_train_batch_size, run.gradient_accumulation_steps, ranks)
        for run, ranks in ((saved, progress.world_size), (now, world_size))
    ]
    pairs["rows a step (micro-batch x accumulation x ranks)"] = (math.prod(cuts[0]), math.prod(cuts[1]))
    differing = {key: f"{key} was {old}, is {new}" for key, (old, new) in pairs.items() if old != new}
    longer = [text for key, text in differing.items() if key in LENGTH_KEYS]
    if problems := [*(text for key, text in differing.items() if key not in LENGTH_KEYS), *changed]:
        raise UserError(f"config key resume: {folder} is of another run: {'; '.join(problems)}; make them equal")
    if longer:
        logger.warning(
            "resume: %s; from step %d on the learning rate follows the schedule of the new length",
            *("; ".join(longer), progress.step + 1),
        )
    if cuts[0] != cuts[1]:
        logger.warning(
            "resume: micro-batch x accumulation x ranks was %d x %d x %d, is %d x %d x %d. Kept: the draft, the "
            "optimizer's master weights and moments, the step, the learning rate, the order of the data. Not kept: the "
            "lags and offsets that would have been drawn",
            *(*cuts[0], *cuts[1]),
        )


def last_step(config: TrainConfig, rows: int, start: int) -> int:
    """The number of the run's last step. Raises UserError if the run is to start after it."""
    total = config.max_steps or math.ceil(config.num_train_epochs * rows / rows_a_step(config))
    if start > total:
        raise UserError(
            f"config key resume: the checkpoint in {config.output_dir} is of step {start}, this run ends with step "
            f"{total}; give more max_steps or num_train_epochs"
        )
    return total


def rows_a_step(config: TrainConfig) -> int:
    """Rows that all ranks together train on in an optimizer step."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * data_parallel_place()[1]
