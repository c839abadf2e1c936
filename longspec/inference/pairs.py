"""The pairs that have a name. This module loads neither torch nor transformers."""

from dataclasses import dataclass

from longspec.data.target_format import PUBLISHED_TARGETS
from longspec.models.packaged_targets import PACKAGED


@dataclass(frozen=True)
class Pair:
    """A target and the draft that was trained for it. Where a value is None, the target's own files determine it."""

    name: str
    """Name in results."""
    target: str
    """Folder or hub id."""
    draft: str | None
    """A .pth file, a folder or a hub id; None for a target without a draft."""
    max_positions: int | None = None
    """Context length in tokens."""
    eos_token_id: int | list[int] | None = None
    """The tokens that end an answer."""
    pad_token_id: int | None = None


def _published(name: str, target: str, max_positions: int) -> Pair:
    draft = "sail/longspec-" + target.split("/")[1]
    return Pair(name, target, draft, max_positions, *PUBLISHED_TARGETS[target])


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
PAIRS = PUBLISHED_PAIRS | {name: Pair(name, name, None) for name in PACKAGED}
"""All pairs by name. The targets in PACKAGED come from installed wheels or the hub, their drafts from the project."""
