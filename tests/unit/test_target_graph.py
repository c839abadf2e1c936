"""The target's pass as a CUDA graph: which passes are captured, and that they give what the plain ones give."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import FAMILIES, OPTIONS, make_pair

from longspec.kernels.training.segments import Segments
from longspec.models.target_graph import RUNS_BEFORE, TargetGraphs
from longspec.models.target_kernels import use_kernels
from longspec.train.loss import DraftLoss

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_captured_pass_is_the_plain_one(tmp_path: Path, family: str) -> None:
    """Whatever tokens, positions and segments come, and in which order."""
    options = OPTIONS["kv_layers"] if family == "llama" else OPTIONS["published"]
    model: Any = make_pair(tmp_path, family, torch.bfloat16, options=options).cuda()
    use_kernels(model.model, model.draft_layer_class)
    passes = TargetGraphs(model.run_target, layer_weights=1)
    generator = torch.Generator().manual_seed(0)
    for number, inner in enumerate(([], [5, 100], [], [1, 2, 127], [63, 65], [])):
        tokens = torch.randint(1, 61, (2, 64), generator=generator).cuda()
        segments = Segments(sorted([0, 64, 128, *inner]), tokens.device)
        positions = (segments.offsets + 100 * number).view(2, 64)
        got = passes(tokens, positions, segments)
        assert len(got[1]) == 1 + len(options.kv_layers)
        torch.testing.assert_close(got, model.run_target(tokens, positions, segments))
    assert len(passes.graphs) == 1


@pytest.mark.parametrize(("loss", "kind"), [("ce", "published"), ("distill", "published"), ("ce", "both")])
def test_training_on_captured_passes_is_training(tmp_path: Path, loss: str, kind: str) -> None:
    """Losses and gradients, step by step, also where the draft reads one pass at several lags, or one begun before,
    or one was begun for other tokens."""
    model: Any = make_pair(tmp_path, "llama", torch.bfloat16, options=OPTIONS[kind]).cuda()
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
                run.begin(ids if step % 3 else ids.flip(0), positions, segments)
            out = model(ids, position_ids=positions, labels=tokens, cu_seqlens=borders, lags=lags, objective=objective)
            total = sum(one for one, _ in out) if step % 2 else out[0]
            model.draft_model.zero_grad()
            total.backward()
            found.append([total.detach(), *(weight.grad.clone() for weight in model.draft_model.parameters())])
        torch.testing.assert_close(found[1], found[0])
    assert len(graphs.graphs) == 1
