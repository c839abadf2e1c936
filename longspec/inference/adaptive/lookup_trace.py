"""The rounds that prompt lookup would have played on a text, from the text alone.

Decoding is lossless, so the text does not depend on the plan that is played. The number of tokens that lookup would
have accepted follows from the text, without a single round of lookup.
"""

from __future__ import annotations

from collections.abc import Sequence

from longspec.inference.adaptive.tracked_mean import TrackedMean
from longspec.inference.methods import LONGEST_MATCH


class LookupTrace:
    """One row: its tokens, and the simulated rounds of a lookup chain of each length in `depths`."""

    def __init__(self, depths: Sequence[int], means: Sequence[TrackedMean]) -> None:
        """means: take the number of tokens of each simulated round, one mean per depth."""
        self.tokens: list[int] = []
        self.depths = depths
        self.means = means
        self._latest: dict[tuple[int, ...], int] = {}
        """The latest position at which each sequence of up to LONGEST_MATCH tokens ends, before the newest token."""
        self._chains: list[list[int]] = [[] for _ in depths]
        self._matched = [0] * len(depths)
        """Number of tokens of each chain that the text has followed."""
        self._roots = 0

    def read(self, prompt: Sequence[int]) -> None:
        """Take the next tokens of the prompt."""
        self.tokens.extend(prompt)
        first = max(len(self.tokens) - len(prompt) - LONGEST_MATCH, 0)
        for length in range(1, LONGEST_MATCH + 1):
            # All sequences of this length that end before the newest token. Later ones replace earlier ones.
            starts = (self.tokens[first + back : -1] for back in range(length))
            ends = range(first + length - 1, len(self.tokens))
            self._latest.update(zip(zip(*starts, strict=False), ends, strict=False))

    def extend(self, new_tokens: Sequence[int]) -> None:
        """Take the next tokens of the text after the prompt. The first of them comes from prefill."""
        for token in new_tokens:
            self._index()
            self.tokens.append(token)
            following = None
            for number, chain in enumerate(self._chains):
                matched = self._matched[number]
                if matched < len(chain) and chain[matched] == token:
                    self._matched[number] += 1
                    continue
                # The token is the bonus token of the simulated round, and the root of the next one.
                if self._roots:
                    self.means[number].add(matched + 1)
                following = self._following() if following is None else following
                self._chains[number] = following[: self.depths[number]]
                self._matched[number] = 0
            self._roots += 1

    def _index(self) -> None:
        """Enter the sequences that end at the newest token."""
        end = len(self.tokens)
        for length in range(1, min(LONGEST_MATCH, end) + 1):
            self._latest[tuple(self.tokens[end - length :])] = end - 1

    def _following(self) -> list[int]:
        """The tokens after the longest earlier match of the newest tokens; the latest one among matches of a length."""
        end = len(self.tokens)
        for length in range(min(LONGEST_MATCH, end), 0, -1):
            position = self._latest.get(tuple(self.tokens[end - length :]))
            if position is not None:
                return self.tokens[position + 1 : position + 1 + max(self.depths)]
        return []
