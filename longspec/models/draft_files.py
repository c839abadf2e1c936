"""Reading and checking draft weights in every file format. `draft_saving` writes them."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from longspec.errors import UserError
from longspec.models.architectures import draft_class, published_draft
from longspec.models.draft import ARCHITECTURE_KEY, OPTIONS_KEY, Draft, Options
from longspec.models.draft_layer import GLIDE, OPTION_KEYS, PUBLISHED, GlideDecoderLayer
from longspec.models.draft_vocabulary import MAPS, maps_problem
from longspec.models.target_files import fetched, is_path, without_memory
from longspec.models.target_sample import TargetSample, read_sample
from longspec.models.weight_files import FLOATING, dequantized, read_metadata, read_weights
from longspec.untrusted import read_json

DRAFT_WEIGHTS_NAME = "draft_model_weights.pth"
DRAFT_FOLDER = "draft"
"""Subfolder of a saved pair that holds its draft in Hugging Face form."""
DRAFT_PREFIX = "draft_model."
TARGET_PREFIX = "model.layers."
"""Start of the names of a target's weights."""
WEIGHT_PATTERNS = ("*.safetensors", DRAFT_WEIGHTS_NAME, "pytorch_model*.bin")
"""Patterns of weight files in a draft's folder. The first one that matches is used, so pickles come last."""
LAST_DRAFT = "checkpoint-last"
"""Subfolder of a training run's output with its newest draft."""
TRAINED_KEY = "draft_is_trained"
"""Key in a draft's `config.json`; false for the fresh draft of a saved pair, otherwise absent."""
NAMED_FAULTS = 40
"""Maximum number of keys in an error message."""


@dataclass(frozen=True)
class DraftSettings:
    """Properties of a saved draft that are not in its weights."""

    options: Options = PUBLISHED
    is_trained: bool = True
    target: TargetSample | None = None
    """Sample of the target that it was trained for; older drafts have none."""


def resolve_draft(path: str | Path) -> Path:
    """The local weight file or folder of a draft. A path that does not exist is downloaded as a hub id. For the folder
    of a saved pair it is the subfolder with the draft. Raises UserError."""
    local = Path(path)
    if not os.path.exists(local):
        if is_path(path) or local.suffix in {".pth", ".bin", ".pt", ".safetensors"}:
            raise UserError(f"{path}: no such draft; give a .pth file, a folder or a hub id")
        local = fetched(path, "no such draft on disk or on the hub; give a .pth file, a folder or a hub id")
    return local / DRAFT_FOLDER if (local / DRAFT_FOLDER / "config.json").exists() else local


def draft_of_pair(target: str | Path, revision: str | None = None) -> Path | None:
    """The draft that `save_pretrained` of a pair wrote next to its target, or None. Raises UserError."""
    folder = Path(target)
    if not os.path.isdir(folder):
        problem = "could not look for a draft in this repository"
        folder = fetched(target, problem, revision=revision, allow_patterns=f"{DRAFT_FOLDER}/*")
    return folder / DRAFT_FOLDER if (folder / DRAFT_FOLDER / "config.json").exists() else None


def load_draft(path: str | Path) -> dict[str, Tensor]:
    """Draft weights on the CPU without the prefix `draft_model.`, from any format that `resolve_draft` accepts.

    A folder holds `draft_model_weights.pth`, or is in Hugging Face form: `config.json` with safetensors or
    `pytorch_model*.bin`. The tensors are mapped from the files, except those stored in 8 bits; no code in them runs.
    Raises UserError, also for the weights of a target.
    """
    state: dict[str, Tensor] = {}
    for file in _weight_files(resolve_draft(path)):
        state |= read_weights(file)
    state = strip_prefix(state)
    if any(name.startswith(TARGET_PREFIX) for name in state):
        raise UserError(f"{path}: holds a target, and no draft; give the .pth file, folder or hub id of a draft")
    return dequantized(state, str(path))


def _weight_files(path: Path) -> list[Path]:
    """The weight files of a draft that is a file or a folder. Raises UserError."""
    if not path.is_dir():
        return [path]
    for pattern in WEIGHT_PATTERNS:
        if files := sorted(path.glob(pattern)):
            return files
    inner = [f"; give {path / name}" for name in (DRAFT_FOLDER, LAST_DRAFT) if (path / name).is_dir()]
    kinds = f"*.safetensors, {DRAFT_WEIGHTS_NAME} or pytorch_model*.bin"
    raise UserError(f"{path}: no draft in this folder ({kinds}){''.join(inner[:1])}")


def strip_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The draft's weights in a state dict: those with the prefix `draft_model.`, which is removed, or else all."""
    draft = {name.removeprefix(DRAFT_PREFIX): w for name, w in state.items() if name.startswith(DRAFT_PREFIX)}
    return draft or dict(state)


def fit_draft(state: Mapping[str, Tensor], layer: Draft, source: str) -> dict[str, Tensor]:
    """`state` under the names of `layer` (which may be on the meta device), if it fits it. The vocabulary list is that
    of `state`, whether or not `layer` has one. Raises UserError that names `source` and the missing, unexpected,
    wrongly shaped and non-finite weights, or the fault of the vocabulary list."""
    weights = layer.renamed(strip_prefix(state))
    maps = {name: weights.pop(name) for name in MAPS if name in weights}
    expected = layer.shapes(weights, maps["d2t"].numel() if "d2t" in maps else None)

    faults = [f"missing {name}" for name in expected.keys() - weights.keys()]
    faults += [f"unexpected {name[:60]!r}" for name in weights.keys() - expected.keys()]
    for name, weight in weights.items():
        if weight.dtype not in FLOATING:
            faults.append(f"{name} is no floating-point tensor")
        elif name in expected and weight.shape != expected[name]:
            faults.append(f"{name} is {list(weight.shape)}, the target needs {list(expected[name])}")

    if problem := maps_problem(maps, layer.vocab_size):
        faults.append(problem)

    if faults:
        named = sorted(faults)[:NAMED_FAULTS]
        rest = f"; and {len(faults) - len(named)} more" if len(faults) > len(named) else ""
        raise UserError(f"{source}: the draft does not fit the target: {'; '.join(named)}{rest}")
    check_finite(weights, source)
    return weights | maps


def check_finite(state: Mapping[str, Tensor], source: str) -> None:
    """Raise UserError with the name of the first weight that contains NaN or Inf."""
    for name, weight in sorted(state.items()):
        if not torch.isfinite(weight).all():
            raise UserError(f"{source}: the draft's weight {name} contains NaN or Inf; use another checkpoint")


def check_draft(
    path: str | Path, config: PreTrainedConfig, layer_class: type[GlideDecoderLayer], only: str | None = None
) -> dict[str, Tensor]:
    """The weights of the draft at `path`, if it fits a target with `config`. The target need not be loaded.

    Compares family and head layout (if the draft's folder states them), the layers that the draft reads, and every
    shape. layer_class: GLIDE's class for the target's family. only: the architecture that the caller supports; None for
    any. Raises UserError.
    """
    draft = resolve_draft(path)
    state = load_draft(draft)
    options = draft_settings(draft).options
    if only not in (None, options.architecture):
        raise UserError(f"{path}: a draft of the architecture {options.architecture}; only {only} works here")
    if options.architecture == GLIDE and draft.is_dir() and (draft / "config.json").exists():
        _compare_configs(draft / "config.json", config)
    options.check_target(config, str(path))
    with without_memory(config):
        layer = draft_class(options.architecture, layer_class, str(path))(config, options)
    weights = fit_draft(state, layer, str(path))
    return {name: weight.clone() for name, weight in weights.items()}  # no longer mapped from the file


def list_size(path: str | Path) -> int | None:
    """Number of tokens in the vocabulary list of the draft at `path`; None if it has none. Raises UserError."""
    state = load_draft(path)
    return state["d2t"].numel() if "d2t" in state else None


def draft_settings(path: str | Path) -> DraftSettings:
    """Settings of the draft at `path`: from its weight file, else `config.json`. Published drafts state none, so they
    get the defaults. Raises UserError."""
    draft = resolve_draft(path)
    config_file = (draft if draft.is_dir() else draft.parent) / "config.json"
    config = read_json(config_file) if config_file.exists() else {}
    # The weight file takes precedence, because it is what users pass around.
    stated = config | {key: _parsed(value) for key, value in read_metadata(_weight_files(draft)[0]).items()}
    is_trained = config.get(TRAINED_KEY, True) is not False
    prefix = f"{path}: "
    published = None if ARCHITECTURE_KEY in stated else published_draft(config)
    if published is not None:
        options = published.published_options(config, prefix)
    else:
        options = options_of(stated_options(stated, prefix), prefix)
    return DraftSettings(options, is_trained, read_sample(stated, prefix))


def stated_options(source: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The options by name in the entries of a draft's files, and the `architecture` if it is not GLIDE. prefix:
    precedes names in errors. Raises UserError."""
    if ARCHITECTURE_KEY not in source:
        return {name: source[key] for name, key in OPTION_KEYS.items() if key in source}
    options = source.get(OPTIONS_KEY) or {}
    if not isinstance(options, Mapping):
        raise UserError(f"{prefix}{OPTIONS_KEY}: must be a mapping of the draft's options")
    return {"architecture": source[ARCHITECTURE_KEY], **options}


def options_of(stated: Mapping[str, Any], prefix: str = "") -> Options:
    """Options by name, with the key `architecture`; a missing one has the published value. Raises UserError."""
    options = dict(stated)
    name = str(options.pop("architecture", GLIDE))
    source = f"{prefix.removesuffix('architecture_options.')}architecture"
    return draft_class(name, GlideDecoderLayer, source).options_class.checked(options, prefix)


def asked_options(asked: Mapping[str, Any], glide_path: str | Path | None) -> Options:
    """The options of the draft at `glide_path`, or the default ones, updated with `asked`, as for `options_of`. Raises
    UserError if `asked` contradicts the draft. Only the window may differ: no weight depends on it."""
    if glide_path is None:
        return options_of(asked)
    saved = draft_settings(glide_path).options
    if asked.get("architecture", saved.architecture) == saved.architecture:
        options = options_of({"architecture": saved.architecture, **asdict(saved), **asked})
        if replace(options, window=saved.window) == saved:
            return options
    raise UserError(f"{dict(asked)} contradicts the draft at {glide_path}, which has {saved}; omit all but window")


def _parsed(value: Any) -> Any:
    """The parsed value if it is text, because safetensors metadata holds JSON; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _compare_configs(file: Path, config: PreTrainedConfig) -> None:
    draft = read_json(file)
    for name in ("model_type", "num_attention_heads", "num_key_value_heads", "head_dim"):
        own = getattr(config, name, None)
        # Published drafts leave out some of these keys.
        if own is not None and draft.get(name, own) not in (None, own):
            raise UserError(f"{file}: a draft for a target with {name} {draft[name]!r:.60}; this target has {own}")
