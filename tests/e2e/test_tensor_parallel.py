"""Training with `tp_size=2`: the run that whole targets would give, from its losses to its files."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from training_fixtures import launch, launched, make_target, metrics, write_texts

from longspec.models.draft_files import load_draft
from longspec.train.checkpoint import read_draft

EXPERIMENT = "tiny_glide_stage1_sinkpi-slicing"
SHARDED = ["deepspeed=zero3", "+deepspeed.zero_optimization.stage3_param_persistence_threshold=0"]
EXTENDED = ["model.kv_layers=[1]", "model.target_feature=true"]
STEPS = 4
TIMES = {"seconds", "data_seconds"}


@dataclass(frozen=True)
class Run:
    """A target with tied embeddings, which is cut while it is loaded, and what is launched on it.

    A target that is split before, the base variant and ZeRO-1 are rows of tests/e2e/test_equivalence.py.
    """

    work: Path

    def arguments(self, output: str, shared: bool) -> list[str]:
        given = ["model=qwen2", "model.torch_dtype=float32", "model.attn_implementation=sdpa", *SHARDED, *EXTENDED]
        given += [
            f"model_name_or_path={self.work}/target",
            f"data.files={self.work}/data.jsonl",
            "log_target_loss=true",
        ]
        given += [f"data.cache_dir={self.work}/cache", f"output_dir={self.work}/{output}", *(["tp_size=2"] * shared)]
        return [*given, f"max_steps={STEPS}", "save_steps=2"]

    def launch(self, output: str, ranks: int, shared: bool, *more: str) -> str:
        return launched(EXPERIMENT, *self.arguments(output, shared), *more, ranks=ranks)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    work = tmp_path_factory.mktemp("run")
    make_target(work / "target", "qwen2", tie_word_embeddings=True)
    write_texts(work / "data.jsonl")
    return Run(work)


def assert_same_run(one: Path, other: Path) -> None:
    """The same steps up to the rounding of sums in another order, and the same files."""
    for before, after in zip(metrics(one), metrics(other), strict=True):
        assert before.keys() == after.keys()
        for name in before.keys() - TIMES:
            assert after[name] == pytest.approx(before[name], rel=2e-6, abs=1e-7), name
    drafts = [load_draft(folder / "checkpoint-last") for folder in (one, other)]
    torch.testing.assert_close(drafts[1], drafts[0], rtol=1e-5, atol=1e-6)
    files = [{str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} for folder in (one, other)]
    assert files[0] == files[1]
    for state in other.rglob("*_model_states.pt"):
        saved = torch.load(state, weights_only=True)["module"]
        assert saved and all(name.startswith("draft_model.") for name in saved), (
            "a rank's part of the target is not saved"
        )


@pytest.mark.slow
def test_two_ranks_that_share_a_target_are_as_one_and_go_on_exactly(run: Run) -> None:
    """One rank with the whole target; two that share it; and these again from their older checkpoint, bit for bit."""
    run.launch("whole", 1, False)
    run.launch("shared", 2, True)
    whole, shared, again = (run.work / name for name in ("whole", "shared", "again"))
    assert_same_run(whole, shared)
    draft = load_draft(shared / "checkpoint-last")
    extracted = read_draft(shared / "last_ds")
    assert all(torch.equal(extracted[name], weight) for name, weight in draft.items())
    shutil.copytree(shared, again)
    for newest in ("last_ds", "checkpoint-last"):
        shutil.rmtree(again / newest)
    assert f"steps 3 … {STEPS}" in run.launch("again", 2, True, "resume=latest")
    shown = [
        [{name: value for name, value in line.items() if name not in TIMES} for line in metrics(folder)]
        for folder in (shared, again)
    ]
    assert shown[0] == shown[1]
    resumed = load_draft(again / "checkpoint-last")
    assert all(torch.equal(resumed[name], weight) for name, weight in draft.items())


@pytest.mark.slow
def test_two_pairs_of_ranks_are_as_two_ranks(run: Run) -> None:
    """Rows, lags, optimizer state and the loss's mean follow the pairs, of which each trains on its own rows."""
    run.launch("two", 2, False)
    run.launch("pairs", 4, True)
    assert_same_run(run.work / "two", run.work / "pairs")


@pytest.mark.slow
def test_ranks_that_make_no_groups_are_one_line(run: Run) -> None:
    result = launch(EXPERIMENT, *run.arguments("refused", True), ranks=1)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert result.returncode == 2 and len(errors) == 1, result.stderr[-3000:]
    assert "config key tp_size: 1 ranks cannot form groups of 2" in errors[0]
    assert "Traceback" not in result.stderr
