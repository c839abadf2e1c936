"""The micro-batches of an optimizer step and the engine's arguments for them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspec.kernels.shared.device import upload
from longspec.models.glide import Objective
from longspec.train.config_schema import TrainConfig, VariantConfig
from longspec.train.positions import anchor_offset_positions, contiguous_positions, micro_step_generator, random_lags

Batch = dict[str, Tensor]
"""A collated micro-batch on the host: `input_ids` and `labels`, LongTensor [B, T], and `cu_seqlens`, int32 [M + 1]."""
Arrays = Iterator[dict[str, np.ndarray]]
"""Micro-batches as the loader yields them."""
EngineInputs = dict[str, Any]
"""Arguments of the engine's forward (see `GlideMixin.draft_forward`)."""


def batch_positions(batch: Batch, variant: VariantConfig, max_positions: int, generator: torch.Generator) -> Tensor:
    """Position ids of a micro-batch, LongTensor [B, T] on the host."""
    rows, length = batch["input_ids"].shape
    if variant.name == "base":
        return contiguous_positions(batch["cu_seqlens"], (rows, length))
    return anchor_offset_positions(batch["cu_seqlens"], (rows, length), variant.max_offset, max_positions, generator)


def draw_lags(batch: Batch, draft: Any, variant: VariantConfig, generator: torch.Generator) -> Tensor | None:
    """The lags of a micro-batch's segments in training (see `Draft.training_forward`): LongTensor [M], one per segment;
    [R, M] for a draft that trains R lags at once; None for GLIDE's block pattern."""
    segments = len(batch["cu_seqlens"]) - 1
    if draft.trained_lags is not None:
        return torch.arange(1, draft.trained_lags + 1)[:, None].expand(-1, segments)
    return None if variant.name == "base" else random_lags(segments, variant.depth, generator)


def weighted_sum(results: Sequence[tuple[Tensor, dict[str, Tensor]]], draft: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses and terms at several lags, weighted by the draft's `lag_weights` over their sum."""
    weights = [weight / sum(draft.lag_weights) for weight in draft.lag_weights]
    pairs = list(zip(weights, results, strict=True))
    loss = torch.stack([weight * result for weight, (result, _) in pairs]).sum()
    terms = {name: torch.stack([weight * own[name] for weight, (_, own) in pairs]).sum() for name in results[0][1]}
    return loss, terms


def training_inputs(
    batch: Batch,
    config: TrainConfig,
    max_positions: int,
    draft: Any,
    objective: Objective,
    device: torch.device,
    micro_step: int,
    rank: int,
) -> EngineInputs:
    """The engine's inputs for a micro-batch, with positions and lags drawn for `micro_step` and `rank`."""
    # Positions first, then lags: a resumed run draws them in the same order.
    generator = micro_step_generator(config.seed, micro_step, rank)
    positions = batch_positions(batch, config.variant, max_positions, generator)
    lags = draw_lags(batch, draft, config.variant, generator)
    return engine_inputs(batch, positions, lags, objective, device)


def engine_inputs(
    batch: Batch, positions: Tensor, lags: Tensor | None, objective: Objective, device: torch.device
) -> EngineInputs:
    """The engine's arguments for a micro-batch, with token and position ids on `device`."""
    return {
        # Target and draft read the same position ids.
        "input_ids": upload(batch["input_ids"], device),
        "position_ids": upload(positions, device),
        # The host reads these. A copy back from the device would wait for all kernels that are queued there.
        "labels": batch["labels"],
        "cu_seqlens": batch["cu_seqlens"],
        "lags": lags,
        "objective": objective,
    }
