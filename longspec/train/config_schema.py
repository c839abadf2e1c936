"""The keys of a training run and their types."""

from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import MISSING

from longspec.errors import UserError
from longspec.models.draft import ARCHITECTURE_KEY, OPTIONS_KEY, Options
from longspec.models.draft_files import options_of
from longspec.models.draft_layer import GLIDE, OPTION_KEYS, WINDOW
from longspec.train.positions import BLOCK_LAGS


@dataclass
class ModelConfig:
    """Keyword arguments of `_target_`, the `from_pretrained` of a pair class."""

    # It must name a known pair class (see `pair_class`).
    _target_: str = MISSING
    torch_dtype: str = MISSING
    attn_implementation: str | None = MISSING
    gradient_checkpointing: bool = MISSING
    pad_token_id: int | None = MISSING
    ignore_mismatched_sizes: bool = MISSING
    # Configurations in older checkpoints lack the keys below.
    architecture: str = GLIDE
    """The draft's architecture. The options of GLIDE are `window` to `mlp_size`, others have `architecture_options`."""
    architecture_options: dict[str, Any] = field(default_factory=dict)
    window: int = WINDOW
    kv_layers: list[int] = field(default_factory=list)
    target_feature: bool = False
    mlp_size: int | None = None
    draft_vocabulary: int | None = None
    """Number of tokens in the vocabulary list of the draft; `from_pretrained` takes the list itself."""

    @property
    def draft_options(self) -> Options:
        """The options of the draft's architecture. Raises UserError for values that no draft can have."""
        plain = ModelConfig()
        for name in OPTION_KEYS if self.architecture != GLIDE else ("architecture_options",):
            if getattr(self, name) != getattr(plain, name):
                raise UserError(f"config key model.{name}: not for the architecture {self.architecture}; omit it")
        stated = {key: getattr(self, name) for name, key in OPTION_KEYS.items()}
        stated |= {ARCHITECTURE_KEY: self.architecture, OPTIONS_KEY: self.architecture_options}
        prefix = "config key model." if self.architecture == GLIDE else "config key model.architecture_options."
        return options_of(stated, prefix)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `_target_`."""
        unused = ("_target_", "draft_vocabulary", *(OPTION_KEYS if self.architecture != GLIDE else ()))
        return {name: value for name, value in asdict(self).items() if name not in unused}


@dataclass
class DataConfig:
    """The data (see `data.tokenization.Tokenize`), and the number of loading processes per rank."""

    files: Any = MISSING
    # Tokens per row, the unit of a micro-batch.
    max_length: int = MISSING
    pack: bool = MISSING
    overflow: str = MISSING
    answer_only: bool = MISSING
    chat_format: str = MISSING
    aligners: list[Any] = MISSING
    num_proc: int = MISSING
    num_workers: int = MISSING
    cache_dir: str | None = MISSING
    # Configurations in older checkpoints lack these keys.
    templates: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


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
    """Largest lag of sinkpi-slicing."""

    @property
    def largest_lag(self) -> int:
        """The largest lag that training covers."""
        return BLOCK_LAGS if self.name == "base" else self.depth


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
    # The length of the run: `max_steps`, else these epochs, else as many as the recipe takes.
    num_train_epochs: float | None = MISSING
    max_steps: int | None = MISSING
    save_steps: int = MISSING
    tp_size: int = MISSING
