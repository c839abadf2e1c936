"""Which target and draft a run uses: the published pairs by name, or any pair by path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig

from longspec.data.target_format import PUBLISHED_TARGETS
from longspec.errors import UserError, first_line
from longspec.models.draft_files import resolve_draft
from longspec.models.glide import GlideMixin
from longspec.models.llama import LlamaGlide
from longspec.models.qwen2 import Qwen2Glide
from longspec.models.target_files import FILE_ERRORS

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
FAMILIES: dict[str, type[GlideMixin]] = {"llama": LlamaGlide, "qwen2": Qwen2Glide}


@dataclass(frozen=True)
class Pair:
    """A target with the draft trained for it; None leaves a value to the target's own files."""

    name: str
    target: str
    """Folder or hub id."""
    draft: str | None
    window: int | None = None
    """Context window in tokens."""
    eos_token_id: int | list[int] | None = None
    """The tokens that end an answer."""
    pad_token_id: int | None = None


def _published(name: str, target: str, window: int) -> Pair:
    draft, ids = "sail/longspec-" + target.split("/")[1], PUBLISHED_TARGETS[target]
    return Pair(name, target, draft, window, ids.eos_token_id, ids.pad_token_id)


PUBLISHED_PAIRS = {
    pair.name: pair
    for pair in (
        _published("vicuna7b", "lmsys/vicuna-7b-v1.5-16k", 16384),
        _published("vicuna13b", "lmsys/vicuna-13b-v1.5-16k", 16384),
        _published("longchat7b", "lmsys/longchat-7b-v1.5-32k", 32768),
        _published("longchat13b", "lmsys/longchat-13b-16k", 16384),
        _published("llama8b", "gradientai/Llama-3-8B-Instruct-262k", 262144),
        _published("qwq", "Qwen/QwQ-32B-Preview", 32768),
    )
}


def choose_pair(model_name: str | None, target: str | None, draft: str | None) -> Pair:
    """The pair that the command's options name; a draft given by path replaces the published one.

    A published target is the same pair by its hub id as by its name, except that no draft is chosen for it.
    """
    if (model_name is None) == (target is None):
        raise UserError("name the target either by --model_name or by --target PATH (with --draft PATH)")
    if target is not None:
        name = target.rstrip("/").split("/")[-1]
        published = next((pair for pair in PUBLISHED_PAIRS.values() if pair.target == target), Pair(name, target, None))
        return replace(published, name=name, draft=draft)
    pair = PUBLISHED_PAIRS[str(model_name)]
    return pair if draft is None else replace(pair, draft=draft)


def family_class(config: PreTrainedConfig, target: str) -> type[GlideMixin]:
    """The model class for a target with `config`; UserError for a family without one."""
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"{target}: a {config.model_type} target; the supported families are {known}")
    return FAMILIES[config.model_type]


def check_draft_tokenizer(draft: str, target: str, tokenizer: Any) -> None:
    """Raise UserError if a tokenizer lies beside the draft and gives ids another meaning than the target's does."""
    place = resolve_draft(draft)
    folder = place if place.is_dir() else place.parent
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return
    try:
        other = AutoTokenizer.from_pretrained(folder)
    except FILE_ERRORS as error:
        raise UserError(f"{folder}: the tokenizer beside the draft does not load ({first_line(error)})") from error
    theirs, ours = ({number: token for token, number in one.get_vocab().items()} for one in (other, tokenizer))
    if differing := sorted(number for number in theirs.keys() & ours.keys() if theirs[number] != ours[number]):
        first = differing[0]
        raise UserError(
            f"{draft}: its tokenizer is not the target's: {len(differing)} ids differ, such as {first}, "
            f"{theirs[first]!r} there and {ours[first]!r} in {target}"
        )
