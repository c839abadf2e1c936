"""The trainer, after which each rank checks that only the draft has changed. A run script for the launcher."""

import hashlib

import deepspeed
import torch
from torch import nn

from longspec.ranks.agreement import Termination
from longspec.train.run import main
from longspec.train.trainer import Trainer

run = Trainer.run


def frozen_bytes(pair: nn.Module) -> str:
    """A digest of the target: all parameters and buffers of the pair except the draft's."""
    digest = hashlib.blake2b()
    for name, tensor in (*pair.named_parameters(), *pair.named_buffers()):
        if name.startswith("draft_model."):
            continue
        with deepspeed.zero.GatheredParameters(tensor if isinstance(tensor, nn.Parameter) else []):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def watched(self: Trainer, termination: Termination) -> bool:
    pair = self.engine.module
    before = frozen_bytes(pair)
    finished = run(self, termination)
    if frozen_bytes(pair) != before:
        raise AssertionError("training changed the target")
    for name, parameter in pair.named_parameters():
        drafts = name.startswith("draft_model.")
        if parameter.requires_grad != drafts or (parameter.grad is not None and not drafts):
            raise AssertionError(f"{name}: requires_grad {parameter.requires_grad}, gradient {parameter.grad}")
    return finished


Trainer.run = watched  # type: ignore[method-assign]
main()
