"""Which target and draft a run uses: the published pairs by name, or any pair by path."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.inference.pairs import PAIRS, PUBLISHED_PAIRS, Pair
from longspec.models.draft_files import DRAFT_FOLDER, resolve_draft
from longspec.models.target_cache import SMOLLM2, SUFFIX, resolve_target
from longspec.models.target_files import read_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
DRAFT_FOLDERS = [Path(__file__).resolve().parents[depth] / "drafts" for depth in (1, 2)]
"""Folders of the embedded drafts: in the package, and in the repository."""
SMOLLM2_DRAFT = "smollm2-135m-instruct"


def embedded_draft(name: str) -> str | None:
    """The folder of a draft that comes with the project; None if it is absent."""
    return next((str(folder / name) for folder in DRAFT_FOLDERS if (folder / name).is_dir()), None)


def choose_pair(model_name: str | None, target: str | None, draft: str | None) -> Pair:
    """The pair that the command's options name; a draft given by path replaces the pair's own.

    The target of the result is a folder or a hub id: GGUF files are converted (see `resolve_target`).
    A published target is the same pair by its hub id as by its name, except that no draft is chosen for it.
    """
    if (model_name is None) == (target is None):
        raise UserError("name the target either by --model_name or by --target PATH (with --draft PATH)")
    if target is not None and draft is None and os.path.isfile(Path(target, DRAFT_FOLDER, "config.json")):
        draft = target  # a folder that a pair's save_pretrained wrote
    if target is not None:
        name = target.rstrip("/").split("/")[-1].removesuffix(SUFFIX)
        published = next((pair for pair in PUBLISHED_PAIRS.values() if pair.target == target), None)
        pair = published or Pair(name, resolve_target(target), None)
        return replace(pair, name=name, draft=draft)
    pair = PAIRS[str(model_name)]
    if pair.name == SMOLLM2:
        pair = replace(pair, target=resolve_target(SMOLLM2), draft=embedded_draft(SMOLLM2_DRAFT))
    return pair if draft is None else replace(pair, draft=draft)


def check_draft_tokenizer(draft: str, target: str, tokenizer: Any) -> None:
    """Raise UserError if a tokenizer lies beside the draft and gives ids another meaning than the target's does."""
    place = resolve_draft(draft)
    folder = place if place.is_dir() else place.parent
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return
    other = read_tokenizer(folder, "the tokenizer of the draft does not load")
    theirs, ours = ({number: token for token, number in one.get_vocab().items()} for one in (other, tokenizer))
    if differing := sorted(number for number in theirs.keys() & ours.keys() if theirs[number] != ours[number]):
        first = differing[0]
        raise UserError(
            f"{draft}: its tokenizer is not the target's: {len(differing)} ids differ, such as {first}, "
            f"{theirs[first]!r} there and {ours[first]!r} in {target}"
        )
