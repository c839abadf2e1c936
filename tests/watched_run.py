"""Run by the launcher in place of the trainer: the same, and then each rank makes sure that only the draft moved."""

import hashlib

import deepspeed
import torch
from torch import nn

from longspec.train.distributed import Termination
from longspec.train.trainer import Trainer, main

run = Trainer.run


def frozen_bytes(pair: nn.Module) -> str:
    """A digest of the target: all that the pair holds beside the draft, buffers included."""
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
