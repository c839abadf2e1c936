"""A captured start leaves a row's drafter in the state of an eager one, and the other rows as they were."""

from pathlib import Path

import pytest
import torch
from pairs import make_pair

from longspec.inference.engine import prefill
from longspec.inference.engine.batch import Batch
from longspec.inference.fused_runner import make_runner
from longspec.inference.methods import AUTO, Drafting

PROMPTS = {2: 70, 0: 9, 1: 1}
"""Number of prompt tokens by row. Row 2 starts twice, the second time with fewer tokens."""


@torch.no_grad()
@pytest.mark.parametrize(("method", "listed"), [("tree", False), ("lookup", False), (AUTO, True)])
def test_captured_starts_equal_eager_ones(
    method: str, listed: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":  # the static tensors are the same without a graph
        monkeypatch.setattr(prefill, "capture_pass", lambda start, device: start)
    model = make_pair(tmp_path, dtype=torch.bfloat16, hidden_size=128).to(device)
    if listed:
        model.draft_model.set_vocabulary(torch.arange(1, model.config.vocab_size, 2, device=device))
    runner = make_runner(model, "auto", compiled=device == "cuda")
    batches = [Batch(runner, Drafting(method, (2, 3), 2), 3, 512) for _ in range(2)]
    captured, eager = (batch.starter for batch in batches)
    captured.capture()
    assert len(captured._passes) == 3
    generator = torch.Generator().manual_seed(0)
    for row, count in [(2, 90), *PROMPTS.items()]:
        prompt = torch.randint(0, model.config.vocab_size, (1, count), generator=generator).to(device)
        for starter in (captured, eager):
            starter.start(slice(row, row + 1), prompt, [count])
    states = [batch.drafter.row_states() for batch in batches]
    assert states[0] and any(state.any() for state in states[0])
    torch.testing.assert_close(*states, rtol=0, atol=0)
