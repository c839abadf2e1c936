"""Sampling settings: the distribution that generation follows, and random draws from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longspec.kernels.decoding.vocabulary import argmax, first_arrival
from longspec.kernels.decoding.vocabulary import probabilities as softmax
from longspec.kernels.shared.watch import Watch


class Sampler:
    """The distribution of the next token: the argmax at temperature 0, else the softmax after transformers' warpers.

    Draft and target use the same settings. The warpers run in the order of transformers' `generate`.
    """

    def __init__(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        generator: torch.Generator | None = None,
        extra_warpers: Sequence[LogitsProcessor] = (),
    ) -> None:
        """top_k 0 and top_p 1 turn these warpers off. generator: None draws from torch's global generator.

        extra_warpers run after top-p. Each must treat rows independently and ignore the history of tokens.
        """
        self.greedy = temperature == 0
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.extra_warpers = extra_warpers
        self.generator = generator
        self.truncates = top_k > 0 or top_p < 1 or len(extra_warpers) > 0
        """Whether a warper other than the temperature changes the logits."""

        self.warpers = LogitsProcessorList()
        if not self.greedy and temperature != 1:
            self.warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k > 0:
            self.warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self.warpers.append(TopPLogitsWarper(top_p))
        self.warpers += extra_warpers

    def warped(self, logits: Tensor) -> tuple[Tensor, float]:
        """Logits [..., V] after the warpers, and the temperature that is still to be applied to them.

        A temperature alone is not applied here, because the kernels divide by it while they read the logits.
        """
        if not self.truncates:
            return logits, self.temperature
        rows = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        return self.warpers(None, rows).view(logits.shape), 1.0  # type: ignore[arg-type]  # warpers ignore the ids

    def probabilities(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        """Probabilities [B, ..., V], fp32 or wider, of the distribution; logits [B, ..., V].

        Warpers leave NaN and infinity in place, so `watch` still sees them.
        """
        warped, temperature = self.warped(logits)
        return softmax(warped, temperature, watch)

    def choose(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        """One token per distribution, LongTensor [B, ...]: the argmax of logits [B, ..., V] if greedy, else a draw."""
        if self.greedy:
            return argmax(logits, watch)
        return self.draw(self.probabilities(logits, watch))

    def draw(self, weights: Tensor) -> Tensor:
        """Independent draws, LongTensor [...], in proportion to weights [..., V], which need not be normalized."""
        # A race, because torch.multinomial waits for the device and draws its noise in fp32 (see `exponentials`).
        return first_arrival(weights, self.exponentials(weights))

    def coin(self, probability: Tensor) -> Tensor:
        """Independent coin flips, bool [...]: True with `probability` [...]; values of 1 and above are always True."""
        return self.uniforms(probability) < probability

    def uniforms(self, like: Tensor) -> Tensor:
        """Independent uniform numbers in [0, 1), fp64, with the shape and device of `like`."""
        # fp32 uniforms are multiples of 6e-8, too coarse for improbable tokens of a large vocabulary.
        return torch.empty(like.shape, dtype=torch.float64, device=like.device).uniform_(generator=self.generator)

    def exponentials(self, like: Tensor) -> Tensor:
        """Independent exponential numbers of rate 1, fp64, with the shape and device of `like`."""
        # CUDA's fp32 exponentials are never below 6e-8, so tokens of that probability could not win the race in `draw`.
        return torch.empty(like.shape, dtype=torch.float64, device=like.device).exponential_(generator=self.generator)

    def exponentials_by_part(self, like: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """`exponentials` for like [B, N, V], split along N into contiguous parts of `widths`. One launch draws all."""
        batch, _, vocab = like.shape
        parts = self.exponentials(like).flatten().split([batch * width * vocab for width in widths])
        return [part.view(batch, width, vocab) for part, width in zip(parts, widths, strict=True)]
