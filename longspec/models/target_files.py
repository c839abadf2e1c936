"""Config, weights and tokenizer in a target's folder, checked before anything large is loaded."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from longspec.chat_template import replace_template, template_text
from longspec.errors import UserError, first_line, os_errors
from longspec.models.packaged_targets import check_reachable
from longspec.untrusted import check_regular

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
ADAPTER_FILES = (
    *("adapter_config.json", "adapter_*.*", "adapters.*"),
    *("lora*.*", "*[-_]lora*.safetensors", "lit_model*.lora*"),
)
"""Files of PEFT, MLX, diffusers, torchtune and LitGPT."""
TARGET_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
"""Files of a target that are fetched from the hub."""
ORIGINAL_PATTERNS = ("original/*", "consolidated*")
"""Copies of the weights in other formats, in repositories of Llama and Mistral."""
TEXT_FILES = (".json", ".jinja", ".model", ".txt")
TOKENIZER_BYTES = 2**26
"""Size limit of a tokenizer or a configuration; the largest published ones have about 35 MB."""
MAX_LAYERS = 1024
TemplateArguments = Mapping[str, Any] | str | None
"""Variables of a chat template with their values: a mapping, or a JSON object as the commands take it."""
RESCALED_BY_LENGTH = ("dynamic", "longrope")


def read_config(path: str | Path, revision: str | None = None) -> PreTrainedConfig:
    """The transformers config of a target folder or hub id. Runs no remote code. Raises UserError if there is none."""
    check_target_path(path)
    if not os.path.isdir(path):  # unlike pathlib, does not raise for impossible names
        check_reachable(str(path), revision)
    else:
        check_no_adapter(path)
        # transformers would take the folder's name for a hub id.
        if not (Path(path) / "config.json").is_file():
            raise UserError(f"{path}: no model checkpoint (no config.json there); give a target's folder or hub id")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, revision=revision or "main")
    except Exception as error:  # transformers raises a dozen kinds for damaged files
        where = "there" if os.path.isdir(path) else "and no such folder"
        reason = f"{first_line(error)}); give a target's folder or hub id"
        raise UserError(f"{path}: no model checkpoint {where} ({reason}") from error


def checked_dtype(value: str | torch.dtype) -> str | torch.dtype:
    """A floating-point dtype, or "auto" for the dtype of the target's files. Raises UserError."""
    if value == "auto":
        return "auto"
    dtype = value if isinstance(value, torch.dtype) else getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"dtype: {value!r} is not a floating-point dtype; use auto, float32, float16 or bfloat16")
    return dtype


def check_no_adapter(path: str | Path) -> None:
    """Raise UserError for a folder with a LoRA or other PEFT adapter, which would not be applied."""
    if files := [file for pattern in ADAPTER_FILES for file in Path(path).glob(pattern)]:
        raise UserError(
            f"{path}: holds an adapter ({files[0].name}), which would not be applied; merge it into its model with "
            "peft's merge_and_unload(), save that and give its folder, or remove the adapter's files"
        )


def check_target_path(path: str | Path) -> None:
    """Raise UserError for a file, for a folder with files that are not regular, and for a path that does not exist."""
    if os.path.isdir(path):
        check_files(Path(path))
    elif os.path.exists(path) or is_path(path):
        problem = "a file" if os.path.exists(path) else "no such folder"
        raise UserError(f"{path}: no model checkpoint ({problem}); give a target's folder or hub id")


def is_path(name: str | Path) -> bool:
    """Whether a name is written as only a path can be: no hub id has two slashes, or starts with one of these."""
    return str(name).startswith((".", "/", "~")) or str(name).count("/") > 1


def check_files(folder: Path) -> None:
    """Raise UserError for a file in a model's folder that is not regular, or too large to be read into memory.
    transformers and tokenizers would block on a pipe. Links are followed, because the hub's cache consists of them."""
    with os_errors(f"{folder}: cannot be read"):
        files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    for file in files:
        if file.exists() and not file.is_dir():
            check_regular(file, TOKENIZER_BYTES if file.suffix in TEXT_FILES else None)


def read_generation_config(path: str | Path, config: PreTrainedConfig) -> GenerationConfig:
    """A target's generation_config.json, or the settings in its `config` if there is no such file. Raises UserError for
    a file that does not load, and for special tokens that are not ids."""
    if os.path.isdir(path):
        check_files(Path(path))
    try:
        generation = GenerationConfig.from_pretrained(path)
    except Exception as error:
        if (Path(path) / "generation_config.json").exists():
            raise UserError(f"{path}: generation_config.json does not load ({first_line(error)})") from error
        generation = GenerationConfig.from_model_config(config)
    check_special_tokens(generation, f"{path}: generation config")
    return generation


def check_special_tokens(generation: GenerationConfig, where: str) -> None:
    """Raise UserError that starts with `where` for special tokens that are not ids."""
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = getattr(generation, name)
        if not all(type(token) is int for token in _as_list(value)):  # bool is an int to isinstance
            raise UserError(f"{where}: {name} {value!r} is not a token id")


def generation_eos(path: str | Path, config: PreTrainedConfig) -> list[int]:
    """EOS ids of a target's generation config. Raises UserError (see `read_generation_config`)."""
    # A chat model lists several: the end of a turn and that of a document.
    return _as_list(read_generation_config(path, config).eos_token_id)


def _as_list(ids: Any) -> list[Any]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def local_target(target: str, revision: str | None = None) -> Path:
    """The folder of a target; a hub id is fetched, unless its cache has the files. Raises UserError."""
    check_target_path(target)
    if Path(target).is_dir():
        return Path(target)
    options = {"revision": revision, "ignore_patterns": ORIGINAL_PATTERNS}
    folder = fetched(target, "no model checkpoint", **options, allow_patterns=TARGET_PATTERNS)
    if not any(folder.glob("*.safetensors")):
        folder = fetched(target, "no model checkpoint", **options, allow_patterns="*.bin")
    return folder


def fetched(hub_id: str | Path, problem: str, **options: Any) -> Path:
    """The folder of a repository of the hub. options: of `snapshot_download`. problem: the text of the UserError."""
    try:
        return Path(snapshot_download(str(hub_id), **options))
    except (OSError, HFValidationError) as error:
        raise UserError(f"{hub_id}: {problem} ({first_line(error)})") from error


def position_limit(config: PreTrainedConfig) -> int:
    """Maximum number of positions of a target, including linear or YaRN scaling of its rotary embedding. With linear
    scaling `max_position_embeddings` is the length before it (Vicuna-16k: 4096 * 4). With YaRN it may be either
    length."""
    rope = config.rope_parameters or {}
    positions, factor = config.max_position_embeddings, rope.get("factor", 1.0)
    if rope.get("rope_type") == "linear":
        return int(positions * factor)
    if rope.get("rope_type") == "yarn":
        return max(positions, int(rope.get("original_max_position_embeddings", positions) * factor))
    return positions


@contextmanager
def without_memory(config: PreTrainedConfig) -> Iterator[None]:
    """Build modules from `config` on the meta device. Raises UserError for values that no module can be built from."""
    try:
        with torch.device("meta"):
            yield
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{config.name_or_path}: no model can be built from its config.json ({reason})") from error


def check_target(config: PreTrainedConfig, path: str | Path) -> None:
    """Raise UserError for a target whose cached keys a draft cannot read."""
    if not 1 <= config.num_hidden_layers <= MAX_LAYERS:
        raise UserError(f"{path}: the target has {config.num_hidden_layers} layers; use one with 1 to {MAX_LAYERS}")
    for layer, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type != "full_attention":
            raise UserError(f"{path}: layer {layer} of this target has {layer_type}; the draft needs full_attention")
    # Families differ in what their modules read, which the defaults show; a config keeps other entries as they are.
    own = type(config)()
    window = getattr(config, "sliding_window", None) if hasattr(own, "sliding_window") else None
    if window is not None and not getattr(own, "layer_types", None):
        raise UserError(f"{path}: a target with sliding_window {window}; the draft needs full attention")
    # A fixed scaling is part of the table; cached keys stay valid.
    if (kind := (config.rope_parameters or {}).get("rope_type")) in RESCALED_BY_LENGTH:
        # Its frequencies change with the longest position of a call, so cached keys would not fit later queries.
        raise UserError(
            f"{path}: {kind} rotary scaling is not supported; use a target with a fixed one, such as linear or yarn"
        )


def read_tokenizer(path: str | Path, problem: str) -> Any:
    """The tokenizer of a folder or hub id. Runs no remote code. problem: the message of the UserError on failure."""
    check_target_path(path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises no subclass
        raise UserError(f"{path}: {problem} ({first_line(error)})") from error


def load_tokenizer(target: str, config: PreTrainedConfig, chat_template_kwargs: TemplateArguments = None) -> Any:
    """The target's tokenizer, with `chat_template_kwargs` fixed in its chat template (see `set_template_arguments`).
    Raises UserError if there is none, or if it has more tokens than the target."""
    tokenizer = read_tokenizer(target, "no tokenizer that loads; it must be in the folder of the weights")
    # Added tokens, such as a pad token, may have no embedding as long as no prompt contains them.
    vocab = tokenizer.get_vocab()
    highest = max((vocab[token] for token in vocab.keys() - tokenizer.get_added_vocab().keys()), default=-1)
    if highest >= config.vocab_size:
        raise UserError(
            f"{target}: its tokenizer has token ids up to {highest}, its model only {config.vocab_size} embeddings; "
            "this tokenizer is not the target's"
        )
    set_template_arguments(tokenizer, chat_template_kwargs)
    return tokenizer


def set_template_arguments(tokenizer: Any, arguments: TemplateArguments) -> None:
    """Fix variables of a tokenizer's chat template, such as Qwen3's {"enable_thinking": false}.

    The values become part of the template, so that every use of the tokenizer has them, and a cache that is keyed by
    the template notices a change. Raises UserError for a value that is not a number, text or a boolean, and for a
    variable that the template does not mention.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise UserError(f"chat_template_kwargs: not JSON ({error})") from error
    if not isinstance(arguments, Mapping | None):
        raise UserError('chat_template_kwargs: must be a JSON object, such as {"enable_thinking": false}')

    template = template_text(tokenizer) if arguments else None
    assignments = ""
    for name, value in (arguments or {}).items():
        if template is None or not name.isidentifier() or not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(f"chat_template_kwargs: the target's chat template has no variable {name}")
        if not isinstance(value, bool | int | float | str):
            raise UserError(f"chat_template_kwargs: {name} must be true, false, a number or text, not {value!r}")
        # The assignment comes first in the template and so replaces the variable's default.
        assignments += f"{{% set {name} = {json.dumps(value)} %}}"
    if assignments:
        replace_template(tokenizer, f"{assignments}{template}")
