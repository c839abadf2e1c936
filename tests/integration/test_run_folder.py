"""Results in a folder: one run per folder, continued after an interruption and never replaced unasked."""

import json
import os
import re
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from calls import noted
from test_command import Refused, Setting, arguments, draft_of, lines_of, make_target, write_records

from longspec.kernels.native.library import native_library
from longspec.locks import LOCK_NAME, locked
from longspec.longbench import measurement, report
from longspec.longbench.command import main, parse_options
from longspec.longbench.plan import make_plan

SAMPLED = ("--method", "seq", "--max_gen_len", "6", "--temperature", "1", "--batch_size", "2")
COUNTS = ("samples", "mean_acceptance_length", "accepted_by_depth", "rounds", "decoded_tokens", "new_tokens")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A target with its draft, and five samples."""
    folder = tmp_path_factory.mktemp("pair")
    return make_target(folder / "target"), write_records(folder / "data", count=5)


@pytest.fixture(scope="module")
def uninterrupted(pair: Setting, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    main(arguments(*pair, out, *SAMPLED))
    return out


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the lock's, which names its last holder."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != LOCK_NAME}


def answers(out: Path) -> list[tuple[str, list[int]]]:
    return [(line["id"], line["token_ids"]) for line in lines_of(out)]


def test_every_configuration_has_a_default_folder_of_its_own(pair: Setting, tmp_path: Path) -> None:
    target, data = pair
    options = [option for option in arguments(target, data, tmp_path) if option not in ("--output_dir", str(tmp_path))]

    def folder(*more: str, line: list[str] = options) -> Path:
        return make_plan(parse_options([*line, *more])).output_dir

    variants: list[tuple[str, ...]] = [
        *((), ("--temperature", "1"), ("--tree_nodes", "32"), ("--lookup_branches",), ("--no-compile",)),
        *(("--method", "seq"), ("--method", "vanilla", "--gamma", "2"), ("--min_p", "0.9"), ("--dtype", "bfloat16")),
        *(("--batch_size", "2"), ("--test_length", "3"), ("--seed", "3"), ("--tree_shape", *["2"] * 200)),
    ]
    folders = {more: folder(*more) for more in variants}
    assert {path.parent for path in folders.values()} == {Path("outputs/inference/target/lcc")}
    assert max(len(path.name) for path in folders.values()) < 150
    assert re.fullmatch(r"tree_4-16-16-16-16_t0_float32_[0-9a-f]{8}", folders[()].name)
    longer = [str(write_records(tmp_path / "data", count=6)) if option == str(data) else option for option in options]
    assert len({*folders.values(), folder(line=longer)}) == len(variants) + 1
    attention = "sdpa" if native_library() is None else "native"
    chosen_by_default = ("--attention", attention, "--dtype", "float32", "--max_gen_len", "64")
    assert folder(*chosen_by_default) == folder() and not (tmp_path / "outputs").exists()


def test_results_of_another_run_are_refused_and_kept(
    pair: Setting, uninterrupted: Path, tmp_path: Path, refusal: Refused
) -> None:
    """In one line that names what differs, before the weights are loaded."""
    target, data = pair
    before = contents(uninterrupted)

    def refused(line: list[str]) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measurement, "load_model", None)
            message = refusal(main, line)
        assert contents(uninterrupted) == before
        return message

    message = refused(arguments(target, data, uninterrupted, *SAMPLED, "--temperature", "0", "--seed", "3"))
    assert "(temperature: 1.0 there, 0.0 here; seed: 0 there, 3 here); choose another output" in message
    other = make_target(tmp_path / "target", seed=5)
    message = refused(arguments(other, data, uninterrupted, *SAMPLED, draft=draft_of(target)))
    assert "(target: other content)" in message
    message = refused(arguments(target, data, uninterrupted, *SAMPLED, draft=draft_of(other)))
    assert "(draft: other content)" in message
    longer = write_records(tmp_path / "data", count=6)
    message = refused(arguments(target, longer, uninterrupted, *SAMPLED, "--test_length", "0"))
    assert "(data: other content; prompts: other content)" in message


def test_a_complete_run_says_so_and_shows_its_summary_again(
    pair: Setting, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(uninterrupted)
    monkeypatch.setattr(measurement, "load_model", None)
    summary = main(arguments(*pair, uninterrupted, *SAMPLED))
    assert summary == json.loads(before["summary.json"]) and contents(uninterrupted) == before
    shown = capsys.readouterr().out
    assert "complete already, 5 of 5 samples" in shown and "acceptance length" in shown


def test_overwrite_replaces_the_results_of_another_run(pair: Setting, tmp_path: Path) -> None:
    out = tmp_path / "out"
    main(arguments(*pair, out, "--method", "vanilla", "--max_gen_len", "2"))
    summary = main(arguments(*pair, out, "--method", "vanilla", "--max_gen_len", "3", "--overwrite"))
    assert summary["samples"] == len(lines_of(out)) == 5 and summary["new_tokens"] == 15


def test_a_stop_signal_saves_the_running_samples_and_the_same_command_continues(
    pair: Setting, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Continued runs draw the same tokens as uninterrupted ones, and their summary pools all samples."""
    out, handlers = tmp_path / "out", signal.getsignal(signal.SIGTERM)
    # The signal comes when the third sample ends.
    samples = count()
    third = lambda *_: next(samples) == 2 and os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    noted(monkeypatch, measurement, "sample_line", third)
    with pytest.raises(SystemExit) as stop:
        main(arguments(*pair, out, *SAMPLED))
    assert stop.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) == handlers
    line = f"stopped by SIGTERM: 4 of 5 samples are done, in {out}; the same command continues"
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert len(lines_of(out)) == 4 and not (out / "summary.json").exists()
    kept = (out / "samples.jsonl").read_bytes()
    monkeypatch.setattr(measurement, "sample_line", report.sample_line)
    summary = main(arguments(*pair, out, *SAMPLED))
    assert "continues after 4 of 5 samples" in capsys.readouterr().out
    assert set(kept.splitlines()) < set((out / "samples.jsonl").read_bytes().splitlines())
    assert answers(out) == answers(uninterrupted)
    expected = json.loads((uninterrupted / "summary.json").read_text())
    assert {name: summary[name] for name in COUNTS} == {name: expected[name] for name in COUNTS}


def test_a_second_run_in_a_folder_is_refused_and_touches_nothing(
    pair: Setting, uninterrupted: Path, refusal: Refused
) -> None:
    with locked(uninterrupted):
        before = contents(uninterrupted)
        for more in ((), ("--overwrite",)):
            line = arguments(*pair, uninterrupted, *SAMPLED, *more)
            assert f"another run is writing to {uninterrupted}" in refusal(main, line)
        assert contents(uninterrupted) == before


def test_an_output_folder_that_cannot_be_created_is_refused(
    pair: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refused
) -> None:
    monkeypatch.setattr(measurement, "load_model", None)
    (tmp_path / "file").touch()
    for out, complaint in ((tmp_path / "file" / "out", "Not a directory"), (Path("/proc/longspec"), "/proc")):
        assert complaint in refusal(main, arguments(*pair, out, *SAMPLED))
