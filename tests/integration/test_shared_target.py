"""Decoding with a target that several ranks share: the tokens of one process, and errors that end all ranks."""

import json
import time
from pathlib import Path

import pytest
import torch
from pairs import FAMILIES, make_pair
from shared_target_run import SMALL_WINDOW
from test_command import arguments, lines_of, make_target, write_records
from training_fixtures import run_ranks

from longspec.cli.options import PairOptions
from longspec.cli.pair import SamplingOptions, open_pair
from longspec.longbench.command import main
from longspec.models.draft_layer import PUBLISHED, DraftOptions
from longspec.models.draft_saving import save_draft_file
from longspec.models.target_split import split_target

HEADS = {2: (4, 2), 4: (8, 4)}
"""Query and KV heads of the targets by number of ranks."""


def write_pairs(work: Path, families: tuple[str, ...], ranks: int) -> None:
    """A random pair of each family: the target whole and split, and its draft. Each draft has other options; that of
    Qwen3 has a vocabulary list."""
    heads, kv_heads = HEADS[ranks]
    options = (PUBLISHED, DraftOptions(kv_layers=(0,), mlp_size=24), DraftOptions(target_feature=True), PUBLISHED)
    pairs = {family: (family, drafted) for family, drafted in zip(families, options, strict=False)}
    pairs["fused"] = families[0], DraftOptions(window=SMALL_WINDOW, kv_layers=(0,), target_feature=True)
    for name, (family, drafted) in pairs.items():
        target = work / name / "target"
        layout = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 2}
        model = make_pair(target, family, options=drafted, **layout)
        if family == "qwen3":
            model.draft_model.set_vocabulary(torch.arange(1, model.config.vocab_size, 2))
        save_draft_file(model.draft_model.state_dict(), work / name / "draft.pth", drafted)
        split_target(target, work / name / "split", ranks)


@pytest.mark.parametrize(("ranks", "families"), [(2, FAMILIES), pytest.param(4, ("qwen2",), marks=pytest.mark.slow)])
def test_ranks_that_share_a_target_generate_what_one_process_does(
    ranks: int, families: tuple[str, ...], tmp_path: Path
) -> None:
    """Every method and family, ragged batches whose rows end in different rounds, sampling, and a planted
    disagreement (see tests/shared_target_run.py)."""
    write_pairs(tmp_path, families, ranks)
    ran = run_ranks("tests/shared_target_run.py", str(tmp_path), str(ranks), *families, ranks=ranks)
    assert ran.code == 0, ran.stderr[-4000:]
    assert ran.stdout == f"{6 * len(families) + 7} generations are the same\n"


@pytest.mark.slow
def test_an_evaluation_survives_its_ranks_and_writes_what_one_process_writes(tmp_path: Path) -> None:
    """Rank 1 dies in the second batch; the next launch completes the run. Rank 0 alone prints and writes."""
    target, data = make_target(tmp_path / "target"), write_records(tmp_path / "data", count=9)
    options = ("--max_gen_len", "9", "--batch_size", "1", "--tree_shape", "2", "3")
    alone = tmp_path / "alone"
    main(arguments(target, data, alone, *options))
    expected = [line["token_ids"] for line in lines_of(alone)]
    shared = tmp_path / "shared"
    line = [*arguments(target, data, shared, *options), "--tp_size", "2"]

    def launch(fault: str, *arguments: str) -> tuple[int, str, list[str]]:
        ran = run_ranks("tests/lost_share_run.py", *arguments, FAULT=fault)
        assert "Traceback" not in ran.stderr, ran.stderr[-4000:]
        lines = [line for line in ran.stderr.splitlines() if line.startswith(("error", "stopped", "rank"))]
        return ran.code, ran.stdout, lines

    start = time.monotonic()
    code, _, lines = launch("dies", *line)
    assert code in (1, 9) and lines == ["error: rank 1 is gone, so all ranks that share the target end"]
    assert time.monotonic() - start < 30
    assert [line["token_ids"] for line in lines_of(shared)] == expected[:1]

    code, stdout, lines = launch("", *line)
    assert (code, lines) == (0, [])
    assert stdout.count("9 prompts kept") == stdout.count("written to") == 1
    assert [line["token_ids"] for line in lines_of(shared)] == expected


def test_longspec_generate_answers_on_rank_zero(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    options = ("--model", str(target), "--method", "lookup", "--device", "cpu", "--max_new_tokens", "6")
    ran = run_ranks("longspec/__main__.py", "generate", "x = 1", "y = 22", *options, "--tp_size", "2")
    assert ran.code == 0, ran.stderr[-4000:]
    pair = open_pair(PairOptions(str(target), device="cpu"), "lookup")
    output = pair.generate(pair.encode(["x = 1", "y = 22"]), SamplingOptions(6))
    own = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    expected = [pair.tokenizer.decode(tokens, **own) for tokens in output.new_tokens]
    assert [json.loads(line)["text"] for line in ran.stdout.splitlines()] == expected
