"""State of rows in decoding that follows their texts."""

from collections.abc import Sequence

from torch import Tensor


class RowState:
    """State of B rows. Its methods use tensor operations of static shape, so that they can be captured in a CUDA graph.
    Without its own implementation a method passes the call on to `parts`."""

    parts: "Sequence[RowState]" = ()
    reads_hidden: bool = False
    """Whether a proposal reads `TargetCache.newest_hidden`."""
    layer_inputs: tuple[int, ...] = ()
    """Layers of the target whose inputs `feed_prompt` and `feed` get, at the prompt's and at accepted tokens."""

    def reserve(self, capacity: int) -> None:
        """Allocate state for positions 0 ... capacity - 1. The engine calls it before any other method."""
        for part in self.parts:
            part.reserve(capacity)

    def feed_prompt(self, tokens: Tensor, positions: Tensor, valid: Tensor, states: Tensor) -> None:
        """Take a chunk of the prompts, before `start`, if `layer_inputs` has any. Arguments as in `feed`."""
        for part in self.parts:
            part.feed_prompt(tokens, positions, valid, states)

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        """Read the prompts. prompts: LongTensor [B, P], padded on the right; lengths: LongTensor [B]."""
        for part in self.parts:
            part.start(prompts, lengths)

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor, states: Tensor | None = None) -> None:
        """Take accepted tokens at consecutive positions, once each. tokens, positions: LongTensor [B, T]; valid: bool
        [B, T]. states: [B, T, n · hidden], the inputs of the n layers of `layer_inputs` at these tokens; None without
        any."""
        more = () if states is None else (states,)  # a drafter of the user's own need not know the argument
        for part in self.parts:
            part.feed(tokens, positions, valid, *more)

    def row_states(self) -> list[Tensor]:
        """All tensors [B, ...] that hold state of the rows, as views: copying a row of each moves a row's draft."""
        return [state for part in self.parts for state in part.row_states()]
