"""The training losses by name, and the registration of further ones. This module loads no other library."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspec.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

TokenLoss = Callable[["Tensor", "Tensor | None", "Tensor"], "Tensor"]
"""(draft_logits, target_logits, labels) -> the loss of each token, [N], differentiable in draft_logits.

draft_logits: fp32 (fp64 for an fp64 draft) [N, V], where V is the size of the vocabulary or of the draft's list.
target_logits: those of the target for the same tokens, in the same form, or None. labels: LongTensor [N], the next
tokens as column numbers, -100 for a token that is not in the draft's list.
"""


@dataclass(frozen=True)
class Loss:
    """A training loss."""

    teacher_share: float
    """Weight of the target's distribution, in 0 … 1. The label has the remaining weight."""
    per_token: TokenLoss | None = None
    """The function of a registered loss; None for a built-in one."""


LOSSES = {"ce": Loss(0.0), "distill": Loss(1.0), "mixed": Loss(0.5), "acceptance": Loss(1.0)}
"""The built-in and the registered losses."""


def register_loss(name: str, per_token: TokenLoss, *, reads_target: bool) -> None:
    """Make a loss available as the config key `loss=NAME` in this process.

    per_token: see `TokenLoss`. It is called with the tokens in chunks, and torch differentiates it. reads_target:
    whether it gets the target's logits. Raises UserError for a name that exists.
    """
    if name in LOSSES:
        raise UserError(f"register_loss: there is a loss {name!r}; choose another name")
    LOSSES[name] = Loss(float(reads_target), per_token)
