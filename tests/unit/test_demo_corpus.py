"""The demo's corpus: what is held out stays out of training, and its prompts are LongBench's."""

import random
from pathlib import Path

import pytest

from longspec.longbench.prompts import read_questions
from longspec.longbench.tasks import TASKS
from scripts.demo.corpus import PROMPTS, TASK, CorpusSettings, completion, split, write_corpus
from scripts.pipeline.files import ANSWERS, HELD_OUT_TEXTS, LONG_TEXTS, TEXTS, read_jsonl
from scripts.pipeline.sources import HELD_OUT, SourceFile, by_package, library_files

SMALL = CorpusSettings(context=300, code=500, answer=400, answers=60, prompts=9)


@pytest.fixture(scope="module")
def files() -> list[SourceFile]:
    return library_files()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, SMALL)
    return folder


def package_of(text: str) -> str:
    """The package that a text's first line names."""
    assert text.startswith("# Path: ")
    return text.removeprefix("# Path: ").split("\n", 1)[0].split("/")[0].removesuffix(".py")


def test_library_has_sources_but_no_tests_and_no_installed_packages(files: list[SourceFile]) -> None:
    folders = {part for file in files for part in Path(file.path).parts[:-1]}
    assert not folders & {"site-packages", "test", "tests", "__pycache__"}
    assert sum(len(file.text) for file in files) > 3_000_000
    assert len({file.path for file in files}) == len(files)


def test_no_package_is_on_both_sides_and_every_held_out_one_is_there(files: list[SourceFile]) -> None:
    train, held_out = split(files)
    assert len(train) + len(held_out) == len(files)
    assert not {file.package for file in train} & {file.package for file in held_out}
    assert {file.package for file in held_out} == set(HELD_OUT)


def test_training_files_hold_nothing_of_a_held_out_package(corpus: Path) -> None:
    for name in (TEXTS, LONG_TEXTS):
        assert not {package_of(record["text"]) for record in read_jsonl(corpus / name)} & set(HELD_OUT)
    introduction = TASKS[TASK].prompt.split("{")[0]
    for record in read_jsonl(corpus / ANSWERS):
        code = record["source"].removeprefix(introduction)
        assert package_of(code) not in HELD_OUT
    assert {package_of(record["text"]) for record in read_jsonl(corpus / HELD_OUT_TEXTS)} == set(HELD_OUT)


def test_prompts_are_what_the_command_reads_and_the_answer_is_the_next_line(corpus: Path) -> None:
    records = read_jsonl(corpus / PROMPTS)
    questions = read_questions(TASK, corpus)
    texts = {record["path"]: record["text"] for record in read_jsonl(corpus / HELD_OUT_TEXTS)}
    assert len(records) == len(questions) == SMALL.prompts
    assert {record["_id"].split("/")[0] for record in records} == set(HELD_OUT)
    for record, question in zip(records, questions, strict=True):
        assert question.id == record["_id"]
        assert record["context"] + record["input"] in question.prompt
        code = record["input"].split("\n", 1)[1]
        assert code + record["answers"][0] + "\n" in texts[record["_id"].rsplit(":", 1)[0]]
        assert record["answers"][0].strip()


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_file_goes_on_where_it_was_cut(files: list[SourceFile], seed: int) -> None:
    """Input and what follows are neighbours in the file, at a line's end; the context is another file's beginning."""
    chance = random.Random(seed)
    file = chance.choice([file for file in files if SMALL.fits(file)])
    members = by_package(files)[file.package]
    cut = completion(file, members, SMALL, chance)
    heading, code = cut["input"].split("\n", 1)
    assert heading == f"# Path: {file.path}"
    assert code + cut["following"] in file.text
    assert cut["input"].endswith("\n")
    assert not cut["following"].startswith("\n")
    assert len(cut["input"]) <= SMALL.code + len(heading) + 200
    assert cut["context"] == "" or any(
        member.text.startswith(cut["context"].rstrip("\n")) for member in members if member.path != file.path
    )


def test_the_same_settings_write_the_same_files(corpus: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path, SMALL)
    for name in (TEXTS, LONG_TEXTS, ANSWERS, HELD_OUT_TEXTS, PROMPTS):
        assert (tmp_path / name).read_bytes() == (corpus / name).read_bytes()


def test_a_limit_on_the_training_text_holds(tmp_path: Path) -> None:
    write_corpus(tmp_path, CorpusSettings(code=500, answer=400, answers=5, prompts=2, largest=100_000))
    assert 0 < sum(len(record["text"]) for record in read_jsonl(tmp_path / TEXTS)) <= 100_000
