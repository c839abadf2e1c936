"""However a step's rows are cut over ranks, shards and micro-batches, the draft's training is the same.

Twelve steps of four rows on the same tiny pair and the same order of data, each against one rank with ZeRO-1 in fp32
and the four rows in one micro-batch. The base variant, for lags are drawn for each micro-batch and
rank. Every run goes through tests/watched_run.py: on each rank only the draft has gradients, and not a byte of the
target changes. (The row "fused or plain loss" needs no launcher: tests/unit/test_loss.py.)

In fp32 a setting changes nothing but the order of sums: measured on two CPU cores, 2e-7 of the losses and 5e-7 of
the way from the fresh draft to the last. In bf16 the target, the draft's activations and the weights that are saved
have 8 significant bits (half a unit is 0.2%), only the optimizer's masters 24: measured are 3e-4 of the losses, 5e-3 of
the gradients' norms and 5e-2 of the way. On GPUs, against one of them, the order of sums differs from kernel to kernel.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_fixtures import (
    NEEDS_MUON,
    SHARDED,
    TINY,
    launched,
    make_work,
    metrics,
    overrides_of,
    plain_training,
    tiny_config,
)

from longspec.models.draft_files import load_draft
from longspec.models.target_split import split_target
from longspec.train.engine import build_pair, cosine_with_warmup

pytestmark = pytest.mark.slow
STEPS, ROWS_A_STEP, TEXTS, LEARNING_RATE = 12, 4, 10, 1e-3


@dataclass(frozen=True)
class Setting:
    """A way to cut the same steps; `loss` and `weight` are how far it may be from the reference."""

    name: str
    ranks: int = 1
    micro_batch: int = 4
    accumulation: int = 1
    more: tuple[str, ...] = ()
    target: str = "target"
    device: str = "cpu"
    loss: float = 1e-6  # relative, of each step's loss and of the held-out one
    norm: float = 1e-6  # relative, of each step's gradient
    draft: float = 1e-5  # the distance of the last drafts, as a share of the way from the fresh draft

    @property
    def folder(self) -> str:
        return self.name.replace(" ", "-").replace(",", "").replace("=", "-")

    @property
    def reference(self) -> "Setting":
        """One rank with the same optimizer."""
        return replace(MUON if "optimizer=muon" in self.more else REFERENCE, device=self.device)

    def overrides(self, work: Path) -> list[str]:
        """10 texts, each a row, at 4 a step, so that every third step or so lies across two epochs."""
        given = [f"per_device_train_batch_size={self.micro_batch}"]
        given += [f"gradient_accumulation_steps={self.accumulation}", f"model_name_or_path={work}/{self.target}"]
        given += [f"evaluation.files={work}/held_out.jsonl", "evaluation.rows=3", f"evaluation.steps={STEPS}"]
        given += ["variant=base", "data.pack=false", "data.max_length=512", f"learning_rate={LEARNING_RATE}"]
        given += ["max_grad_norm=0.5", f"save_steps={STEPS // 2}"]
        return overrides_of(work, work / self.folder, *given, *self.more)


REFERENCE = Setting("1 rank, ZeRO-1, fp32, 4 x 1")
TWO_RANKS = Setting("2 ranks", ranks=2, micro_batch=2)
ZERO_3 = Setting("ZeRO-3", ranks=2, micro_batch=1, accumulation=2, more=SHARDED)
TP = Setting("tp_size=2, ZeRO-3", ranks=2, more=("tp_size=2", *SHARDED), target="halves")
IN_BF16: dict[str, Any] = {"more": ("model.torch_dtype=bfloat16",), "loss": 1e-3, "norm": 2e-2, "draft": 0.1}
BF16 = Setting("bf16", **IN_BF16)
IN_MUON: dict[str, Any] = IN_BF16 | {"more": (*IN_BF16["more"], "optimizer=muon", "learning_rate=0.01")}
MUON = Setting("1 rank, muon", **IN_MUON)
TWO_MUON_RANKS = Setting("2 ranks, muon", ranks=2, micro_batch=2, **IN_MUON)
IN_FP32 = [
    Setting("accumulation 1 x 4", micro_batch=1, accumulation=4),
    TWO_RANKS,
    Setting("ZeRO-2", ranks=2, micro_batch=1, accumulation=2, more=("deepspeed=zero2",)),
    ZERO_3,
    TP,
    Setting("4 ranks, tp_size=2", ranks=4, micro_batch=2, more=("tp_size=2",), target="halves"),
]
FOUR_RANKS = [
    Setting("4 ranks", ranks=4, micro_batch=1),
    Setting("4 ranks, ZeRO-3", ranks=4, micro_batch=1, more=SHARDED),
]
ROUNDED = [BF16, Setting("accumulation 1 x 4, muon", micro_batch=1, accumulation=4, **IN_MUON), TWO_MUON_RANKS]
ON_GPUS = [replace(one, device="cuda", loss=1e-5, norm=1e-4, draft=1e-3) for one in (*IN_FP32, *FOUR_RANKS)]
ON_GPUS += [replace(one, device="cuda") for one in ROUNDED]
RESUMED = [
    (REFERENCE, ZERO_3),
    (TWO_RANKS, REFERENCE),
    (ZERO_3, TWO_RANKS),
    (TP, TP),
    (BF16, replace(TWO_RANKS, name="2 ranks, bf16", **IN_BF16)),
    (MUON, TWO_MUON_RANKS),
]


def cases(settings: list[Any]) -> list[Any]:
    """Parameters of a test; those with Muon need a DeepSpeed that has it."""
    return [pytest.param(one, marks=[NEEDS_MUON] if "muon" in str(one) else [], id=names(one)) for one in settings]


def names(settings: Setting | tuple[Setting, ...]) -> str:
    return settings.name if isinstance(settings, Setting) else ", then ".join(one.name for one in settings)


def prepare(work: Path, reference: Setting) -> Path:
    """Target, texts, and the reference run, whose length is told in epochs: ceil(4.7 epochs · 10 rows / 4) steps."""
    make_work(work, texts=TEXTS, held_out=3)
    split_target(work / "target", work / "halves", 2)
    train(work, reference, "num_train_epochs=4.7")
    return work


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("equivalence"), REFERENCE)


@pytest.fixture(scope="module")
def gpu_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("equivalence_on_gpus"), replace(REFERENCE, device="cuda"))


def train(work: Path, setting: Setting, *more: str) -> Path:
    """Launch the run, unless a test before has; its output folder."""
    output = work / setting.folder
    if not output.exists() or "resume=latest" in more:
        line = [*setting.overrides(work), *more]
        launched(TINY, *line, ranks=setting.ranks, script="tests/watched_run.py", device=setting.device)
    return output


def assert_same_curve(work: Path, setting: Setting) -> None:
    """The same steps; and losses, gradient norms, held-out loss and last draft that differ by rounding alone."""
    train(work, setting.reference, f"max_steps={STEPS}")
    output = train(work, setting, f"max_steps={STEPS}")
    ours, wanted = metrics(output), metrics(work / setting.reference.folder)
    for name in ("step", "lr", "tokens", "epoch"):
        assert [line[name] for line in ours] == [line[name] for line in wanted], name
    for name, tolerance in (("loss", setting.loss), ("grad_norm", setting.norm)):
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in wanted], rel=tolerance), name
    assert ours[-1]["eval_loss"] == pytest.approx(wanted[-1]["eval_loss"], rel=setting.loss)
    assert share_of_the_way(work, load_draft(output / "checkpoint-last"), setting.reference) < setting.draft
    for state in output.rglob("*_model_states.pt"):
        saved = torch.load(state, weights_only=False)["module"]
        assert saved and all(name.startswith("draft_model.") for name in saved), "the frozen target is not saved"


@pytest.mark.parametrize("setting", cases([*IN_FP32, *ROUNDED]))
def test_same_curve(work: Path, setting: Setting) -> None:
    assert_same_curve(work, setting)


@pytest.mark.gpu
@pytest.mark.parametrize("setting", cases(ON_GPUS))
def test_same_curve_on_gpus(gpu_work: Path, setting: Setting) -> None:
    """Over NCCL, and with CUDA's kernels; a setting of more ranks than there are GPUs is skipped."""
    if setting.ranks > torch.cuda.device_count():
        pytest.skip(f"needs {setting.ranks} GPUs")
    assert_same_curve(gpu_work, setting)


@pytest.mark.parametrize("settings", cases(RESUMED))
def test_same_curve_when_half_way_the_ranks_are_others(work: Path, settings: tuple[Setting, Setting]) -> None:
    """Six steps cut in one way, six in another: optimizer state and all, as if nothing had changed."""
    before, after = settings
    straight = train(work, before, f"max_steps={STEPS}")
    changed = replace(after, name=f"{before.folder} then {after.folder}")
    output = shutil.copytree(straight, work / changed.folder)
    for newest in ("last_ds", "checkpoint-last"):
        shutil.rmtree(output / newest)
    train(work, changed, f"max_steps={STEPS}", "resume=latest")
    assert_same_curve(work, changed)


def share_of_the_way(work: Path, draft: dict[str, Tensor], reference: Setting) -> float:
    """How far `draft` is from the reference's, over how far that is from the fresh one."""
    wanted = load_draft(work / reference.folder / "checkpoint-last")
    return distance(draft, wanted) / distance(fresh_draft(work), wanted)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Euclidean, over all weights."""
    assert one.keys() == other.keys()
    return float(sum((weight.double() - other[name].double()).square().sum() for name, weight in one.items()) ** 0.5)


def fresh_draft(work: Path) -> dict[str, Tensor]:
    pair: Any = build_pair(tiny_config(*REFERENCE.overrides(work)), None)
    return pair.draft_model.state_dict()


@pytest.mark.parametrize("reference", cases([REFERENCE, MUON]))
def test_reference_is_plain_training(work: Path, reference: Setting) -> None:
    """A plain loop in torch, in fp32: the whole logits' cross-entropy, torch's optimizers and clipping, no engine."""
    output = train(work, reference, f"max_steps={STEPS}")
    config = tiny_config(*reference.overrides(work))
    config = replace(config, model=replace(config.model, torch_dtype="float32"))
    losses, weights = plain_training(config, STEPS, ranks=1)
    assert [line["loss"] for line in metrics(output)] == pytest.approx(losses, rel=reference.loss)
    assert share_of_the_way(work, weights, reference) < reference.draft


def test_reference_steps_and_learning_rates_are_exact(work: Path) -> None:
    """4.7 epochs of 10 rows at 4 a step end with the step that completes them; the cosine has that length."""
    lines, factor = metrics(work / REFERENCE.folder), cosine_with_warmup(STEPS, 0.1)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["lr"] for line in lines] == [LEARNING_RATE * factor(step) for step in range(STEPS)]
    assert [line["epoch"] for line in lines] == [step * ROWS_A_STEP / TEXTS for step in range(1, STEPS + 1)]
    assert max(line["grad_norm"] for line in lines) > 0.5, "the clipping must be at work"


def test_every_weight_of_the_draft_is_trained(work: Path) -> None:
    trained = load_draft(work / REFERENCE.folder / "checkpoint-last")
    assert not [name for name, weight in fresh_draft(work).items() if torch.equal(weight, trained[name])]
