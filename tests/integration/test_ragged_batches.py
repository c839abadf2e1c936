"""The work of ragged batches: prefill reads each prompt once, and rounds read no prefix of finished rows."""

from pathlib import Path
from typing import Any

import pytest
from pairs import make_pair, ragged_prompts, target_greedy

from longspec import generate
from longspec.inference.methods import METHODS
from longspec.kernels.torch.attention import DecodingAttention


@pytest.mark.parametrize("method", METHODS)
def test_rounds_read_no_prefix_of_finished_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Every row ends at its own EOS; afterwards neither verification nor the draft reads its keys."""
    model = make_pair(tmp_path)
    ids, mask, rows = ragged_prompts(40, 12, 25)
    expected = [target_greedy(model, row, 24) for row in rows]
    eos = {expected[0][4], expected[2][11]}
    read: list[list[int]] = []

    def recorded(name: str) -> Any:
        attend = getattr(DecodingAttention, name)

        def wrapper(self: DecodingAttention, *arguments: Any) -> Any:
            lengths = arguments[0] if name == "hybrid" else arguments[3]
            read.append(lengths.tolist())
            return attend(self, *arguments)

        return wrapper

    for name in ("hybrid", "prefix"):
        monkeypatch.setattr(DecodingAttention, name, recorded(name))
    out = generate(
        model, ids, mask, method=method, max_new_tokens=24, eos_token_id=list(eos), tree_shape=(3, 4), gamma=3
    )
    ends = [next((at + 1 for at, token in enumerate(row) if token in eos), 24) for row in expected]
    assert [new.tolist() for new in out.new_tokens] == [row[:end] for row, end in zip(expected, ends, strict=True)]
    assert len(set(out.stats.row_rounds)) > 1, "all rows ended together"
    per_round = len(read) // max(out.stats.row_rounds)
    for row, rounds in enumerate(out.stats.row_rounds):
        lengths = [call[row] for call in read]
        assert all(lengths[: rounds * per_round]) and not any(lengths[rounds * per_round :])
