"""The optimizer of targets' matrices, all of one shape at once: it does what torch's does one by one."""

import torch
from torch.optim import Muon

from scripts.pipeline.muon import BatchedMuon


def test_matrices_move_as_under_torchs_muon() -> None:
    """Tall, wide and square ones, their gradients of very different sizes, over steps that share a momentum."""
    torch.manual_seed(0)
    shapes = [(24, 24), (24, 24), (8, 24), (48, 24), (24, 48), (24, 48)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(matrix.detach().clone()) for matrix in ours]
    first = [matrix.detach().clone() for matrix in ours]
    optimizers = (
        BatchedMuon(ours, lr=0.02, momentum=0.9),
        Muon(theirs, lr=0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(4):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            pair[0].grad = pair[1].grad = torch.randn(shapes[number]) * 10.0 ** (number - 3)
        for optimizer in optimizers:
            optimizer.step()
    for before, one, other in zip(first, ours, theirs, strict=True):
        moved = (other - before).norm()
        assert moved > 0.1
        assert (one - other).norm() < 0.01 * moved  # bf16 rounds sums of another order otherwise
