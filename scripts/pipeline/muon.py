"""Muon for many matrices of few shapes: those of one shape are orthogonalised together.

torch.optim.Muon goes from matrix to matrix, some 25 launches each: 4000 a step for a model of 24 layers. Here it is
some 30 for each shape. (https://kellerjordan.github.io/posts/muon; the rate's adjustment: arXiv 2502.16982, equation 4)
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = 3.4445, -4.7750, 2.0315
STEPS = 5
EPS = 1e-7


class BatchedMuon(Optimizer):
    """What torch.optim.Muon does with Nesterov's momentum and adjust_lr_fn="match_rms_adamw"."""

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": same} for same in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Every matrix must have a gradient."""
        for group in self.param_groups:
            matrices, lr, momentum = group["params"], group["lr"], group["momentum"]
            gradients = torch.stack([matrix.grad for matrix in matrices])
            state = self.state[matrices[0]]
            if not state:
                state["momentum"] = torch.zeros_like(gradients)
            average = state["momentum"].lerp_(gradients, 1 - momentum)
            update = orthogonalised(gradients.lerp_(average, momentum))
            torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
            rate = 0.2 * lr * max(update.shape[1:]) ** 0.5
            torch._foreach_add_(matrices, update.to(matrices[0].dtype).unbind(), alpha=-rate)


def orthogonalised(matrices: Tensor) -> Tensor:
    """[N, rows, columns] with all singular values near 1, bf16, by Newton and Schulz's iteration."""
    a, b, c = COEFFICIENTS
    wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if wide else matrices.mT).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
