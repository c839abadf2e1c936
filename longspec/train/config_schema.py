"""The keys of a training run, their types and the values that they take."""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, with_config
from pydantic_core import PydanticCustomError

from longspec.errors import UserError
from longspec.models.draft import Options
from longspec.models.draft_files import options_of
from longspec.models.draft_layer import GLIDE, OPTION_KEYS, WINDOW
from longspec.train.positions import BLOCK_LAGS, Variant

CONFIG_NAME = "training_config.yaml"
"""Configuration that a run saves next to its draft."""
LARGEST = 2**64
"""Integers are less: torch takes no larger seed."""


def _as_list(files: Any) -> Any:
    if not isinstance(files, str | list):
        raise PydanticCustomError("files", "must be a path or a list of paths")
    return [files] if isinstance(files, str) else files


def _number(value: Any) -> Any:
    """The number in a text, which is what ${oc.env:NAME} returns."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


NUMBER = BeforeValidator(_number)
Whole = Annotated[int, Field(strict=True), NUMBER]
Positive = Annotated[int, Field(strict=True, gt=0, lt=LARGEST), NUMBER]
Count = Annotated[int, Field(strict=True, ge=0, lt=LARGEST), NUMBER]
Real = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False), NUMBER]
# A beta of 1 would divide by zero in Adam's bias correction.
Betas = Annotated[list[Annotated[float, Field(strict=True, ge=0, lt=1), NUMBER]], Field(min_length=2, max_length=2)]
Files = Annotated[list[str], BeforeValidator(_as_list)]


@dataclass(kw_only=True)
class ModelConfig:
    """Keyword arguments of `_target_`, the `from_pretrained` of a pair class."""

    # It must name a known pair class (see `pair_class`).
    _target_: str
    torch_dtype: Literal["float32", "bfloat16"]
    attn_implementation: str | None
    gradient_checkpointing: bool
    pad_token_id: Whole | None
    ignore_mismatched_sizes: bool
    # Configurations in older checkpoints lack the keys below.
    architecture: str = GLIDE
    """The draft's architecture. The options of GLIDE are `window` to `mlp_size`, others have `architecture_options`."""
    architecture_options: dict[str, Any] = field(default_factory=dict)
    window: Positive = WINDOW
    kv_layers: list[Whole] = field(default_factory=list)
    target_feature: bool = False
    mlp_size: Whole | None = None
    draft_vocabulary: Positive | None = None
    """Number of tokens in the vocabulary list of the draft; `from_pretrained` takes the list itself."""

    @property
    def draft_options(self) -> Options:
        """The options of the draft's architecture. Raises UserError for values that no draft can have."""
        for name in OPTION_KEYS if self.architecture != GLIDE else ("architecture_options",):
            if getattr(self, name) != MODEL_DEFAULTS[name]:
                raise UserError(f"config key model.{name}: not for the architecture {self.architecture}; omit it")
        options, prefix = self.architecture_options, "config key model.architecture_options."
        if self.architecture == GLIDE:
            options, prefix = {name: getattr(self, name) for name in OPTION_KEYS}, "config key model."
        return options_of({**options, "architecture": self.architecture}, prefix)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `_target_`."""
        unused = ("_target_", "draft_vocabulary", *(OPTION_KEYS if self.architecture != GLIDE else ()))
        return {name: value for name, value in asdict(self).items() if name not in unused}


MODEL_DEFAULTS: dict[str, Any] = {
    key.name: key.default if key.default_factory is MISSING else key.default_factory()
    for key in fields(ModelConfig)
    if key.default is not MISSING or key.default_factory is not MISSING
}
"""Values that leave an option to the draft that training starts from."""


@dataclass(kw_only=True)
class DataConfig:
    """The data (see `data.tokenization.Tokenize`), and the number of loading processes per rank."""

    files: Files
    # Tokens per row, the unit of a micro-batch.
    max_length: Positive
    pack: bool
    overflow: Literal["split", "truncate"]
    answer_only: bool
    chat_format: str
    aligners: list[Any]
    num_proc: Positive
    num_workers: Count
    cache_dir: str | None
    # Configurations in older checkpoints lack these keys.
    templates: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class DeepSpeedConfig:
    """The part of DeepSpeed's configuration that the user sets. The other keys determine the rest of it."""

    zero_optimization: dict[str, Any]


@dataclass(kw_only=True)
class VariantConfig:
    """The training variant (see `longspec.train.positions`)."""

    name: Variant
    max_offset: Count
    """Largest offset of anchor-offset positions."""
    depth: Count
    """Largest lag of sinkpi-slicing."""

    @property
    def largest_lag(self) -> int:
        """The largest lag that training covers."""
        return BLOCK_LAGS if self.name == "base" else self.depth


@dataclass(kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out data (see `longspec.train.evaluation`). Without `files` there is none."""

    files: Files | None
    steps: Positive
    rows: Positive | None
    keep_best: bool


@dataclass(kw_only=True)
class WandbConfig:
    project: str
    mode: Literal["auto", "online", "offline", "disabled"]


@with_config(ConfigDict(extra="forbid", coerce_numbers_to_str=True))
@dataclass(kw_only=True)
class TrainConfig:
    """All keys of a training run. Defaults are in `conf/` only, except for keys that older checkpoints lack."""

    model: ModelConfig
    data: DataConfig
    deepspeed: DeepSpeedConfig
    variant: VariantConfig
    evaluation: EvaluationConfig
    wandb: WandbConfig
    model_name_or_path: Annotated[str, Field(min_length=1)]
    draft_model_name_or_path: str | None
    eos_token_id: Whole | None
    output_dir: str
    resume: Literal["latest", None]
    overwrite_output_dir: bool = False
    seed: Count
    loss: str
    log_target_loss: bool
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Real
    warmup_ratio: Annotated[float, Field(strict=True, ge=0, le=1), NUMBER]
    weight_decay: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False), NUMBER]
    adam_betas: Betas
    max_grad_norm: Real
    per_device_train_batch_size: Positive
    gradient_accumulation_steps: Positive
    # The length of the run: `max_steps`, else these epochs, else as many as the recipe takes.
    num_train_epochs: Real | None
    max_steps: Positive | None
    save_steps: Positive
    tp_size: Positive

    @property
    def saved_config(self) -> Path | None:
        """The configuration in `model_name_or_path` if that is a checkpoint folder of a training run; None for a
        target."""
        file = Path(self.model_name_or_path) / CONFIG_NAME
        return file if file.is_file() else None
