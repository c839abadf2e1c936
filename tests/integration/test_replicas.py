"""Commands on several ranks: the results of a single process, whatever happens to the ranks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from http_server import chat_tokenizer
from test_command import SHORT, draft_of, make_target, write_records
from test_run_folder import COUNTS, SAMPLED
from training_fixtures import Forked, run_ranks
from typer.testing import CliRunner

from longspec.cli.app import app
from longspec.locks import LOCK_NAME
from longspec.longbench.command import main
from longspec.ranks.replicas import Replicas
from longspec.regenerate.command import main as regenerate

TIMES = ("ttft_s", "decode_s", "tokens_per_second")
FAULTY = "tests/faulty_replica.py"
LOST = "rank . of . ends, because another rank has ended"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its draft and a chat template."""
    target = make_target(tmp_path_factory.mktemp("pair") / "target")
    chat_tokenizer().save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def line(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run of eleven samples of uneven lengths, without its output folder."""
    data = write_records(tmp_path_factory.mktemp("data") / "data", count=11)
    model = ["--target", str(pair), "--draft", str(draft_of(pair))]
    return [*model, "--task", "lcc", "--data_path_prefix", str(data), "--device", "cpu", *SHORT, *SAMPLED]


@pytest.fixture(scope="module")
def alone(line: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a single process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    main([*line, "--output_dir", str(out)])
    return out


def said(launch: Forked) -> list[str]:
    """The lines of stderr, without progress bars and warnings of torch about a lost connection."""
    text = re.sub(r"[^\r\n]*?\d+%\|.*?\]", "\n", launch.stderr)
    # Whether kernels are compiled here depends on the tests before.
    noise = re.compile(r"Exception raised|frame #|<omitting|\[rank\d\]:\[W|first use: ")
    return [line for line in re.split(r"[\r\n]+", text) if line.strip() and not noise.match(line)]


def evaluate(line: list[str], out: Path, ranks: int = 2, fault: str = "") -> Forked:
    options = [*line, "--output_dir", str(out)]
    if fault:
        return run_ranks(FAULTY, "evaluate", *options, ranks=ranks, FAULT=fault)
    return run_ranks("inference_long-bench.py", *options, ranks=ranks)


def records(out: Path) -> list[dict[str, Any]]:
    """The lines of results, without times and memory."""
    lines = [json.loads(raw) for raw in (out / "samples.jsonl").read_text().splitlines()]
    for record in lines:
        record["batch"] = {name: record["batch"][name] for name in record["batch"] if name[-2:] != "_s"}
        del record["batch"]["peak_memory_bytes"]
    return [{name: value for name, value in record.items() if name not in TIMES} for record in lines]


def on_disk(out: Path) -> set[str]:
    """The complete lines of the samples that are saved, with their times."""
    files = [file for file in out.iterdir() if file.name.startswith("samples.jsonl")]
    return {raw for file in files for raw in file.read_text().splitlines(keepends=True) if raw.endswith("\n")}


def check_complete(out: Path, alone: Path) -> None:
    """The folder holds the results of a single process, in the same order, and nothing else."""
    assert records(out) == records(alone)
    assert sorted(file.name for file in out.iterdir()) == [LOCK_NAME, "run.json", "samples.jsonl", "summary.json"]
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (out, alone))
    assert {name: one[name] for name in COUNTS} == {name: other[name] for name in COUNTS}


def test_items_are_dealt_to_the_ranks_the_longest_first() -> None:
    assert [Replicas(rank, 2).share([5, 9, 1, 7, 3, 3]) for rank in range(2)] == [[0, 1, 5], [2, 3, 4]]


def test_ranks_write_the_results_of_a_single_process(line: list[str], alone: Path, tmp_path: Path) -> None:
    """They print once, with one progress bar."""
    launch = evaluate(line, tmp_path / "out")
    assert launch.codes == [0, 0], launch.stderr
    check_complete(tmp_path / "out", alone)
    assert json.loads((tmp_path / "out/summary.json").read_text())["processes"] == 2
    assert launch.stdout.count("acceptance length") == launch.stdout.count("11 prompts kept") == 1
    assert said(launch) == [] and "11/11" in launch.stderr


def test_a_run_resumes_on_any_number_of_ranks_after_one_is_killed(line: list[str], alone: Path, tmp_path: Path) -> None:
    """The other rank ends with one line. No sample is lost, and no sample is evaluated twice."""
    out = tmp_path / "out"
    # The killed rank has saved its first two samples, as many as a batch has.
    launch = evaluate(line, out, fault="0:2:SIGKILL")
    assert launch.codes == [-9, 1], launch.stderr
    assert len(said(launch)) == 1 and re.match(LOST, said(launch)[0]), launch.stderr
    saved = on_disk(out)
    assert 2 <= len(saved) < 11
    assert evaluate(line, out, ranks=3).codes == [0] * 3
    check_complete(out, alone)
    assert saved < on_disk(out)


def test_a_stop_signal_to_one_rank_stops_all_after_their_batches(line: list[str], alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch = evaluate(line, out, fault="1:1:SIGTERM")
    assert launch.codes == [143, 143], launch.stderr
    saved = (out / "samples.jsonl").read_text().splitlines()
    line_of_all = f"stopped by SIGTERM: {len(saved)} of 11 samples are done, in {out}; the same command continues"
    assert said(launch) == [line_of_all]
    assert 4 <= len(saved) < 11 and sorted(on_disk(out)) == sorted(f"{raw}\n" for raw in saved)
    main([*line, "--output_dir", str(out)])
    check_complete(out, alone)


def test_an_error_on_one_rank_ends_all(line: list[str], tmp_path: Path) -> None:
    """Each rank says one line: the error, and the end of the others. Bad input is one line of all ranks."""
    launch = evaluate(line, tmp_path / "out", fault="1:0:error")
    assert launch.codes == [1, 2], launch.stderr
    error, end = sorted(said(launch))
    assert error == "error: sample 'x': bad" and re.match(LOST, end)
    launch = evaluate([*line, "--temperature", "-1"], tmp_path / "out")
    assert launch.codes == [2, 2]
    assert len(said(launch)) == 1 and said(launch)[0].startswith("error: temperature: -1.0; it must be 0")


def test_a_folder_that_ranks_do_not_share_is_refused(line: list[str], tmp_path: Path) -> None:
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    launch = run_ranks(FAULTY, "evaluate", *line, "--output_dir", "out", DISKS=str(tmp_path))
    assert launch.codes == [2, 2]
    (message,) = said(launch)
    assert re.match(r"error: out is not one folder: rank 1 \(on .*give a path on a disk", message)


def test_answers_of_several_ranks_are_those_of_one(pair: Path, tmp_path: Path) -> None:
    """The job that resumes is the same as for an evaluation."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join("a" * (7 * number % 23 + 1) for number in range(13)))
    options = ["--model", str(pair), "--temperature", "1", "--batch_size", "2", "--max_new_tokens", "6"]
    given = ["generate", str(prompts), *options, "--method", "lookup", "--device", "cpu", "--output"]
    assert CliRunner().invoke(app, [*given, str(tmp_path / "alone.jsonl")]).exit_code == 0
    out = tmp_path / "out.jsonl"
    launch = run_ranks(FAULTY, *given, str(out), "--json", str(tmp_path / "summary.json"))
    assert launch.codes == [0, 0], launch.stderr
    assert out.read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert {file.name for file in tmp_path.glob("out.jsonl*")} == {"out.jsonl", "out.jsonl.run"}
    assert launch.stdout == f"written to {out}: 13 of 13 prompts answered\n"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["answered"], summary["processes"]) == (13, 2)


def test_text_of_several_ranks_is_that_of_one(pair: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"problem": f"{n} " * (n + 1)}) + "\n" for n in range(10)))
    options = ["--target", str(pair), "--files", str(prompts), "--shard_size", "2", "--max_new_tokens", "6"]
    options += ["--device", "cpu", "--output_dir"]
    regenerate([*options, str(tmp_path / "alone")])
    out = tmp_path / "out"
    launch = run_ranks(FAULTY, "regenerate", *options, str(out), FAULT="1:1:SIGKILL")
    assert launch.codes == [1, -9] and "another rank has ended" in said(launch)[-1], launch.stderr
    shards = {path: path.stat().st_mtime_ns for path in (out / "train.shards").glob("shard-*")}
    assert len(shards) == 4 and not (out / "train.jsonl").exists()
    launch = run_ranks(FAULTY, "regenerate", *options, str(out))
    assert launch.codes == [0, 0] and launch.stdout.count("written to") == 1
    assert (out / "train.jsonl").read_bytes() == (tmp_path / "alone" / "train.jsonl").read_bytes()
    assert {path: path.stat().st_mtime_ns for path in shards} == shards
