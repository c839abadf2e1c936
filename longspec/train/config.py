"""Reading the configuration of a training run: from the command line through Hydra, or from a checkpoint."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError

from longspec.errors import UserError
from longspec.models.families import pair_class
from longspec.train.arguments import launch_parser
from longspec.train.config_checks import check
from longspec.train.config_schema import TrainConfig
from longspec.train.recipe import AUTO, AUTO_KEYS, set_auto_values
from longspec.untrusted import read_yaml

SCHEMA = TypeAdapter(TrainConfig)
NO_OPTION = re.compile(r"(?s)Could not find '([^']+)/([^'/]+)'\s+Available options in '\1':\s+(.*?)\s*Config search")


def load_config(argv: Sequence[str], ranks: int | None = None) -> TrainConfig | None:
    """The configuration of the run that the command-line arguments describe, checked.

    With `--cfg job` it is printed, and the result is None. Raises UserError with the full name of a wrong key.
    ranks: their number; None for that of this process's launch.
    """
    args = launch_parser().parse_intermixed_args(argv)
    composed = compose_config(args.config_path, args.config_name, args.overrides)
    if args.cfg:
        _validated(OmegaConf.to_container(composed))
        print(OmegaConf.to_yaml(composed), end="")
        return None
    config = typed_with_auto(composed, ranks)
    # Only what the user typed counts; the experiment file names a draft, too.
    overridden = {override.lstrip("+").partition("=")[0] for override in args.overrides}
    if "model_name_or_path" in overridden and "draft_model_name_or_path" not in overridden and config.saved_config:
        # The checkpoint's own draft takes precedence over the draft that the experiment names.
        config.draft_model_name_or_path = None
    check(config)
    return config


def compose_config(folder: str | Path, name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose `folder`/`name`.yaml with Hydra, without its working folders and log files. Raises UserError."""
    if not Path(folder).is_dir():
        raise UserError(f"config path {folder}: no such folder; run from the repository's root or give its full path")
    if not (Path(folder) / f"{name.removesuffix('.yaml')}.yaml").is_file():
        names = ", ".join(sorted(file.stem for file in Path(folder).glob("*.yaml"))) or "none"
        raise UserError(f"config name {name}: no such experiment in {folder}; there are: {names}")

    def prefixed(text: str) -> str:
        # Some sections take keys of any name. Hydra adds them with `++` alone, and `typed` reports unknown ones.
        key = text.partition("=")[0]
        is_group = "/" in key or "@" in key or (Path(folder) / key).is_dir()
        return text if is_group or text.startswith(("+", "~")) else f"++{text}"

    try:
        with initialize_config_dir(str(Path(folder).absolute()), version_base=None):
            composed = compose(name.removesuffix(".yaml"), overrides=[prefixed(readable(text)) for text in overrides])
            # Not OmegaConf.resolve, whose errors do not name the key.
            values: Any = OmegaConf.to_container(composed, resolve=True)
            return OmegaConf.create(values)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        if found := NO_OPTION.search(str(error)):
            group, value, options = found.groups()
            raise UserError(f"config key {group}: no {value!r}; there are: {', '.join(options.split())}") from error
        key = getattr(error, "full_key", None)
        raise UserError(f"config {f'key {key}' if key else name}: {' '.join(str(error).split())}") from error


def typed_with_auto(composed: DictConfig, ranks: int | None = None) -> TrainConfig:
    """`composed` as a TrainConfig, with values for `auto`. ranks: as of `load_config`. Raises UserError."""
    keys = [key for key in AUTO_KEYS if OmegaConf.select(composed, key) == AUTO]
    for key in keys:
        OmegaConf.update(composed, key, AUTO_KEYS[key], merge=False)
    config = typed(composed)
    set_auto_values(config, keys, ranks)
    return config


def typed(composed: DictConfig | dict[Any, Any]) -> TrainConfig:
    """`composed` as a TrainConfig. Raises UserError for an unknown or missing key or a wrong value."""
    values: Any = composed
    missing: set[str] = set()
    if isinstance(composed, DictConfig):
        values, missing = OmegaConf.to_container(composed, resolve=True), OmegaConf.missing_keys(composed)
    config = _validated(values)
    if missing:
        raise _unset_key(*sorted(missing))
    if isinstance(config, ValidationError):
        raise _key_error(config.errors()[0])
    return config


def _validated(values: Any) -> TrainConfig | ValidationError:
    """The values as a TrainConfig, or what is wrong with them. Raises UserError first of all for an unknown key."""
    try:
        return SCHEMA.validate_python(values)
    except ValidationError as error:
        for problem in error.errors():
            if problem["type"] == "unexpected_keyword_argument":
                raise _unknown_key(_key(problem)) from error
        return error


def _key(problem: Any) -> str:
    return ".".join(map(str, problem["loc"]))


def _key_error(problem: Any) -> UserError:
    """The error for one of pydantic's about a value."""
    if problem["type"] == "missing":
        return _unset_key(_key(problem))
    message = problem["msg"].replace("Input should be", "must be").replace(" or None", " or null")
    return UserError(f"config key {_key(problem)}: {message}, not {problem['input']!r:.80}")


def _unset_key(*keys: str) -> UserError:
    return UserError(f"config key {', '.join(keys)}: not set; give {' '.join(f'{key}=VALUE' for key in keys)}")


def _unknown_key(key: str) -> UserError:
    known = list(_keys(TrainConfig))
    # A known name in the wrong section is more likely than a misspelled one.
    same_name = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    similar = same_name or difflib.get_close_matches(key, known)
    hint = f"did you mean {' or '.join(similar)}?" if similar else "docs/config.md lists all keys"
    return UserError(f"config key {key}: no such key; {hint}")


def _keys(section: type, prefix: str = "") -> Iterator[str]:
    """The full names of all keys of a config class, those of its sections in place of these."""
    for key in fields(section):
        if isinstance(key.type, type) and is_dataclass(key.type):
            yield from _keys(key.type, f"{prefix}{key.name}.")
        else:
            yield prefix + key.name


def read_config_file(file: Path) -> TrainConfig:
    """The configuration of a checkpoint, which need not be trusted: nothing in it is resolved, imported or called.
    Raises UserError if it is not a valid configuration."""
    content = read_yaml(file)
    try:
        config = typed(content)
        pair_class(config.model._target_)
        config.model.draft_options  # noqa: B018 (raises UserError)
    except UserError as error:
        raise UserError(f"{file}: not a readable training configuration ({error})") from error
    return config


def absolute_paths(config: TrainConfig) -> TrainConfig:
    """`config` with absolute local paths, so that the saved configuration is valid in any working directory."""

    def absolute(path: Any) -> Any:
        return str(Path(path).absolute()) if path is not None and Path(path).exists() else path

    held_out = config.evaluation.files
    return replace(
        config,
        data=replace(config.data, files=list(map(absolute, config.data.files))),
        evaluation=replace(config.evaluation, files=held_out and list(map(absolute, held_out))),
        model_name_or_path=absolute(config.model_name_or_path),
        draft_model_name_or_path=absolute(config.draft_model_name_or_path),
    )


def to_yaml(config: TrainConfig) -> str:
    """The whole configuration as YAML, in the schema's order."""
    return OmegaConf.to_yaml(asdict(config))


ELEMENT = re.compile(r"""\s*('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,]*?)\s*(?:,|$)""")
"""An element of a list without nested lists: quoted text, or anything up to a comma."""


def readable(override: str) -> str:
    """`override`, with the values quoted that Hydra does not read, such as paths with = ' [ ] ( ) or ü."""
    key, equals, value = override.partition("=")
    if not equals or _is_read(override):
        return override
    if value.startswith("[") and value.endswith("]"):
        elements = (element for element in ELEMENT.findall(value[1:-1]) if element)
        return f"{key}=[{','.join(one if _is_read(f'{key}={one}') else quoted(one) for one in elements)}]"
    return f"{key}={quoted(value)}"


def _is_read(override: str) -> bool:
    """Whether Hydra reads one value. It reads a path with a comma as values of several runs."""
    try:
        return not OverridesParser.create().parse_override(override).is_choice_sweep()  # type: ignore[no-untyped-call]
    except HydraException:
        return False


def quoted(text: str) -> str:
    """A text as Hydra reads it in an override."""
    return QuotedString(text, Quote.single).with_quotes()
