"""`longspec generate` and `bench` on a tiny pair."""

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from calls import noted
from http_server import TEMPLATE
from pairs import make_pair
from tiny_tokenizer import VOCAB_SIZE, byte_tokenizer
from typer.testing import CliRunner

from longspec.cli import output as console_output
from longspec.cli import pair as pairs
from longspec.cli.app import app
from longspec.data.prompts import PromptFiles
from longspec.data.record_fields import unread_fields
from longspec.errors import UserError
from longspec.inference.adaptive import time_cache
from longspec.inference.detokenizer import printable


def invoke(*arguments: object, code: int = 0, **options: Any) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_lines_are_plain_text_for_readers_of_records(target: Path, tmp_path: Path) -> None:
    """They are the same with and without a chat format, so training names the prompts as not read."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "output.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    invoke("generate", prompts, "--model", target, "--max_new_tokens", 2, "--output", output)
    answers = lines(output)
    assert [unread_fields(line) for line in answers] == [{"index", "run", name} for name in ("prompt", "messages")]
    with pytest.raises(UserError, match=r"line 1: field 'text' is plain text.* remove the field if"):
        PromptFiles(str(output))
    output.write_text("".join(json.dumps({**line, "text": None}) + "\n" for line in answers))
    assert len(PromptFiles(str(output))) == 2


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(target: Path, tmp_path: Path) -> None:
    """With sampling and batches by length; nothing that is written already is generated again."""
    texts, prompts = ["a" * (7 * number % 23 + 1) for number in range(9)], tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{len(text)}", "prompt": text}) + "\n" for text in texts))
    given = ["generate", prompts, "--model", target, "--temperature", 1, "--batch_size", 2, "--max_new_tokens", 6]
    given += ["--method", "lookup"]
    invoke(*given, "--output", tmp_path / "whole.jsonl", "--json", tmp_path / "summary.json")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    answers, asked = lines(tmp_path / "whole.jsonl"), lines(prompts)
    assert [(line["index"], line["id"]) for line in answers] == [(n, line["id"]) for n, line in enumerate(asked)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["answered"] == 9 and summary["new_tokens"] == sum(line["new_tokens"] for line in answers)
    cut = tmp_path / "cut.jsonl"
    for size in (whole.index(b"\n") + 1, len(whole) // 2, len(whole)):
        cut.write_bytes(whole[:size])
        assert invoke(*given, "--output", cut).stdout == f"written to {cut}: 9 of 9 prompts answered\n"
        assert cut.read_bytes() == whole
    for change, before in (("seed", 0), ("gamma", 4), ("max_new_tokens", 6)):
        error = invoke(*given, "--output", cut, f"--{change}", 1, code=1).exception
        assert f"line 1: a line of another run ({change}: {before} there, 1 here); choose" in str(error)
    prompts.write_text(prompts.read_text().replace("p8", "p9"))
    with pytest.raises(UserError, match="line 2: a line of another pair, of other prompts"):
        raise invoke(*given, "--output", cut, code=1).exception
    invoke(*given, "--output", cut, "--overwrite")
    asked = prompts.read_bytes()
    error = invoke(*given, "--output", prompts, "--overwrite", code=1).exception
    assert "is a file of prompts" in str(error) and prompts.read_bytes() == asked
    for other in ("-", "/dev/null", tmp_path):
        error = invoke(*given, "--output", other, code=1).exception
        assert str(error) == f"--output {other}: not a file; leave the option out to write to stdout"
    reads = "the command also reads or writes this file; give another one"
    record = cut.with_name(f"{cut.name}.run")
    for name, problem in ((tmp_path, "a folder; give a file"), (prompts, reads), (record, reads)):
        assert str(invoke(*given, "--output", cut, "--json", name, code=1).exception) == f"--json {name}: {problem}"
    assert lines(cut)[1]["id"] == "p9"


def test_a_prompt_that_cannot_be_read_is_named_before_any_work(target: Path, tmp_path: Path) -> None:
    """For a token added to the tokenizer alone, any error of the chat template, and an argument that is not UTF-8."""
    folder, tokenizer = tmp_path / "target", byte_tokenizer()
    shutil.copytree(target, folder)
    tokenizer.add_tokens(["<note>"])
    asked = tmp_path / "asked.txt"
    asked.write_text("one\n<note>\n")
    for template, problem in (
        (TEMPLATE, f"line 2: token {VOCAB_SIZE} ('<note>') has no embedding"),
        ("{{ 1 + messages[0].content }}", "line 1: the tokenizer's chat template fails on these turns (TypeError"),
    ):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        for command in (
            ["generate", asked, "--model", folder, "--output", tmp_path / "a.jsonl"],
            ["bench", folder, "--prompts", asked, "--png", tmp_path / "b.png"],
        ):
            error = invoke(*command, code=1).exception
            assert isinstance(error, UserError) and f"{asked}, {problem}" in str(error)
    error = invoke("generate", "\udcff", "--model", target, code=1).exception
    assert isinstance(error, UserError) and str(error).startswith("prompt 1: not UTF-8 text")


def test_options_of_the_targets_generation_config(target: Path, tmp_path: Path) -> None:
    """Its penalties apply, unless an option replaces them; what is ignored is named once."""
    folder, tokenizer = tmp_path / "configured", byte_tokenizer()
    shutil.copytree(target, folder)
    # As in Qwen2.5-Instruct, and some that do not apply.
    config = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    config |= {"max_time": 9.0, "min_p": 0.1, "cache_implementation": "static"}
    (folder / "generation_config.json").write_text(json.dumps(config))
    for given, named in (
        (["generate", "hi", "ho", "--batch_size", 1, "--model", folder], "max_time 9.0"),
        (["bench", folder, "--png", tmp_path / "bench.png"], "max_time 9.0, min_p 0.1, repetition_penalty 1.1"),
    ):
        result = invoke(*given, "--max_new_tokens", 3)
        notice = f"{folder}: its generation config sets {named}, which is ignored"
        assert result.stderr.count("generation config") == 1 and notice in result.stderr
    (folder / "generation_config.json").write_text("{}")

    def answer(*options: Any) -> str:
        output = invoke("generate", "hi", "--model", folder, "--max_new_tokens", 4, *options).stdout
        return json.loads(output)["text"]

    plain = answer()
    ids = tokenizer(plain, add_special_tokens=False)["input_ids"]
    banned = {str(token): -100 for token in ids}
    assert set(ids).isdisjoint(tokenizer(answer("--logit_bias", json.dumps(banned)))["input_ids"])
    assert plain[:2] not in answer("--bad_words", json.dumps([plain[:2]]))
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": ids}))
    assert set(ids).isdisjoint(tokenizer(answer())["input_ids"])
    (folder / "generation_config.json").write_text('{"repetition_penalty": 0}')
    error = invoke("generate", "hi", "--model", folder, code=1).exception
    assert isinstance(error, UserError) and str(error).startswith("generation_config.repetition_penalty: 0; ")
    answer("--repetition_penalty", 1)


class TerminalOutput(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_texts_and_a_pipe_gets_json(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["generate", "--model", target, "--max_new_tokens", 3]
    shown = []
    for prompts in (["one\x1b[2J"], ["one", "two"]):
        output = TerminalOutput()
        with monkeypatch.context() as patch:
            stdout = SimpleNamespace(buffer=output)
            patch.setattr(console_output, "sys", SimpleNamespace(stdout=stdout, stderr=sys.stderr))
            invoke(*given, *prompts)
        shown.append(output.getvalue().decode())
    answers = [json.loads(line)["text"] for line in invoke(*given, "one", "two").stdout.splitlines()]
    assert shown[1] == "".join(f"prompt {n}\n{printable(text.strip())} ...\n\n" for n, text in enumerate(answers, 1))
    assert shown[0].endswith(" ...\n") and "{" not in shown[0] and "\x1b" not in shown[0]


def test_the_chat_template_frames_plain_prompts_unless_raw(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = noted(monkeypatch, pairs.LoadedPair, "requests", lambda pair, rows, *_: rows)
    given = ["generate", "-", "--model", target, "--max_new_tokens", 2]
    output = invoke(*given, input="hello\n").stdout
    assert json.loads(output)["prompt"] == "hello" and json.loads(output)["finish_reason"] == "length"
    invoke(*given, "--raw", input="hello\n")
    assert [[byte_tokenizer().decode(ids) for ids in rows] for rows in asked] == [["<user>hello</s><a>"], ["hello"]]


def test_prompts_that_the_target_cannot_take_are_named_or_left_out_and_counted(target: Path, tmp_path: Path) -> None:
    """Too long ones, and those that the chat template rejects."""
    strict = tmp_path / "strict"
    shutil.copytree(target, strict)
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('order') }}{% endif %}" + TEMPLATE
    byte_tokenizer(template).save_pretrained(strict)
    asked = tmp_path / "asked.txt"
    asked.write_text("\n".join(["a", "bad", "b" * 4200, "c", "d"]))
    given = ["generate", asked, "--model", strict, "--temperature", 1, "--batch_size", 2, "--max_new_tokens", 4]
    with pytest.raises(UserError, match=r"asked\.txt, line 2: .*order.*; --skip_invalid leaves such prompts out"):
        raise invoke(*given, code=1).exception
    given.append("--skip_invalid")
    out, summary = tmp_path / "out.jsonl", tmp_path / "summary.json"
    result = invoke(*given, "--output", out, "--json", summary)
    assert "2 of 5 prompts left out; the first one: " in result.stderr
    assert [line["index"] for line in lines(out)] == [0, 3, 4]
    counts = json.loads(summary.read_text())
    assert (counts["prompts"], counts["answered"], counts["left_out"]) == (5, 3, 2)
    assert counts["method"] == ("vanilla" if "cpu" in counts["device"] else "lookup"), "the default above T = 0"
    asked.write_text("bad\n")
    with pytest.raises(UserError, match=r"1 of 1 prompts left out; .*; no prompt is left"):
        raise invoke(*given, code=1).exception


def test_bench_measures_what_the_pair_can_do(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_cache, "user_cache", lambda kind: tmp_path)
    played = noted(monkeypatch, pairs.LoadedPair, "generate", lambda *_, method, **options: method)
    given = ["--max_new_tokens", 3, "--png", tmp_path / "a.png"]
    result = invoke("bench", target, *given)
    summary = json.loads(result.stdout)
    assert list(summary["methods"]) == ["vanilla", "lookup", "auto"] and list(summary["skipped"]) == ["tree"]
    # The warm-ups, then turns at each prompt, because the speed of a device changes.
    assert played == ["vanilla", "lookup", "auto"] * (1 + summary["prompts"])
    assert "tree: skipped" in result.stderr and (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"
    make_pair(tmp_path / "random", vocab_size=VOCAB_SIZE, initializer_range=0.1).save_pretrained(tmp_path / "pair")
    byte_tokenizer().save_pretrained(tmp_path / "pair")
    (tmp_path / "prompts.txt").write_text("the target reads\n")
    monkeypatch.setattr("longspec.cli.picture.draw", Mock(side_effect=UserError("a read-only folder")))
    result = invoke("bench", tmp_path / "pair", "--prompts", tmp_path / "prompts.txt", "--max_new_tokens", 3)
    summary = json.loads(result.stdout)
    assert "no picture: a read-only folder" in result.stderr
    assert list(summary["methods"]) == ["vanilla", "lookup", "tree", "auto"] and not summary["skipped"]
    assert all(row["equal_outputs"] == summary["prompts"] == 1 for row in summary["methods"].values())
