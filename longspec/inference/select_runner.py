"""The choice between fused passes and transformers' own modules."""

from __future__ import annotations

import logging
from functools import cache

from longspec.inference.fused_runner import FusedRunner
from longspec.inference.runner import Runner, model_backend
from longspec.kernels.shared.device import plain_gpu
from longspec.models.fused import can_fuse
from longspec.models.glide import GlideMixin

logger = logging.getLogger(__name__)


def make_runner(model: GlideMixin, attention: str, compiled: bool) -> Runner:
    """A fused runner if `compiled` is set and device, attention and layers allow it, else a plain one.

    A plain runner on a CUDA device despite `compiled` logs the reason, once.
    """
    backend = model_backend(model, attention)
    device = model.lm_head.weight.device
    if not compiled:
        return Runner(model, backend)
    if device.type == "cuda" and not (backend.capturable and backend.attention.capturable):
        # On such a GPU the choice of the backend has logged the reason already.
        if plain_gpu(device) is None:
            _log_plain(f"{backend.attention.name} attention")
        return Runner(model, backend)
    if not can_fuse(model):
        if device.type == "cuda":
            _log_plain(f"{type(model).__name__} with these layers")
        return Runner(model, backend)
    return FusedRunner(model, backend)


@cache
def _log_plain(reason: str) -> None:
    logger.warning("no CUDA graphs: %s cannot be captured; decoding runs kernel by kernel", reason)
