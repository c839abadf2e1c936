"""Training text written by a target: the same tokens as `generate`, resumable shards, disjoint splits, clean text."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from calls import noted
from pipeline_fixtures import TEMPLATE
from tiny_tokenizer import byte_tokenizer
from training_fixtures import make_target
from transformers import AutoTokenizer

from longspec.data.prompts import PromptFiles, loops, prompt_key, user_turn_marks
from longspec.errors import UserError
from longspec.inference.answering import Listener
from longspec.inference.engine.requests import Tokens
from longspec.inference.pairs import PAIRS, Pair
from longspec.inference.stats import GenerationStats
from longspec.regenerate.command import main
from longspec.regenerate.run import regenerate
from longspec.regenerate.settings import Settings, shard_seed
from longspec.regenerate.shards import SplitShards


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target whose EOS is so likely that answers end at many lengths."""
    folder = make_target(tmp_path_factory.mktemp("target"), eos_token_id=2)
    byte_tokenizer(TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    records: list[dict] = [{"messages": [{"role": "user", "content": f"question {n} " * (n + 1)}]} for n in range(6)]
    records += [{"problem": "what is it?"}, {"prefix": "def f(x):"}, {"document": "news", "summary": "old"}]
    records += [{"prompt": "a meeting\u2028\n\nwho came?"}]
    records += [records[0]]  # a duplicate
    path.write_text("".join(json.dumps({"id": f"r{n}", **record}) + "\n" for n, record in enumerate(records)))
    return path


def settings(target: Path, output: Path, **changes: object) -> Settings:
    values: dict = {"max_new_tokens": 12, "max_turn_tokens": 12, "batch_size": 4, "shard_size": 4} | changes
    return Settings(target=str(target), output_dir=str(output), **values)


def read(path: Path | None) -> list[dict]:
    assert path is not None
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_records_keep_their_prompts_and_say_where_they_come_from(target: Path, questions: Path, tmp_path: Path) -> None:
    written = read(regenerate(settings(target, tmp_path, files=(str(questions),), temperatures=(1.0,))))
    by_source = {record["source_id"]: record for record in written}
    assert len(by_source) == len(written)
    assert {"r0", "r10"} & by_source.keys() != {"r0", "r10"}  # one of the duplicates
    for name, record in by_source.items():
        kinds = {"prefix", "suffix"} if name == "r7" else {"messages"}
        assert kinds <= record.keys() and record["temperature"] == 1.0
        if name == "r9":
            assert record["messages"][0]["content"] == "a meeting\u2028\n\nwho came?"
        if name == "r8":
            assert "news" in record["messages"][0]["content"] and record["messages"][1]["role"] == "assistant"
    facts = (tmp_path / "train.provenance.yaml").read_text()
    assert all(fact in facts for fact in ("target_digest", "questions.jsonl", "transformers", "seed: 0", "dropped"))


def test_the_target_answers_what_a_conversation_asks(tmp_path: Path) -> None:
    """In both namings of the roles, with and without an answer."""
    path, texts = tmp_path / "asked.jsonl", []
    for names in (("role", "content", "user", "assistant"), ("from", "value", "human", "gpt")):
        role, content, user, assistant = names
        turns = [{"role": None, role: user, content: "Q"}, {"role": None, role: assistant, content: "A"}]
        path.write_text("".join(json.dumps({"conversations": one}) + "\n" for one in (turns[:1], turns)))
        texts += [prompt.turns for prompt in PromptFiles(str(path)).read(0, 2, "llama", None, "published", [])]
    assert texts == [[{"role": "user", "content": "Q"}]] * 4


def test_a_lost_shard_is_written_again_as_it_was(target: Path, questions: Path, tmp_path: Path) -> None:
    """A resumed run writes only the missing shards."""
    given = settings(target, tmp_path, files=(str(questions),), top_p=0.99)
    whole = regenerate(given)
    first = Path(str(whole)).read_bytes()
    shards = sorted((tmp_path / "train.shards").glob("shard-*"))
    assert len(shards) == 3
    kept, lost = shards[0].stat().st_mtime_ns, shards[1].read_bytes()
    shards[1].unlink()
    Path(str(whole)).unlink()
    assert Path(str(regenerate(given))).read_bytes() == first
    assert shards[1].read_bytes() == lost and shards[0].stat().st_mtime_ns == kept
    with pytest.raises(UserError, match=r"has shards of a different run \(seed: 0 there, 1 here\)"):
        regenerate(replace(given, seed=1))


def test_the_target_writes_user_turns_that_no_other_split_has(target: Path, tmp_path: Path) -> None:
    assert user_turn_marks(byte_tokenizer(TEMPLATE)) == ("<|im_start|>user\n", "<|im_end|>\n")
    turns = {"count": 16, "max_turn_tokens": 48, "temperatures": (1.0,)}
    train = regenerate(settings(target, tmp_path, **turns))
    test = regenerate(settings(target, tmp_path, **turns, split="test", exclude=(str(train),)))
    keys = [{prompt_key(record) for record in read(path)} for path in (train, test)]
    assert all(keys) and not keys[0] & keys[1]
    for record in read(train):
        assert [turn["role"] for turn in record["messages"]] == ["user", "assistant"]
        assert record["messages"][0]["content"].strip()


def test_no_two_splits_shards_or_uses_share_a_seed(tmp_path: Path) -> None:
    seeds = [
        shard_seed(settings(tmp_path, tmp_path, split=split, seed=seed), shard, use)
        for split in ("train", "validation", "test")
        for seed in (0, 1)
        for shard in range(20)
        for use in ("turns", "answers", "temperatures")
    ]
    assert len(set(seeds)) == len(seeds)


def answer_with(monkeypatch: pytest.MonkeyPatch, *answers: list[list[int]]) -> None:
    """Let the target answer with these token ids: those of its first batch, then of the next one."""
    batches = iter(answers)

    def answer_all(model: Any, drafting: Any, requests: Any, rows: Any, listener: Listener, window: Any) -> None:
        for number, ids in enumerate(next(batches)):
            listener.take(number, Tokens(ids, []))
            listener.finish(number, GenerationStats())

    monkeypatch.setattr("longspec.regenerate.writer.answer_all", answer_all)


def test_an_answer_is_kept_up_to_its_repetition_loop(
    target: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops are told from text even at its end."""
    text, loop = list(range(40, 80)), [50, 51, 52] * 60
    assert not any(map(loops, (list(range(300)), [], [1, 2])))
    assert loops([1, 2, 3] * 20) and loops([*range(300), *[7, 8, 9] * 40])
    answer_with(monkeypatch, [[*text, *loop, 2], text + loop, [*loop, 2], [*text, 2]])
    written = read(regenerate(settings(target, tmp_path, files=(str(questions),), count=4)))
    assert [(record["new_tokens"], record["finished"]) for record in written] == [(46, False), (46, False), (41, True)]
    assert "'answers: loops': 1" in (tmp_path / "train.provenance.yaml").read_text()


def test_a_cut_user_turn_ends_with_its_last_sentence_or_line(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = "Sum 1.5 and 2. Halve it.\n3. Then pri", "a = 1\nb = ", "1 + 1 是几？请", "What is a do"
    cut = byte_tokenizer()(list(texts))["input_ids"]
    answer_with(monkeypatch, cut, [[*cut[3], 2]] * 3)
    written = read(regenerate(settings(target, tmp_path, count=4)))
    expected = ["Sum 1.5 and 2. Halve it.", "a = 1", "1 + 1 是几？"]
    assert [record["messages"][0]["content"] for record in written] == expected
    assert "'user turns: cut off': 1" in (tmp_path / "train.provenance.yaml").read_text()


def test_a_base_model_continues_plain_text(questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The chat format defaults to the target's own, and its files name the one that was used."""
    target = make_target(tmp_path / "base")
    records = read(regenerate(settings(target, tmp_path / "out", files=(str(questions),), temperatures=(1.0,))))
    assert records and "prompts are plain text (chat_format plain)" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "out" / "train.provenance.yaml").read_text())["chat_format"] == "plain"


def test_a_stopped_command_says_how_to_go_on(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole shards stay, of few prompts by default, and the rest is written later as if nothing had happened."""

    def stop(shards: SplitShards, *_: Any) -> None:
        if any(shards.folder.glob("shard-*")):
            os.kill(os.getpid(), signal.SIGINT)

    line = ["--target", str(target), "--count", "200", "--max_new_tokens", "6", "--max_turn_tokens", "48"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        noted(patch, SplitShards, "write", stop)
        main([*line, "--output_dir", str(tmp_path / "stopped")])
    assert end.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err.splitlines()[-1].startswith("stopped by SIGINT; the same command continues")
    assert 1 <= len([*(tmp_path / "stopped" / "train.shards").glob("shard-*-of-00100")]) < 100
    for name in ("stopped", "straight"):
        main([*line, "--output_dir", str(tmp_path / name)])
    assert (tmp_path / "stopped/train.jsonl").read_bytes() == (tmp_path / "straight/train.jsonl").read_bytes()


def test_prompts_with_a_token_that_the_target_lacks_are_left_out(target: Path, tmp_path: Path) -> None:
    """The tokenizer has more tokens than the target has embeddings."""
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    tokenizer = AutoTokenizer.from_pretrained(target)
    embeddings = json.loads((target / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([*(f"<{number}>" for number in range(embeddings - len(tokenizer))), "<note>"])
    tokenizer.save_pretrained(folder)
    asked = tmp_path / "asked.jsonl"
    texts = ["one <note> two", *(f"question {number}" for number in range(12))]
    asked.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    written = read(regenerate(settings(folder, tmp_path, files=(str(asked),))))
    assert {record["messages"][0]["content"] for record in written} <= set(texts[1:])
    assert "'prompts: with a token that has no embedding': 1" in (tmp_path / "train.provenance.yaml").read_text()


def test_bad_input_is_one_line(target: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    plain = tmp_path / "plain.jsonl"
    whole = '{"problem": "p", "solution": "s", "max_tokens": 3}\n'
    for first, second, problem in (
        ("", '{"problem": "p", "max_tokens": 3}', "line 1: field 'max_tokens' is not read"),
        (whole, '{"text": "t"}', "line 2: field 'text' is plain text, without a prompt"),
    ):
        plain.write_text(f"{first}{second}\n")
        with pytest.raises(UserError, match=rf"plain.jsonl, {problem}"):
            PromptFiles(str(plain))
    for options, message in (
        ([], "count: give the number of prompts"),
        (["--count", "3", "--max_prompt_tokens", "9999"], "the target has 4096 positions"),
        (["--count", "3", "--exclude", str(plain)], "line 1: exclude takes files that this command wrote"),
        (["--count", "3", "--method", "tree"], "method: tree needs a trained draft"),
    ):
        assert message in refusal(main, ["--target", str(target), "--output_dir", str(tmp_path / "out"), *options])


@pytest.mark.parametrize(("method", "drafts"), [("auto", True), ("vanilla", False)])
def test_a_named_pair_brings_its_draft_and_shards_of_another_one_are_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, drafts: bool
) -> None:
    draft, first = tmp_path / "draft.pth", tmp_path / "text" / "train.shards" / "shard-00000-of-00002"

    def load(target: str, draft: str | None, **options: object) -> None:
        raise InterruptedError(target, draft)

    monkeypatch.setitem(PAIRS, "some-pair", Pair("some-pair", str(target), str(draft)))
    settings = Settings("some-pair", str(tmp_path / "text"), count=2, shard_size=1, method=method)
    for weight in (0.0, 1.0):  # before its first shard, a run holds nothing that another one would not write
        torch.save({"weight": torch.tensor([weight])}, draft)
        with pytest.raises(InterruptedError) as loaded:
            regenerate(settings, load=load)
    assert loaded.value.args == (str(target), str(draft) if drafts else None)
    first.touch()
    torch.save({"weight": torch.zeros(1)}, draft)
    with pytest.raises(UserError if drafts else InterruptedError, match="draft_digest" if drafts else None):
        regenerate(settings, load=load)


def test_prompts_that_the_chat_template_rejects_are_named_before_any_work_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, path = make_target(tmp_path / "target", eos_token_id=2), tmp_path / "asked.jsonl"
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    byte_tokenizer(template).save_pretrained(target)
    good = {"messages": [{"role": "user", "content": "one"}]}
    bad = {"messages": good["messages"] * 2}
    path.write_text("".join(json.dumps(record) + "\n" for record in [good] * 4 + [bad]))
    line = ["--target", str(target), "--files", str(path), "--shard_size", "2", "--max_new_tokens", "4"]
    main([*line, "--output_dir", str(tmp_path / "out"), "--temperatures", "1"])
    said = capsys.readouterr().out.splitlines()
    assert said[-2].startswith("1 of 5 prompts left out; the first one: ") and "asked.jsonl, line 5: " in said[-2]
    assert "order" in said[-2]
    written = read(tmp_path / "out" / "train.jsonl")
    assert f"train.jsonl: {len(written)} of 5 prompts kept, {5 - len(written)} dropped (" in said[-1]
    assert "prompts: rejected by the chat template 1" in said[-1] and "prompts: duplicates or excluded" in said[-1]

    monkeypatch.setattr("longspec.regenerate.run.load_pair", None)
    path.write_text(json.dumps(bad) + "\n")
    with pytest.raises(SystemExit, match="2"):
        main([*line, "--output_dir", str(tmp_path / "none")])
    assert "asked.jsonl, line 1: " in (error := capsys.readouterr().err) and error.endswith("; no prompt is left\n")


def test_one_run_at_a_time_writes_shards(target: Path, tmp_path: Path) -> None:
    given = settings(target, tmp_path, count=4)
    with SplitShards(given, 4, {"seed": 0}).claimed(), pytest.raises(UserError, match="another run is writing to"):
        regenerate(given)
