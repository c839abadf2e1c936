"""Training with `tp_size=2`: the run that whole targets would give, from its losses to its files."""

import shutil
from pathlib import Path

import pytest
import torch
from training_fixtures import (
    SHARDED,
    TINY,
    equal_drafts,
    error_line,
    launch,
    launched,
    lose_newest,
    make_target,
    overrides_of,
    timeless,
    write_texts,
)

from longspec.models.draft_files import load_draft
from longspec.train.checkpoint import read_draft

pytestmark = pytest.mark.slow
STEPS = 4


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and a target with tied embeddings, which is cut while it is loaded.

    A target that is split before, the base variant and ZeRO-1 are rows of tests/e2e/test_equivalence.py.
    """
    work = tmp_path_factory.mktemp("tied")
    make_target(work / "target", "qwen2", tie_word_embeddings=True)
    write_texts(work / "texts.jsonl")
    return work


def overrides(work: Path, output: str, *more: str) -> list[str]:
    model = ["model=qwen2", "model.torch_dtype=float32", "model.attn_implementation=sdpa", "model.kv_layers=[1]"]
    given = [*model, "model.target_feature=true", *SHARDED, "log_target_loss=true", f"max_steps={STEPS}"]
    return overrides_of(work, work / output, *given, "save_steps=2", *more)


def assert_same_run(one: Path, other: Path) -> None:
    """The same steps up to the rounding of sums in another order, and the same files."""
    for before, after in zip(timeless(one), timeless(other), strict=True):
        assert after == pytest.approx(before, rel=2e-6, abs=1e-7)
    drafts = [load_draft(folder / "checkpoint-last") for folder in (one, other)]
    torch.testing.assert_close(drafts[1], drafts[0], rtol=1e-5, atol=1e-6)
    files = [{str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} for folder in (one, other)]
    assert files[0] == files[1]
    for state in other.rglob("*_model_states.pt"):
        saved = torch.load(state, weights_only=True)["module"]
        assert saved and all(name.startswith("draft_model.") for name in saved), (
            "a rank's part of the target is not saved"
        )


def test_two_ranks_that_share_a_target_are_as_one_and_go_on_exactly(tied: Path) -> None:
    """One rank with the whole target; two that share it; and these again from their older checkpoint, bit for bit."""
    launched(TINY, *overrides(tied, "whole"), ranks=1)
    launched(TINY, *overrides(tied, "shared", "tp_size=2"))
    whole, shared, again = (tied / name for name in ("whole", "shared", "again"))
    assert_same_run(whole, shared)
    draft, extracted = load_draft(shared / "checkpoint-last"), read_draft(shared / "last_ds")
    assert all(torch.equal(extracted[name], weight) for name, weight in draft.items())
    shutil.copytree(shared, again)
    lose_newest(again)
    assert f"steps 3 … {STEPS}" in launched(TINY, *overrides(tied, "again", "tp_size=2", "resume=latest"))
    assert timeless(shared) == timeless(again)
    assert equal_drafts(shared / "checkpoint-last", again / "checkpoint-last")


def test_two_pairs_of_ranks_are_as_two_ranks(tied: Path) -> None:
    """Rows, lags, optimizer state and the loss's mean follow the pairs, of which each trains on its own rows."""
    launched(TINY, *overrides(tied, "two"))
    launched(TINY, *overrides(tied, "pairs", "tp_size=2"), ranks=4)
    assert_same_run(tied / "two", tied / "pairs")


def test_ranks_that_make_no_groups_are_one_line(tied: Path) -> None:
    result = launch(TINY, *overrides(tied, "refused", "tp_size=2"), ranks=1)
    assert "config key tp_size: 1 ranks cannot form groups of 2" in error_line(result)
