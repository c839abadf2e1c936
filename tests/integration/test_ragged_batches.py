"""The work of ragged batches: prefill reads each prompt once, and rounds read no prefix of finished rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pairs import OPTIONS, make_pair, target_greedy
from torch import Tensor

from longspec import generate
from longspec.inference.engine import intake
from longspec.inference.engine.batch import Batch
from longspec.inference.engine.request_engine import EngineSettings, RequestEngine
from longspec.inference.engine.requests import Request
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.methods import METHODS, Drafting, make_drafter
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY, GREEDY_KIND
from longspec.kernels.torch.attention import SdpaAttention

LENGTHS = [30, 3, 9, 25, 2]


def prompts(lengths: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Token ids and mask, padded on the right, and the rows alone."""
    generator = torch.Generator().manual_seed(len(lengths))
    rows = [torch.randint(1, 61, (n,), generator=generator) for n in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids, mask, rows


def passes_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Rows and tokens of each of the target's passes from now on."""
    passes: list[tuple[int, ...]] = []
    target = Runner.target

    def recorded(self: Runner, ids: Tensor, *others: Any) -> Tensor:
        passes.append(tuple(ids.shape))
        return target(self, ids, *others)

    monkeypatch.setattr(Runner, "target", recorded)
    return passes


def test_prefill_handles_only_rows_that_still_have_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have ended separate groups."""
    model = make_pair(tmp_path)
    monkeypatch.setattr(intake, "PREFILL_TOKENS", 50)
    ids, mask, rows = prompts(LENGTHS)
    with monkeypatch.context() as patch:
        passes = passes_of(patch)
        out = generate(model, ids, mask, method="vanilla", max_new_tokens=1, compile=False)
    assert passes == [(4, 12), (1, 18), (1, 13), (1, 2)]
    rest = generate(model, ids, mask, max_new_tokens=6, tree_shape=(2, 2))
    for row, first, new in zip(rows, out.new_tokens, rest.new_tokens, strict=True):
        assert new.tolist() == target_greedy(model, row, 6)
        assert new[:1].tolist() == first.tolist()


@torch.no_grad()
def test_prefill_of_a_large_batch_goes_group_by_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and draft get the same state as from each prompt alone."""
    lengths = [40] * 9 + [3] * 14 + [1, 2]
    _, _, rows = prompts(lengths)
    model = make_pair(tmp_path, options=OPTIONS["both"])

    def prefilled(rows: list[Tensor]) -> Batch:
        drafting = Drafting("tree", (2, 3))
        settings = EngineSettings(drafting, len(rows), longest=48, compile=False, kinds=(GREEDY_KIND,), details=False)
        engine = RequestEngine(model, replace(settings, together=True))
        for row in rows:
            engine.add(Request(row.tolist(), 8), lambda event: None)
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "play", Mock(side_effect=InterruptedError))
            with pytest.raises(InterruptedError):
                engine.step()
        return engine.batch

    alone = [prefilled([row]) for row in rows]
    monkeypatch.setattr(intake, "PREFILL_TOKENS", 64)
    passes = passes_of(monkeypatch)
    batch = prefilled(rows)
    assert max(count * tokens for count, tokens in passes) <= 64
    assert sum(lengths) <= sum(count * tokens for count, tokens in passes) < 1.1 * sum(lengths)

    for row, single in enumerate(alone):
        cache, own = batch.cache, single.cache
        slots = slice(0, lengths[row])
        draft, own_draft = (made.drafter.draft.cache for made in (batch, single))  # type: ignore[attr-defined]
        assert batch.root[row] == single.root[0] and cache.lengths[row] == own.lengths[0]
        torch.testing.assert_close(cache.newest_hidden[row], own.newest_hidden[0])
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(cache, name)[:, row, :, slots], getattr(own, name)[:, 0, :, slots])
            torch.testing.assert_close(getattr(draft, name)[row], getattr(own_draft, name)[0])


@pytest.mark.parametrize("method", METHODS)
def test_rounds_read_no_prefix_of_finished_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Every row ends at its own EOS; afterwards neither verification nor the draft reads its keys."""
    model = make_pair(tmp_path)
    ids, mask, rows = prompts([40, 12, 25])
    expected = [target_greedy(model, row, 24) for row in rows]
    eos = {expected[0][4], expected[2][11]}
    read: list[list[int]] = []

    def recorded(name: str) -> Any:
        attend = getattr(SdpaAttention, name)

        def wrapper(self: SdpaAttention, *arguments: Any) -> Any:
            lengths = arguments[0] if name == "hybrid" else arguments[3]
            read.append(lengths.tolist())
            return attend(self, *arguments)

        return wrapper

    for name in ("hybrid", "prefix"):
        monkeypatch.setattr(SdpaAttention, name, recorded(name))
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


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_inactive_rows_keep_their_state(tmp_path: Path, method: str) -> None:
    """A row that sits rounds out continues as if these had not been played."""
    model = make_pair(tmp_path, options=OPTIONS["both"])
    ids, _, rows = prompts([20, 31])
    runner = Runner(model)
    engine = StaticBatch(
        runner, make_drafter(Drafting(method, (2, 3), 3), runner, 2, GREEDY), GREEDY, ids, [20, 31], 40
    )
    emitted = [[token] for token in engine.prefill().tolist()]
    for number in range(12):
        active = torch.tensor([number % 3 == 0, number % 4 != 1])
        tokens, counts, *_ = engine.round(active)
        assert (counts > 0).tolist() == active.tolist()
        for row, count in enumerate(counts.tolist()):
            emitted[row] += tokens[row, :count].tolist()
    assert emitted == [target_greedy(model, row, len(new)) for row, new in zip(rows, emitted, strict=True)]
