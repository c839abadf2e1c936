"""The pairs that have a name. Importing them loads neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass

from longspec.data.target_format import PUBLISHED_TARGETS
from longspec.models.target_cache import SMOLLM2


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
PAIRS = PUBLISHED_PAIRS | {SMOLLM2: Pair(SMOLLM2, SMOLLM2, None)}
"""The pairs that have a name; the target of smollm2-135m comes from an installed wheel."""
