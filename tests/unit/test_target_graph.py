"""The target's pass as a CUDA graph gives what the plain one gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import FAMILIES, OPTIONS, make_pair

from longspec.kernels.training.segments import Segments
from longspec.models.target_graph import RUNS_BEFORE, TargetGraphs
from longspec.train.loss import DraftLoss


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "loss", "kind"),
    [*((family, "ce", "published") for family in FAMILIES), ("llama", "distill", "kv_layers"), ("llama", "ce", "both")],
)
def test_training_on_captured_passes_is_training(tmp_path: Path, family: str, loss: str, kind: str) -> None:
    """Losses and gradients, step by step, also where the draft reads one pass at several lags, or one begun before. A
    pass that was begun for other tokens is not read."""
    from longspec.models.target_kernels import use_kernels

    model: Any = make_pair(tmp_path, family, torch.bfloat16, options=OPTIONS[kind]).cuda()
    use_kernels(model.model, model.draft_layer_class)
    graphs, generator = TargetGraphs(model.run_target, layer_weights=1), torch.Generator().manual_seed(0)
    objective = DraftLoss(loss)
    for step in range(RUNS_BEFORE + 3):
        tokens = torch.randint(1, 61, (2, 64), generator=generator)
        ids = tokens.cuda()
        borders = torch.tensor([0, 10 + step, 64, 128], dtype=torch.int32)
        positions = torch.cat([torch.arange(int(length)) for length in borders.diff()]).view(2, 64).cuda()
        lags = torch.tensor([[1, 5, 3], [2, 2, 4]]) if step % 2 else torch.tensor([1, 5, 3])
        found = []
        for run in (None, graphs):
            model.target_pass = run
            if run:
                segments = Segments(borders.tolist(), ids.device)
                coming = ids.roll(1, 1) if step == RUNS_BEFORE + 1 else ids
                run.begin(coming, positions, segments, model.needs_whole_pass(objective))
            out = model(ids, position_ids=positions, labels=tokens, cu_seqlens=borders, lags=lags, objective=objective)
            total = sum(one for one, _ in out) if step % 2 else out[0]
            model.draft_model.zero_grad()
            total.backward()
            found.append([total.detach(), *(weight.grad.clone() for weight in model.draft_model.parameters())])
        torch.testing.assert_close(found[1], found[0])
    assert len(graphs.graphs) == 1
