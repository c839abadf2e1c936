"""Ranks that share a target compute and decode what one process does, and errors end all ranks."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import torch.distributed as dist
from calls import noted
from forked_ranks import exit_code, kill, start_forked
from http_server import printable_pair
from pairs import FAMILIES, make_pair, save_target
from safetensors.torch import load_file, save_file
from shared_target_run import SMALL_WINDOW
from test_command import arguments, lines_of, make_target, write_records
from torch import Tensor, nn
from training_fixtures import free_port, launch_environment, run_ranks, wait_until
from typer.testing import CliRunner

from longspec.cli.app import app
from longspec.inference import methods
from longspec.longbench.command import main
from longspec.models.draft_layer import PUBLISHED, DraftOptions
from longspec.models.draft_saving import save_draft_file
from longspec.models.llama import LlamaGlide
from longspec.models.mistral import MistralGlide
from longspec.models.parallel import head_rows
from longspec.models.qwen2 import Qwen2Glide
from longspec.models.qwen3 import Qwen3Glide
from longspec.models.target_split import split_target
from longspec.train.distributed import keep_drafts_equal, share_targets
from longspec.train.loss import DraftLoss

HEADS = {2: (4, 2), 4: (8, 4)}
"""Query and KV heads of the targets by number of ranks."""


def write_pairs(work: Path, families: tuple[str, ...], ranks: int) -> None:
    """A random pair of each family: target whole and split, and draft. Options differ; one has a vocabulary list."""
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
    assert ran.stdout == f"{6 * len(families) + 8} generations are the same\n"


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
        ran = run_ranks("tests/faulty_replica.py", "evaluate", *arguments, SHARED="1", FAULT=fault)
        assert "Traceback" not in ran.stderr, ran.stderr[-4000:]
        lines = [line for line in ran.stderr.splitlines() if line.startswith(("error", "stopped", "rank"))]
        return ran.code, ran.stdout, lines

    start = time.monotonic()
    code, _, lines = launch("1:2:SIGKILL", *line)
    assert code in (1, -9) and lines == ["error: rank 1 is gone, so all ranks that share the target end"]
    assert time.monotonic() - start < 30
    assert [line["token_ids"] for line in lines_of(shared)] == expected[:1]

    code, stdout, lines = launch("-1:0:none", *line)
    assert (code, lines) == (0, [])
    assert stdout.count("9 prompts kept") == stdout.count("written to") == 1
    assert [line["token_ids"] for line in lines_of(shared)] == expected


def answer(command: str, work: Path, *options: str, temperature: str = "0", ranks: int = 1) -> str:
    """What a command answers to "hi" with the pair in WORK/pair, in this process or on ranks that share the target."""
    out, asked, many = work / f"out-{len(list(work.iterdir()))}", work / "asked.jsonl", command == "regenerate"
    asked.write_text('{"prompt": "hi"}\n')
    files = ["--files", str(asked), "--output_dir", str(out)] if many else [] if command == "chat" else [str(asked)]
    line = [command, "--target" if many else "--model", str(work / "pair"), *files, "--device", "cpu", "--seed", "3"]
    line += ["--max_new_tokens", "9", f"--temperature{'s' * many}", temperature, *options]
    if ranks == 1:
        alone = CliRunner().invoke(app, line, input="hi\n")
        code, stdout, stderr = alone.exit_code, alone.stdout, repr(alone.exception)
    else:
        code, _, stdout, stderr = run_ranks("longspec/__main__.py", *line, "--tp_size", str(ranks), STDIN="hi\n")
    assert code == 0, stderr[-4000:]
    if command == "chat":
        return stdout.split("commands.\n")[1].splitlines()[0]
    record = json.loads((out / "train.jsonl").read_text() if many else stdout)
    return record["messages"][-1]["content"] if many else record["text"]


@pytest.mark.parametrize("command", ["generate", "chat", "regenerate"])
def test_each_command_answers_on_rank_zero_what_one_process_does(command: str, tmp_path: Path) -> None:
    printable_pair(tmp_path / "pair")
    assert answer(command, tmp_path, ranks=2) == answer("generate", tmp_path)


def test_ranks_that_share_a_target_serve_it_until_a_signal(tmp_path: Path) -> None:
    printable_pair(tmp_path / "pair")
    log, port = tmp_path / "log", free_port()
    line = ["serve", str(tmp_path / "pair"), "--device", "cpu", "--tp_size", "2", "--port", str(port)]
    ranks = start_forked("longspec/__main__.py", line, 2, free_port(), launch_environment(), log, log)
    try:
        wait_until(lambda: log.exists() and "listening on" in log.read_text(), log)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0}
        reply = client.chat.completions.create(model=str(tmp_path / "pair"), **asked)
        os.kill(ranks[0].pid, signal.SIGTERM)
        assert exit_code(ranks, 60) == 128 + signal.SIGTERM, log.read_text()
    finally:
        kill(ranks)
    assert reply.choices[0].message.content == answer("generate", tmp_path)


FILTERS = (("--min_p", "1"), ("--epsilon_cutoff", "0.999"), ("--top_k", "1"), ("--top_p", "1e-6"))
"""Each keeps the most probable token alone."""
TREE = ("--method", "tree", "--tree_shape", "2,3", "--tree_rule", "descend", "--tree_nodes", "4", "--lookup_branches")


@pytest.mark.parametrize("command", ["generate", "chat", "regenerate"])
def test_filters_and_tree_options_reach_engines(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printable_pair(tmp_path / "pair")
    greedy = answer(command, tmp_path)
    assert answer(command, tmp_path, temperature="2") != greedy
    assert all(answer(command, tmp_path, *option, temperature="2") == greedy for option in FILTERS)
    drafted = noted(monkeypatch, methods, "make_drafter", lambda drafting, *_: drafting)
    assert answer(command, tmp_path, *TREE) == greedy
    assert set(drafted) == {methods.Drafting("tree", (2, 3), 4, "descend", 4, True)}


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "GQA": (LlamaGlide, {"vocab_size": 61}),
    "tied, MHA, more inputs": (LlamaGlide, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "biases of all products": (LlamaGlide, {"attention_bias": True, "mlp_bias": True}),
    "pad token of the other rank": (Qwen2Glide, {"tie_word_embeddings": True, "pad_token_id": 60}),
    "norms of heads": (Qwen3Glide, {"vocab_size": 62}),
    "Mistral": (MistralGlide, {"head_dim": 6, "tie_word_embeddings": True}),
}
INPUTS = {"tied, MHA, more inputs": {"kv_layers": (1,), "target_feature": True}}
"""Options of the draft."""
LENGTHS = torch.tensor([0, 9, 20, 40], dtype=torch.int32)


def fill_biases(file: Path) -> None:
    """A fresh target's are zero."""
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("bias"):
            weight.normal_(std=0.3)
    save_file(weights, file, metadata={"format": "pt"})


def outcome(model: Any) -> dict[str, Tensor]:
    """The pair's logits, and each objective's terms and gradients with all tokens, some, and none in the loss."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (2, 20), generator=generator)
    positions = torch.cat([torch.arange(int(length)) for length in LENGTHS.diff()]).view(2, 20)
    found = {"logits": model(tokens).logits.detach(), "rows of the head": head_rows(model.lm_head, tokens)}
    some = torch.where(torch.rand(2, 20, generator=generator) < 0.5, tokens, -100)
    for labelled, labels in (("all", tokens), ("some", some), ("none", torch.full_like(tokens, -100))):
        lags = torch.tensor([1, 3, 5])
        for kind, lag, listed in (
            ("ce", None, None),
            ("distill", lags, None),
            ("mixed", None, None),
            ("mixed", lags, torch.arange(0, model.config.vocab_size, 3)),
            ("acceptance", lags, None),
            ("acceptance", None, torch.arange(0, model.config.vocab_size, 3)),
        ):
            model.draft_model.zero_grad()
            objective = DraftLoss(kind, lag is not None, 7 * model.config.vocab_size, listed)
            loss = kind if listed is None else f"{kind}, listed"
            given = {"labels": labels, "position_ids": positions, "cu_seqlens": LENGTHS, "lags": lag}
            total, terms = model(tokens, objective=objective, **given)
            total.backward()
            scores, hits = model(tokens, objective=objective.scores, **given)
            found |= {f"{loss} {labelled} {name}": term for name, term in terms.items()}
            found |= {f"{loss} {labelled} score {name}": term for name, term in scores.items()}
            found[f"{loss} {labelled} hits"] = hits
            for name, weight in model.draft_model.named_parameters():
                found[f"{loss} {labelled} gradient of {name}"] = weight.grad.clone()
    return found


def on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    share_targets(2)
    for name, (glide, _) in CASES.items():
        place = Path(folder) / name
        found = outcome(glide.from_pretrained(place / "split", glide_path=place / "draft.pth", torch_dtype="float64"))
        torch.testing.assert_close(found, torch.load(place / "expected.pt"), rtol=1e-5, atol=1e-6)
    check_gradients_are_averaged(rank)
    dist.destroy_process_group()


def check_gradients_are_averaged(rank: int) -> None:
    """What rounds differently on the two ranks must not make two drafts of one."""
    layer = nn.Linear(3, 1)
    keep_drafts_equal(layer)
    (layer(torch.ones(3)) * (rank + 1)).backward()
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[1.5] * 3]


@pytest.mark.slow
def test_two_ranks_with_halves_are_one_with_the_whole(tmp_path: Path) -> None:
    for name, (glide, layout) in CASES.items():
        place = tmp_path / name
        save_target(place / "target", glide.target_class.config_class.model_type, **layout)
        fill_biases(place / "target" / "model.safetensors")
        split_target(place / "target", place / "split", 2)
        model = glide.from_pretrained(place / "target", torch_dtype="float64", **INPUTS.get(name, {}))
        save_draft_file(model.draft_model.state_dict(), place / "draft.pth", model.draft_model.options)
        torch.save(outcome(model), place / "expected.pt")
    torch.multiprocessing.spawn(on_rank, (str(tmp_path),), nprocs=2)
