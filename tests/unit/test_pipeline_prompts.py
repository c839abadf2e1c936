"""Prompts of `longspec draft`: lengths in tokens, wording, disjoint splits, bounded search for code."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from pipeline_fixtures import make_chat_target, write_text_folder
from tiny_tokenizer import VOCAB_SIZE

from longspec.data.dataset import build_dataset
from longspec.data.tokenization import Tokenize
from longspec.errors import UserError
from longspec.longbench.tasks import TASKS
from longspec.pipeline import prompts, sources
from longspec.pipeline.files import answers_file, read_jsonl
from longspec.pipeline.prompts import Makers, write_group, write_prompts
from longspec.pipeline.settings import CodeSettings, load_settings
from longspec.pipeline.sources import SourceFile, Texts, read_code, read_own, read_texts, sample_files, split_of
from longspec.pipeline.target import CHAT_FORMAT, TargetText
from longspec.regenerate.settings import SPLITS

FOLDERS = ("benchmarks", "documents")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetText:
    return TargetText.load(str(make_chat_target(tmp_path_factory.mktemp("target"))))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_folder(tmp_path_factory.mktemp("texts") / "texts")


def code_files(count: int) -> list[SourceFile]:
    choice = random.Random(1)
    lines = [f"value_{n} = compute({choice.randint(1, 999)})  # {n}\n" for n in range(200)]
    return [SourceFile("pkg", f"pkg/file{n}.py", "".join(choice.sample(lines, 200))) for n in range(count)]


@pytest.mark.parametrize("task", ["lcc", "repobench-p", "qmsum", "gsm8k", "chat", "edit", "quote"])
@pytest.mark.parametrize("length", [800, 1600])
def test_prompts_have_the_requested_length(target: TargetText, texts: Path, task: str, length: int) -> None:
    yes = {"role": "assistant", "content": "yes " * 15}
    chats = [[{"role": "user", "content": f"{n} " * 20}, yes] for n in range(20)]
    own = replace(read_texts(str(texts), None, "train"), code=code_files(6), chats=chats)
    makers = Makers(target, own, "train")
    records = list(makers.records(task, [length] * 6, random.Random(0)))
    assert len(records) == 6 and len({record["id"] for record in records}) == 6
    for record in records:
        assert 0.8 * length <= len(target.prompt_ids(record)) <= length
        assert ("prefix" in record) == (task in ("lcc", "repobench-p")), "code is continued without a chat"


def test_prompts_that_are_skipped_are_counted_with_the_reason(
    target: TargetText, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    makers = Makers(target, Texts(code=code_files(1)), "test")
    for group, reason in (("lcc-short", "no text is long"), ("qmsum", "config key benchmarks: no text of this split")):
        write_group(makers, group, [99_999] * 3, 0, tmp_path / "group.jsonl")
        assert f"prompts, test, {group}: 0, 3 skipped ({reason}" in capsys.readouterr().out


def test_prompts_have_the_benchmark_wording(target: TargetText, texts: Path) -> None:
    makers = Makers(target, replace(read_texts(str(texts), None, "test"), code=code_files(3)), "test")
    (code,) = makers.records("lcc", [600], random.Random(0))
    before, after = TASKS["lcc"].prompt.split("{context}")
    assert code["prefix"].startswith(before) and code["prefix"].endswith(after)
    assert code["prefix"].removesuffix(after).endswith("\n"), "the code ends with a whole line"
    (meeting,) = makers.records("qmsum", [900], random.Random(0))
    assert meeting["messages"][0]["content"].endswith("Query: who?\nAnswer:")
    (question,) = makers.records("gsm8k", [0], random.Random(0))
    assert question["messages"][0]["content"].startswith("test ")


def test_splits_of_texts_share_nothing_and_a_record_without_its_field_is_one_line(texts: Path, tmp_path: Path) -> None:
    by_split = [read_texts(str(texts), None, split) for split in SPLITS]
    for attribute in ("questions", "meetings"):
        sets = [set(map(str, getattr(split, attribute))) for split in by_split]
        assert all(sets) and not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])
    assert [len(split.problems) for split in by_split] == [0, 0, 1]
    assert not read_texts(None, None, "test").questions
    (tmp_path / "gsm8k_train.jsonl").write_text('{"source": "1 + 1?", "target": "2"}\n{"source": "2 + 2?"}\n')
    with pytest.raises(UserError, match=r"gsm8k_train.jsonl, line 2: field 'target' must be a string"):
        read_texts(str(tmp_path), None, "train")


def write_packages(folder: Path) -> tuple[list[str], str]:
    """Write 40 packages of five files and a test. Returns their names, and the one with a copy of a held-out file."""
    body = "".join(f"def function_number_{n}(argument): return argument * {n}\n" for n in range(60))
    names = [f"package{number}" for number in range(40)]
    for name in names:
        (folder / name / "tests").mkdir(parents=True)
        (folder / name / "tests" / "skipped.py").write_text(body)
        for number in range(5):
            (folder / name / f"m{number}.py").write_text(body.replace("function", f"{name}_{number}"))
    held_out = next(name for name in names if split_of(name) == "test")
    fork = next(name for name in names if split_of(name) == "train")
    (folder / fork / "m0.py").write_text("# a fork\n" + (folder / held_out / "m0.py").read_text())
    return names, fork


def test_packages_are_split_by_name_and_forks_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, fork = write_packages(tmp_path)
    paths = dict.fromkeys(("stdlib", "purelib", "platlib"), tmp_path)
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: paths)
    files = read_code(CodeSettings(), 0)
    assert all(file.package in names and split_of(file.package) == split for split in SPLITS for file in files[split])
    assert all(files.values()) and not any("skipped" in file.path for split in SPLITS for file in files[split])
    assert f"{fork}/m0.py" not in [file.path for file in files["train"]]
    assert f"{fork}/m1.py" in [file.path for file in files["train"]]
    assert len(sample_files(tmp_path / fork, CodeSettings(files_per_package=2), random.Random(0))) == 2


def test_the_trainer_reads_source_files_of_the_training_packages(
    target: TargetText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in random order, none that is held out or a copy of such a file. They are written once."""
    names, fork = write_packages(tmp_path / "packages")
    settings = load_settings(ROOT / "tests" / "tiny_draft.yaml", [f"target={target.path}"])
    settings.prompts.train, settings.prompts.validation, settings.evaluation.tasks = {}, {}, {}
    settings.code = CodeSettings([str(tmp_path / "packages")], train_files=1000)
    root = tmp_path / "root"
    file = answers_file(root, "source", "train")
    write_prompts(settings, root)
    files = [Path(record["id"]) for record in read_jsonl(file)]
    packages = [path.parts[0] for path in files]
    assert set(packages) == {name for name in names if split_of(name) == "train"}
    assert len(set(files)) == len(files) == 5 * len(set(packages)) - 1 and Path(fork, "m0.py") not in files
    assert packages != sorted(packages)

    tokenize = Tokenize(target.tokenizer, 1, VOCAB_SIZE, "llama", CHAT_FORMAT, max_length=128, overflow="split")
    rows = build_dataset([str(file)], tokenize, pack=True, cache_dir=str(tmp_path / "cache"))
    segments = [segment for number in range(len(rows)) for segment in rows[number]]
    assert sum(len(segment["input_ids"]) for segment in segments) > 2000 * len(files), "nothing is cut off"
    assert all(segment["prompt_length"] == 0 for segment in segments), "all tokens are in the loss"

    monkeypatch.setattr(prompts, "read_code", lambda *_: pytest.fail("read again"))
    write_prompts(settings, root)
    for name in FOLDERS:
        other = replace(settings, **{name: str(tmp_path)})
        with pytest.raises(UserError, match=rf"{name}: null there, \"{tmp_path}\" here"):
            write_prompts(other, root)
    for split in SPLITS:  # a folder of an earlier version
        facts = root / "prompts" / split / "settings.json"
        older = {name: value for name, value in json.loads(facts.read_text()).items() if name not in FOLDERS}
        facts.write_text(json.dumps(older | {"with_documents": True}))
    write_prompts(other, root)
    settings.code.train_files = 7
    with pytest.raises(UserError, match=r"made with other settings \(train_files: 1000 there, 7 here\)"):
        write_prompts(settings, root)


def test_the_users_prompts_are_split_by_their_text(
    target: TargetText, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records of any form; their answers are not read, and longer prompts are left out and counted."""
    records = [{"messages": [{"role": "user", "content": f"question {number}?"}]} for number in range(60)]
    records += [{"source": f"asked {number}?", "target": "no"} for number in range(40)] + [{"source": "x" * 2000}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    overrides = [f"target={target.path}", f"text=[{tmp_path / 'own.jsonl'}]"]
    settings = load_settings(ROOT / "tests" / "tiny_draft.yaml", overrides)
    own = read_own(settings, target)
    assert "--text: left out: 1 prompts not of at most" in capsys.readouterr().out
    contents = {split: {record["messages"][-1]["content"] for record in own[split]} for split in SPLITS}
    assert all(contents.values()) and len(set().union(*contents.values())) == sum(map(len, contents.values())) == 100
    (record,) = Makers(target, Texts(own=own["test"]), "test").records("own", [0], random.Random(0))
    assert record["messages"][-1]["content"] in contents["test"]
    settings.prompts.contexts = [1, 5]
    with pytest.raises(UserError, match="--text: no prompt of at most 5 tokens"):
        read_own(settings, target)
