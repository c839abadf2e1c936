"""The choice between fused passes and transformers' own modules."""

from __future__ import annotations

import logging
from functools import cache

from longspec.inference.fused_runner import FusedRunner
from longspec.inference.runner import Runner
from longspec.kernels.native.library import runs_native
from longspec.kernels.shared.device import plain_gpu
from longspec.models.fused import can_fuse
from longspec.models.glide import GlideMixin
from longspec.models.native_stream import NativeOperations
from longspec.models.torch_stream import TorchOperations

logger = logging.getLogger(__name__)


def make_runner(model: GlideMixin, attention: str, compiled: bool) -> Runner:
    """A fused runner if `compiled` is set and device, attention and layers allow it, else a plain one.

    A plain runner on a CUDA device despite `compiled` logs the reason, once.
    """
    # The plain runner resolves the attention backend, which decides whether a round can be captured.
    runner = Runner(model, attention)
    if not compiled:
        return runner
    if runner.device.type == "cpu":
        if not can_fuse(model):
            return runner
        operations = NativeOperations if runs_native(runner.device, runner.dtype) else TorchOperations
        return FusedRunner(model, operations(), attention)
    if not runner.attention.capturable:
        # On such a GPU the selection of the backend has logged the reason already.
        if plain_gpu(runner.device) is None:
            _log_plain(f"{runner.attention.name} attention")
        return runner
    if not can_fuse(model):
        _log_plain(f"{type(model).__name__} with these layers")
        return runner

    from longspec.models.triton_stream import TritonOperations  # imports Triton

    return FusedRunner(model, TritonOperations(), attention)


@cache
def _log_plain(reason: str) -> None:
    logger.warning("no CUDA graphs: %s cannot be captured; decoding runs kernel by kernel", reason)
