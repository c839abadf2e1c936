"""The target and the draft that a run uses: a pair by name, or any target and draft by path."""

import os
from dataclasses import replace
from pathlib import Path

from longspec.errors import UserError
from longspec.inference.methods import AUTO, GLIDE_METHODS
from longspec.inference.pairs import PAIRS, PUBLISHED_PAIRS, Pair
from longspec.models.draft_files import DRAFT_FOLDER
from longspec.models.packaged_targets import QWEN_CODER, SMOLLM2
from longspec.models.target_cache import SUFFIX, resolve_target

DRAFTS = Path(__file__).resolve().parents[1] / "drafts"
"""Folder of the embedded drafts; in a clone, a link to the repository's `drafts`."""
EMBEDDED_DRAFTS = {SMOLLM2: "smollm2-135m-instruct", QWEN_CODER: "qwen2.5-coder-1.5b-instruct"}
"""Folders in DRAFTS by the names of their targets."""


def choose_pair(name: str | None, draft: str | None = None) -> Pair:
    """A pair by its name, or by the hub id, folder or GGUF file (which is converted) of its target; None for the
    embedded pair. draft: replaces the pair's own; without it, a published target by its hub id has none."""
    if name == "":
        raise UserError("--model: empty; give a pair's name, a folder, a GGUF file or a hub id, or leave it out")
    if draft == "":
        raise UserError("--draft: empty; give a .pth file, a folder or a hub id, or leave it out")
    if name is None or name in PAIRS:
        pair = PAIRS[name or SMOLLM2]
        return replace(pair, target=resolve_target(pair.target), draft=draft or own_draft(pair.name))

    if draft is None and os.path.isfile(Path(name, DRAFT_FOLDER, "config.json")):
        draft = name  # a folder that a pair's save_pretrained wrote
    short = name.rstrip("/").split("/")[-1].removesuffix(SUFFIX)
    for published in PUBLISHED_PAIRS.values():
        if published.target == name:
            return replace(published, name=short, draft=draft)
    return Pair(short, resolve_target(name), draft)


def own_draft(name: str) -> str | None:
    """The draft of the pair of this name; None for another name, and for an embedded draft that is not installed."""
    if name in EMBEDDED_DRAFTS:
        folder = DRAFTS / EMBEDDED_DRAFTS[name]
        return str(folder) if folder.is_dir() else None
    return PAIRS[name].draft if name in PAIRS else None


def draft_in_use(pair: Pair, method: str, given: str | None) -> str | None:
    """The draft that the method takes, or the given one if it takes none. Raises UserError if it needs one."""
    if method in GLIDE_METHODS and pair.draft is None:
        raise UserError(f"method: {method} needs a trained draft of {pair.target}; give its draft, or method lookup")
    return pair.draft if method in (*GLIDE_METHODS, AUTO) else given
