"""Training with `model.draft_vocabulary`: the list comes from the data, is saved with the draft and stays with it."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_tokenizer import SPECIAL_TOKENS, byte_tokenizer
from training_fixtures import make_target, metrics, single_rank_config, write_texts

from longspec.errors import UserError
from longspec.models.draft_files import list_size, load_draft
from longspec.models.draft_vocabulary import listed_tokens
from longspec.models.llama import LlamaGlide
from longspec.models.target_files import read_config
from longspec.ranks.agreement import Termination
from longspec.train.checkpoint import extract_draft, read_draft
from longspec.train.config_schema import TrainConfig
from longspec.train.inputs import check_list_split
from longspec.train.run import train

pytestmark = pytest.mark.usefixtures("one_rank")
SIZE = 12
STEPS = 8


def configured(work: Path, *overrides: str) -> TrainConfig:
    return single_rank_config(work, f"max_steps={STEPS}", "save_steps=100", "learning_rate=1e-2", *overrides)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    make_target(tmp_path / "target")
    write_texts(tmp_path / "texts.jsonl", count=12)
    write_texts(tmp_path / "held_out.jsonl", count=4, seed=1)
    return tmp_path


def most_frequent_bytes(file: Path) -> list[int]:
    """EOS, then the most frequent bytes of the texts, SIZE in all, ascending."""
    tokenizer = byte_tokenizer()
    counts: Counter[int] = Counter()
    for line in file.read_text().splitlines():
        counts.update(tokenizer(json.loads(line)["text"])["input_ids"])
    assert not set(counts) & set(range(len(SPECIAL_TOKENS)))
    best = sorted(counts, key=lambda token: (-counts[token], token))[: SIZE - 1]
    return sorted([tokenizer.eos_token_id, *best])


@pytest.mark.parametrize(
    "settings", [("loss=ce",), pytest.param(("loss=mixed", "deepspeed=zero3"), marks=pytest.mark.slow)], ids=str
)
def test_a_run_with_a_vocabulary(work: Path, settings: tuple[str, ...]) -> None:
    """The loss falls. The list is that of the data, in the checkpoint, the state, an extracted draft, and the next
    stage, which reads other data."""
    evaluation = (f"evaluation.files={work}/held_out.jsonl", "evaluation.steps=4", "evaluation.rows=2")
    evaluation += ("evaluation.keep_best=true",)
    key = f"model.draft_vocabulary={SIZE}"
    train(configured(work, key, *settings, *evaluation), Termination())
    losses = [line["loss"] for line in metrics(work / "out")]
    assert len(losses) == STEPS and sum(losses[-3:]) < 0.9 * sum(losses[:3])
    last = metrics(work / "out")[-1]
    assert last["eval_acceptance_length"] >= 1 and 0 < last["eval_top1_lag_1"] < 1

    tokens = most_frequent_bytes(work / "texts.jsonl")
    extract_draft(work / "out" / "last_ds", work / "hf", hf=True)
    for name in ("checkpoint-last", "checkpoint-best"):
        assert listed_tokens(load_draft(work / "out" / name)["d2t"]).tolist() == tokens
    saved = load_draft(work / "out" / "checkpoint-last")
    for draft in (read_draft(work / "out" / "last_ds"), load_draft(work / "hf")):
        assert draft.keys() == saved.keys() and all(torch.equal(draft[name], saved[name]) for name in saved)
    pair = LlamaGlide.from_pretrained(work / "target", glide_path=work / "hf")
    assert pair.draft_model.vocabulary is not None and pair.draft_model.vocabulary.tolist() == tokens

    # A resumed run and the next stage take the list from the draft.
    train(configured(work, "resume=latest", f"max_steps={STEPS + 1}", *settings), Termination())
    next_stage = (f"data.files={work}/held_out.jsonl", f"output_dir={work}/next", "max_steps=1")
    draft = f"draft_model_name_or_path={work}/out/checkpoint-last/draft_model_weights.pth"
    train(configured(work, *next_stage, draft, key, *settings), Termination())
    for name in ("out", "next"):
        assert listed_tokens(load_draft(work / name / "checkpoint-last")["d2t"]).tolist() == tokens


def test_contradictions_are_one_line(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*overrides: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            train(configured(work, *overrides), Termination())
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert end.value.code == 2
        return line

    train(configured(work, "model.draft_vocabulary=40", "max_steps=1"), Termination())
    out = work / "out"
    draft = f"draft_model_name_or_path={out}/checkpoint-last/draft_model_weights.pth"
    assert list_size(out / "checkpoint-last") == 40
    for overrides in (("resume=latest",), (draft, f"output_dir={work}/other")):
        line = refusal("model.draft_vocabulary=30", *overrides)
        assert line.startswith("error: config key model.draft_vocabulary: 30, but the draft at ")
        assert line.endswith(" has a list of 40 tokens; omit it")

    vocab = read_config(work / "target").vocab_size
    line = refusal(f"model.draft_vocabulary={vocab}", f"output_dir={work}/other")
    assert f"the target has only {vocab} tokens" in line


def test_every_rank_of_a_split_head_needs_tokens_of_the_list() -> None:
    tokens = torch.tensor([0, 3, 7])
    check_list_split(tokens, 8, 2)
    with pytest.raises(UserError, match=r"tp_size: 4; the draft's vocabulary of 3 tokens has none of rank 2's, 4 … 5"):
        check_list_split(tokens, 8, 4)
