"""Where emitted tokens come from. Importing this module loads no library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Origin = Literal["target", "draft", "lookup"]
"""The source of an emitted token: the target itself (a row's first token and every bonus token), or an accepted
proposal of a draft (GLIDE's, or MagicDec's sparse target) or of prompt lookup. What both propose counts as lookup."""


def round_origins(from_lookup: Sequence[bool]) -> list[Origin]:
    """The origins of a round's tokens: those of its accepted nodes, then that of the bonus token.

    from_lookup: whether each accepted node comes from prompt lookup.
    """
    return [*("lookup" if is_match else "draft" for is_match in from_lookup), "target"]
