"""The data pipeline: tokenization, truncation, packing, filtering, caching and errors."""

import json
import logging
import multiprocessing
import os
import signal
import sys
from types import ModuleType

import numpy as np
import psutil
import pyarrow
import pytest
from tiny_tokenizer import VOCAB_SIZE, byte_tokenizer, merging_tokenizer

from longspec.data import lines as data_lines
from longspec.data.aligners import add_id_aligner, common_form_aligner, rename_fields_aligner
from longspec.data.cache import DIGESTS
from longspec.data.collators import Collator
from longspec.data.dataset import build_dataset
from longspec.data.templates import chat_prompt
from longspec.data.tokenization import Tokenize
from longspec.errors import UserError

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id


def build_rows(files, pack=False, num_proc=1, cache_dir=None, **settings):
    """Build a data set with short defaults."""
    defaults = {"tokenizer": TOKENIZER, "eos_token_id": EOS, "vocab_size": 2 * VOCAB_SIZE}
    defaults |= {"family": "llama", "max_length": 200, "chat_format": "published"}
    return build_dataset(files, Tokenize(**{**defaults, **settings}), pack=pack, num_proc=num_proc, cache_dir=cache_dir)


@pytest.fixture
def build(tmp_path):
    """Build a data set from records, raw lines or whole files, with short defaults."""

    def run(*files, **settings):
        paths = [tmp_path / f"file{number}.jsonl" for number in range(len(files))]
        for path, lines in zip(paths, files, strict=True):
            path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return build_rows(paths, **{"cache_dir": str(tmp_path / "cache"), **settings})

    return run


def ids(text):
    return TOKENIZER(text)["input_ids"]


def tokens(rows):
    return [[segment["input_ids"].tolist() for segment in row] for row in rows]


def test_each_record_becomes_its_tokens_and_the_eos(build):
    rows = build([{"text": "abc"}, {"source": "Why?", "target": "So."}, {"prefix": "x =", "suffix": " 1"}])
    prompt = ids(chat_prompt("Why?", "llama", None, "published"))
    assert tokens(rows) == [[[*ids("abc"), EOS]], [[*prompt, *ids("So."), EOS]], [[*ids("x = 1"), EOS]]]
    assert [row[0]["prompt_length"] for row in rows] == [0, len(prompt), 3]
    assert rows[0][0]["input_ids"].dtype == np.int64


PAIRS = [{"article": ["First.", "Second."], "abstract": ["One.", "Two."]}]
ASK = {"article": "Sum up {prompt}"}
PAIRS_TEXT = (
    "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
    "<|im_start|>user\nSum up First.<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n"
    "<|im_start|>user\nSum up Second.<|im_end|>\n<|im_start|>assistant\nTwo.</s>"
)


def test_pairs_in_lists_are_one_conversation_or_a_sample_each(build):
    """All of the conversation is learned. With `answer_only` it would have only its last answer in the loss."""
    settings = {"family": "qwen2", "max_length": 400, "templates": ASK}
    rows = build(PAIRS, **settings)
    assert [[TOKENIZER.decode(ids) for ids in row] for row in tokens(rows)] == [[PAIRS_TEXT]]
    batch = Collator(pad_token_id=0)([rows[0]])
    assert int((batch["labels"] != -100).sum()) == batch["labels"].numel() - 1
    rows = build(PAIRS, **settings, answer_only=True)
    answers = [TOKENIZER.decode(row[0]["input_ids"][row[0]["prompt_length"] :]) for row in rows]
    assert answers == ["One.</s>", "Two.</s>"]
    assert [name.rpartition(":")[2] for number in range(2) for name in rows.ids(number)] == ["1#0", "1#1"]


def test_lists_are_split_once_their_fields_have_their_names(build, caplog):
    aligners = (add_id_aligner(), rename_fields_aligner({"body": "article"}), common_form_aligner())
    caplog.set_level(logging.INFO, logger="longspec")
    records = [{"body": ["a", "b"], "abstract": ["1", "2"]}, {"body": [], "abstract": []}]
    assert len(build(records, family="qwen2", max_length=400, aligners=aligners, answer_only=True)) == 2
    assert "1 with an empty answer or text" in caplog.text, "a record with empty lists must be counted"


def test_the_eos_is_learnt_also_as_pad_token_or_when_given(build):
    """A text that ends with it has it once."""
    rows = build([{"text": "abc"}, {"text": "longer one"}])
    batch = Collator(pad_token_id=EOS)([rows[0], rows[1]])
    assert batch["labels"][0].tolist() == [-100, *ids("bc"), EOS] + [-100] * 7
    assert batch["labels"][1, -1] == EOS
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    rows = build([{"text": "abc"}, {"text": "abc<|im_end|>"}], eos_token_id=end)
    assert tokens(rows) == [[[*ids("abc"), end]]] * 2


def test_a_token_across_prompt_and_answer_is_no_prompt(build):
    """Only tokens that the prompt alone also has count as prompt."""
    row = build([{"prefix": "bba", "suffix": "bb"}], tokenizer=merging_tokenizer())[0]
    assert (row[0]["prompt_length"], len(row[0]["input_ids"])) == (3, 6)


def test_long_text_is_split_into_pieces_or_cut(build):
    """Records with a prompt are cut in any case. A last piece of one token is left out."""
    text = "0123456789" * 2 + "x"
    whole = [*ids(text), EOS]
    split = {"max_length": 8, "overflow": "split"}
    assert [piece for (piece,) in tokens(build([{"text": text}], **split))] == [whole[:8], whole[8:16], whole[16:]]
    assert tokens(build([{"text": text}], max_length=8)) == [[whole[:8]]]
    assert tokens(build([{"text": "01234567"}], **split)) == [[ids("01234567")]]
    (row,) = build([{"prefix": "0123456789", "suffix": "ab"}], **split)
    assert row[0]["input_ids"].tolist() == ids("01234567") and row[0]["prompt_length"] == 8


@pytest.mark.parametrize("overflow", ["split", "truncate"])
def test_a_sample_of_one_token_is_left_out_and_counted(build, caplog, overflow):
    """Nothing predicts its only token, here the EOS that the text already has."""
    caplog.set_level(logging.INFO)
    assert tokens(build([{"text": "</s>"}, {"text": "ab"}], overflow=overflow)) == [[[*ids("ab"), EOS]]]
    assert "1 samples of 3 tokens (left out: 1 with an empty answer" in caplog.text


@pytest.mark.parametrize("cut", [{"finished": False}, {"finish_reason": "length"}, {"is_truncated": True}])
def test_an_answer_that_was_cut_has_no_eos(build, cut):
    """The target did not end there, so the draft must not learn to."""
    whole = {"finished": True, "finish_reason": "stop", "is_truncated": False}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"text": "ab", **cut}, {"text": "ab", **whole}, {"messages": talk, **cut}]
    records += [{"messages": [talk[0], {**talk[1], **cut}]}, {"messages": [talk[0], {**talk[1], **whole}]}]
    found = [row[0] for row in tokens(build(records))]
    assert found[:2] == [ids("ab"), [*ids("ab"), EOS]]
    assert found[2] == found[3] == found[4][:-1] and found[4][-1] == EOS


def test_fields_that_nothing_reads_are_named_once(build, caplog):
    caplog.set_level(logging.INFO)
    records = [{"text": "ab", "topic": "t", "name": "x"}, {"old": "cd", "lang": "en"}]
    build(records, aligners=(rename_fields_aligner({"old": "text"}), common_form_aligner()))
    (line,) = [line for line in caplog.messages if "not read" in line]
    assert line == "fields of the records that are not read: lang, name, topic"


def test_prompts_that_leave_no_room_are_counted_and_left_out(build, caplog):
    records = [{"prefix": "01234567", "suffix": "ab"}, {"prefix": "0123456", "suffix": "ab"}, {"text": " "}]
    for _ in range(2):  # the second time from the cache
        with caplog.at_level(logging.INFO, logger="longspec"):
            rows = build(records, max_length=8, answer_only=True)
        assert tokens(rows) == [[ids("0123456a")]]
        assert "1 samples of 8 tokens" in caplog.text
        assert "1 with an empty answer or text, 1 with a prompt of 8 tokens or more" in caplog.text
        caplog.clear()


def test_packed_rows_hold_every_sample_once(build):
    texts = ["ab" * (number % 30 + 1) for number in range(100)]
    rows = build([{"text": ""}, *({"text": text} for text in texts)], pack=True, max_length=128)
    segments = [segment for row in tokens(rows) for segment in row]
    assert sorted(segments) == sorted([*ids(text), EOS] for text in texts)
    filled = [sum(map(len, row)) for row in tokens(rows)]
    assert max(filled) <= 128 and sum(filled) >= 0.97 * 128 * len(rows)
    assert any(len(row) > 1 for row in rows)


def test_two_processes_give_the_same_rows(build, tmp_path, monkeypatch):
    """The tokenizer is not sent to them, because a large one takes seconds. Its threads in the parent stop no one."""
    monkeypatch.setattr(type(TOKENIZER), "__reduce__", None)  # a call raises TypeError
    monkeypatch.setattr(data_lines, "CHUNK_BYTES", 200)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    ids(["threads", "start"])
    records = [{"text": f"text {number}" * (number % 7)} for number in range(150)]
    one = build(records[:100], records[100:], pack=True, cache_dir=str(tmp_path / "one"))
    call, parent = Tokenize.__call__, os.getpid()
    monkeypatch.setattr(Tokenize, "__call__", lambda *args: os.getpid() != parent and call(*args))
    two = build(records[:100], records[100:], pack=True, cache_dir=str(tmp_path / "two"), num_proc=2)
    assert tokens(one) == tokens(two)
    first, second = (sorted((tmp_path / name).rglob("*.arrow")) for name in ("one", "two"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_processes_do_not_outlive_a_killed_parent(build, monkeypatch, tmp_path):
    """They would wait for its next chunk, with all that they have in memory."""

    def work(*_):
        (tmp_path / f"at-work-{os.getpid()}").touch()
        signal.pause()

    monkeypatch.setattr(Tokenize, "__call__", work)
    monkeypatch.setattr(data_lines, "CHUNK_BYTES", 200)
    records = [[{"text": f"text {number}"} for number in range(999)]]
    parent = multiprocessing.get_context("fork").Process(target=build, args=records, kwargs={"num_proc": 2})
    parent.start()
    while len(list(tmp_path.glob("at-work-*"))) < 2:
        parent.join(0.05)
    workers = psutil.Process(parent.pid).children()
    parent.kill()
    parent.join()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not [worker.kill() for worker in alive]


NOTED = byte_tokenizer()
NOTED.add_tokens(["<note>"])  # to the tokenizer, but not to the target
GOOD = [{"text": "fine"}] * 70


@pytest.mark.parametrize(
    ("files", "settings", "says"),
    [
        ([GOOD, ["", '{"report": "a"}']], {"num_proc": 2}, r"file1\.jsonl, line 2: field 'summary' is missing"),
        *(
            ([[*GOOD, {"text": "a <note>"}]], {"tokenizer": NOTED, "vocab_size": VOCAB_SIZE, "pack": pack}, says)
            for pack in (False, True)
            for says in [rf"file0\.jsonl, line 71: token {VOCAB_SIZE} \('<note>'\) has no embedding"]
        ),
        ([["not JSON"]], {"max_length": 1}, "max_length is 1"),
        ([["", "  "]], {}, r"no record in .*file0\.jsonl: all lines are blank"),
        ([["not JSON"]], {"aligners": (add_id_aligner(),)}, "common_form"),
        ([[{"text": ""}, {"source": "q", "target": "\n"}]], {}, r"file0\.jsonl is usable .*2 with an empty answer"),
    ],
)
def test_bad_records_and_settings_are_one_line(build, files, settings, says):
    with pytest.raises(UserError, match=says) as error:
        build(*files, **settings)
    assert "\n" not in str(error.value)


def test_tokens_come_from_the_cache_unless_something_changed(build, tmp_path, monkeypatch):
    """The cache depends on the content of lines, the tokenizer, settings and aligners, but not on times or paths."""

    def tables():
        return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "longspec").glob("tokens-*")}

    path = tmp_path / "file0.jsonl"
    settings = {"cache_dir": str(tmp_path / "cache")}
    build([{"text": "abc"}])
    first = tables()
    assert len(first) == 1
    build_rows(path, **settings)
    os.utime(path, (1, 1))
    build_rows(path, **settings, num_proc=2)
    elsewhere = byte_tokenizer()
    elsewhere.name_or_path = str(tmp_path)
    build_rows(path, tokenizer=elsewhere, **settings)
    assert tables() == first
    changes = {"max_length": 100, "templates": {"report": "{prompt}"}, "tokenizer": byte_tokenizer(reversed_ids=True)}
    for name, value in [*changes.items(), ("aligners", (add_id_aligner("name"), common_form_aligner()))]:
        build_rows(path, **settings, **{name: value})
    assert len(tables()) == 5
    for code in ("record", "{**record, 'text': 'new'}"):
        module = ModuleType("own")
        module.__file__ = str(tmp_path / "own.py")
        (tmp_path / "own.py").write_text(f"def align(record):\n    return {code}\n")
        exec((tmp_path / "own.py").read_text(), vars(module))
        monkeypatch.setitem(sys.modules, "own", module)
        build_rows(path, **settings, aligners=(module.align, common_form_aligner()))
    assert len(tables()) == 7
    stamp = path.stat().st_mtime_ns
    path.write_text('{"text": "abd"}\n')  # as long as before, and as old
    os.utime(path, ns=(stamp, stamp))
    assert tokens(build_rows(path, **settings)) == [[[*ids("abd"), EOS]]] and len(tables()) == 8


@pytest.mark.parametrize(
    "spoil",
    [lambda path: path.write_bytes(path.read_bytes()[::-1]), os.remove, lambda path: (path.parent / DIGESTS).unlink()],
    ids=["changed", "removed", "unfinished"],
)
def test_a_damaged_cache_is_built_again_and_one_that_cannot_be_written_is_one_line(build, tmp_path, caplog, spoil):
    records = [{"text": f"text {number}"} for number in range(9)]
    before = tokens(build(records))
    (folder,) = (tmp_path / "cache" / "longspec").glob("tokens-*")
    spoil(folder / "tokens.arrow")
    with caplog.at_level(logging.WARNING, logger="longspec"):
        assert tokens(build(records)) == before
        assert tokens(build(records)) == before
    (warning,) = caplog.messages
    assert str(folder) in warning and "it is rebuilt" in warning
    with pytest.raises(UserError, match=r"\.py/longspec: the cached table cannot be written \(.*data\.cache_dir"):
        build(records, cache_dir=__file__)


def test_tokens_stay_on_the_disk(build):
    """Only the lengths of samples are in memory. The 3 MB of tokens are mapped."""
    before = pyarrow.total_allocated_bytes()
    rows = build([{"text": "0123456789" * 2000}] * 40, max_length=30_000)
    table = rows.samples.data
    assert table.nbytes > 3_000_000 and all(file["filename"].endswith(".arrow") for file in rows.samples.cache_files)
    assert pyarrow.total_allocated_bytes() - before < table.nbytes / 20
