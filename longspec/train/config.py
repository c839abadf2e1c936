"""The configuration of a training run: its typed schema, how Hydra composes it, and the checks of its values."""

import difflib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from packaging.version import Version
from pydantic import ValidationError
from yaml import YAMLError

from longspec.data.dataset import OVERFLOWS
from longspec.data.records import data_files
from longspec.data.target_format import CHAT_FORMAT_CHOICES
from longspec.data.templates import check_templates
from longspec.errors import UserError
from longspec.kernels.training.varlen import resolve_attention
from longspec.models.draft_files import checked_options
from longspec.models.draft_layer import WINDOW, DraftOptions
from longspec.models.families import pair_class
from longspec.train.command import launch_parser
from longspec.train.loss import LOSSES
from longspec.train.positions import BLOCK_LAGS, VARIANTS
from longspec.untrusted import read_yaml

CONFIG_NAME = "training_config.yaml"
"""File of the configuration in a checkpoint folder."""
DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adamw", "muon")
MUON_FROM = "0.19.8"
"""Oldest supported DeepSpeed version for Muon. Earlier ones have no Muon for bf16."""
LARGEST_NUMBER = 2**64 - 1
"""Limit of all integers, and the largest seed that torch accepts."""
WANDB_MODES = ("auto", "online", "offline", "disabled")
UNKNOWN_KEY = (ConfigAttributeError, ConfigKeyError)
"""OmegaConf's errors for a key that is not in the schema."""

POSITIVE = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "save_steps"),
    *("learning_rate", "max_grad_norm", "data.num_proc", "tp_size", "evaluation.steps", "evaluation.rows"),
    *("model.window", "data.max_length"),
)
"""Keys with a number > 0."""
NOT_NEGATIVE = ("seed", "weight_decay", "data.num_workers", "variant.max_offset")
"""Keys with a number >= 0."""


@dataclass
class ModelConfig:
    """Keyword arguments of `_target_`, the `from_pretrained` of a pair class."""

    _target_: str = MISSING
    torch_dtype: str = MISSING
    attn_implementation: str | None = MISSING
    gradient_checkpointing: bool = MISSING
    pad_token_id: int | None = MISSING
    ignore_mismatched_sizes: bool = MISSING
    # Configurations in older checkpoints lack the keys below.
    window: int = WINDOW
    kv_layers: list[int] = field(default_factory=list)
    target_feature: bool = False

    @property
    def draft_options(self) -> DraftOptions:
        """The draft's architecture. Raises UserError for values that no draft can have."""
        options = {"window": self.window, "kv_layers": self.kv_layers, "target_feature": self.target_feature}
        return checked_options(options, "config key model.")


@dataclass
class DataConfig:
    """Arguments of `longspec.data.dataset.build_dataset`, and the number of loading processes per rank."""

    files: Any = MISSING
    max_length: int = MISSING
    pack: bool = MISSING
    overflow: str = MISSING
    answer_only: bool = MISSING
    chat_format: str = MISSING
    aligners: list[Any] = MISSING
    num_proc: int = MISSING
    num_workers: int = MISSING
    cache_dir: str | None = MISSING
    # Configurations in older checkpoints lack this key.
    templates: dict[str, Any] = field(default_factory=dict)


@dataclass
class DeepSpeedConfig:
    """The part of DeepSpeed's configuration that the user sets. The other keys determine the rest of it."""

    zero_optimization: dict[str, Any] = MISSING


@dataclass
class VariantConfig:
    """The training variant (see `longspec.train.positions`)."""

    name: str = MISSING
    """base or sinkpi-slicing."""
    max_offset: int = MISSING
    """Largest offset of anchor-offset positions."""
    depth: int = MISSING
    """Largest lag."""


@dataclass
class EvaluationConfig:
    """Evaluation on held-out data (see `longspec.train.evaluation`). Without `files` there is none."""

    files: Any = MISSING
    steps: int = MISSING
    rows: int | None = MISSING
    keep_best: bool = MISSING


@dataclass
class WandbConfig:
    project: str = MISSING
    mode: str = MISSING


@dataclass
class TrainConfig:
    """All keys of a training run. Defaults are in `conf/` only, except for keys that older checkpoints lack."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    deepspeed: DeepSpeedConfig = MISSING
    variant: VariantConfig = MISSING
    evaluation: EvaluationConfig = MISSING
    wandb: WandbConfig = MISSING
    model_name_or_path: str = MISSING
    draft_model_name_or_path: str | None = MISSING
    eos_token_id: int | None = MISSING
    output_dir: str = MISSING
    resume: str | None = MISSING
    overwrite_output_dir: bool = False
    seed: int = MISSING
    loss: str = MISSING
    log_target_loss: bool = MISSING
    optimizer: str = "adamw"
    learning_rate: float = MISSING
    warmup_ratio: float = MISSING
    weight_decay: float = MISSING
    adam_betas: list[float] = MISSING
    max_grad_norm: float = MISSING
    per_device_train_batch_size: int = MISSING
    gradient_accumulation_steps: int = MISSING
    num_train_epochs: float = MISSING
    max_steps: int | None = MISSING
    save_steps: int = MISSING
    tp_size: int = MISSING


def load_config(argv: Sequence[str]) -> TrainConfig | None:
    """The configuration of the run that the command-line arguments describe, checked.

    With `--cfg job` it is printed, and the result is None. Raises UserError with the full name of a wrong key.
    """
    args = launch_parser().parse_intermixed_args(argv)
    composed = compose_config(args.config_path, args.config_name, args.overrides)
    if args.cfg:
        print(OmegaConf.to_yaml(composed), end="")
        return None
    config = typed(composed)
    overridden = {override.lstrip("+").partition("=")[0] for override in args.overrides}
    if "model_name_or_path" in overridden and "draft_model_name_or_path" not in overridden and is_checkpoint(config):
        # The checkpoint's own draft takes precedence over the draft that the experiment names.
        config.draft_model_name_or_path = None
    config.data.files = _as_list(config.data.files)
    if config.evaluation.files is not None:
        config.evaluation.files = _as_list(config.evaluation.files)
    check(config)
    return config


def compose_config(folder: str | Path, name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose `folder`/`name`.yaml with Hydra, without its working folders and log files. Raises UserError."""
    if not Path(folder).is_dir():
        raise UserError(f"config path {folder}: no such folder; run from the repository's root or give its full path")
    if not (Path(folder) / f"{name.removesuffix('.yaml')}.yaml").is_file():
        raise UserError(f"config name {name}: no such experiment; choose one of the .yaml files in {folder}")
    try:
        with initialize_config_dir(str(Path(folder).absolute()), version_base=None):
            # Any kind of record may have a template, and Hydra adds new keys only with `++`.
            prefixed = [f"++{text}" if text.startswith("data.templates.") else text for text in overrides]
            return compose(name.removesuffix(".yaml"), overrides=prefixed)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        if isinstance(error.__cause__, UNKNOWN_KEY):
            # Hydra's own message suggests `+key`, which `typed` rejects.
            raise _unknown_key(str(error.__cause__.full_key)) from error
        raise UserError(f"config {name}: {_one_line(error)}") from error


def typed(composed: DictConfig) -> TrainConfig:
    """`composed` as a TrainConfig. Raises UserError for an unknown or missing key or a value of the wrong type."""
    merged = OmegaConf.structured(TrainConfig)
    key = ""
    try:
        values: Any = OmegaConf.to_container(composed, resolve=True)
        # Merged one by one, so that an error without a key can be attributed to one.
        for key, value in values.items():
            merged = OmegaConf.merge(merged, {key: value})
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        where = getattr(error, "full_key", None) or key
        if isinstance(error, UNKNOWN_KEY):
            raise _unknown_key(where) from error
        raise UserError(f"config key {where}: {_one_line(error)}") from error


def _unknown_key(key: str) -> UserError:
    known = list(_keys(TrainConfig))
    same_name = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    similar = same_name or difflib.get_close_matches(key, known)
    # A key is a better suggestion than the section that holds it.
    suggestions = [name for name in similar if not any(other.startswith(f"{name}.") for other in similar)]
    hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else "--cfg job prints all keys"
    return UserError(f"config key {key}: no such key; {hint}")


def _keys(section: type, prefix: str = "") -> Iterator[str]:
    """The full names of all keys of a config class, including those of its sections."""
    for key in fields(section):
        yield prefix + key.name
        if isinstance(key.type, type) and is_dataclass(key.type):
            yield from _keys(key.type, f"{prefix}{key.name}.")


def read_config_file(file: Path) -> TrainConfig:
    """The configuration of a checkpoint, whose origin may not be trusted.

    Nothing in it is resolved, imported or called. Raises UserError if it is not a valid configuration.
    """
    content = read_yaml(file)
    try:
        config = typed(OmegaConf.create(content))
        pair_class(config.model._target_)
        _choice("model.torch_dtype", config.model.torch_dtype, DTYPES)
        config.model.draft_options  # noqa: B018 (raises UserError)
    except (OmegaConfBaseException, UserError) as error:
        raise UserError(f"{file}: not a readable training configuration ({_one_line(error)})") from error
    return config


def _one_line(error: Exception) -> str:
    """The error's message in one line, without OmegaConf's footer (full_key, object_type, reference_type)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type=")))


def is_checkpoint(config: TrainConfig) -> bool:
    """Whether `model_name_or_path` is a checkpoint folder of a training run instead of a target."""
    return (Path(config.model_name_or_path) / CONFIG_NAME).is_file()


def check(config: TrainConfig) -> None:
    """Check the values of all keys and that the data files exist. Raises UserError with the key's name."""
    _check_numbers(config)
    _check_choices(config)
    contradict = config.overwrite_output_dir and config.resume is not None
    _require(not contradict, "overwrite_output_dir", "must be false with resume", config.overwrite_output_dir)
    check_templates(config.data.templates, "config key data.templates")
    _check_depth(config)
    resolve_attention(config.model.attn_implementation)
    _check_zero(config.deepspeed.zero_optimization)
    if config.optimizer == "muon":
        _check_muon(config)
    _check_data_files(config)
    _check_output_dir(config.output_dir)


def _check_numbers(config: TrainConfig) -> None:
    values = OmegaConf.structured(config)
    for key in (*POSITIVE, *NOT_NEGATIVE):
        value = OmegaConf.select(values, key)
        if value is None:  # max_steps and evaluation.rows may be null
            continue
        if isinstance(value, int):
            _require(value <= LARGEST_NUMBER, key, "must be at most 2^64 - 1", value)
        else:
            _require(math.isfinite(value), key, "must be finite", value)
        if key in POSITIVE:
            _require(value > 0, key, "must be positive", value)
        else:
            _require(value >= 0, key, "must not be negative", value)
    _require(0 <= config.warmup_ratio <= 1, "warmup_ratio", "must be in 0 … 1", config.warmup_ratio)
    two_betas = len(config.adam_betas) == 2 and all(0 <= beta < 1 for beta in config.adam_betas)
    _require(two_betas, "adam_betas", "must be two numbers in [0, 1)", config.adam_betas)


def _check_choices(config: TrainConfig) -> None:
    _choice("loss", config.loss, LOSSES)
    _choice("optimizer", config.optimizer, OPTIMIZERS)
    _choice("resume", config.resume, (None, "latest"))
    _choice("variant.name", config.variant.name, VARIANTS)
    _choice("data.chat_format", config.data.chat_format, CHAT_FORMAT_CHOICES)
    _choice("data.overflow", config.data.overflow, OVERFLOWS)
    _choice("model.torch_dtype", config.model.torch_dtype, DTYPES)
    _choice("wandb.mode", config.wandb.mode, WANDB_MODES)


def _check_depth(config: TrainConfig) -> None:
    """A chain of the trained depth must fit into the draft's window."""
    if config.variant.name == "base":
        depth = BLOCK_LAGS
    else:
        depth = config.variant.depth
        _require(depth > 0, "variant.depth", "must be positive", depth)
    window = config.model.draft_options.window
    if window <= depth:
        raise UserError(f"config key model.window: {window}; it must be greater than the largest trained lag, {depth}")


def _check_zero(section: dict[str, Any]) -> None:
    _choice("deepspeed.zero_optimization.stage", section.get("stage"), (1, 2, 3))
    if offload := section.get("offload_optimizer"):
        _choice("deepspeed.zero_optimization.offload_optimizer.device", offload.get("device"), ("cpu",))
    try:
        DeepSpeedZeroConfig(**section)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("deepspeed.zero_optimization", *first["loc"])))
        raise UserError(f"config key {key}: {first['msg']}, not {first['input']!r}") from error


def _check_muon(config: TrainConfig) -> None:
    """Allow Muon only where DeepSpeed clips the gradient.

    In other settings it clips Muon's update, whose norm is the same in every step.
    """
    zero = config.deepspeed.zero_optimization
    plain = zero["stage"] == 1 and not zero.get("offload_optimizer") and config.tp_size == 1
    fits = plain and config.model.torch_dtype == "bfloat16"
    if not fits:
        raise UserError("config key optimizer: muon needs ZeRO-1 without offload, bfloat16 and tp_size=1")
    new_enough = Version(deepspeed.__version__) >= Version(MUON_FROM)
    _require(new_enough, "optimizer", f"must be adamw with deepspeed < {MUON_FROM}", "muon")


def _check_data_files(config: TrainConfig) -> None:
    training_files = _real_files("data.files", config.data.files)
    evaluation = config.evaluation
    if evaluation.files is None:
        _require(not evaluation.keep_best, "evaluation.keep_best", "needs evaluation.files", True)
        return
    held_out_files = _real_files("evaluation.files", evaluation.files)
    if shared := sorted(held_out_files & training_files):
        raise UserError(
            f"config key evaluation.files: {shared[0]} is also in data.files; evaluate on files that are not trained on"
        )


def _as_list(files: Any) -> Any:
    return [files] if isinstance(files, str) else files


def _real_files(key: str, files: Any) -> set[str]:
    """The real paths of all data files that `files` names."""
    _require(isinstance(files, list), key, "must be a path or a list of paths", files)
    return {os.path.realpath(file) for file in data_files(files)}


def _check_output_dir(folder: str) -> None:
    _require(folder.strip() != "", "output_dir", "must name a folder", folder)
    output = Path(folder)
    try:
        exists = output.exists()
    except OSError as error:
        raise UserError(f"config key output_dir: {output} cannot be used ({error.strerror})") from error
    if exists:
        _require(output.is_dir(), "output_dir", "must be a folder", folder)
        _require(os.access(output, os.W_OK), "output_dir", "must be writable", folder)


def make_output_dir(config: TrainConfig) -> None:
    """Create the output folder if it is missing. Raises UserError if that fails."""
    output = Path(config.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"config key output_dir: {output} cannot be created ({error.strerror})") from error
    _require(os.access(output, os.W_OK), "output_dir", "must be writable", config.output_dir)


def _require(condition: bool, key: str, problem: str, value: object) -> None:
    if not condition:
        raise UserError(f"config key {key}: {problem}, not {value!r}")


def _choice(key: str, value: object, allowed: Sequence[object]) -> None:
    names = ", ".join("null" if choice is None else str(choice) for choice in allowed)
    _require(value in allowed, key, f"must be one of {names}", value)


def to_yaml(config: TrainConfig) -> str:
    """The whole configuration as YAML, in the schema's order."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))
