"""Signals to each process of a run: what is saved and reported. `longspec draft`, killed in each step, resumes."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from forked_ranks import exit_code
from pipeline_fixtures import make_chat_target, write_text_folder
from training_fixtures import (
    LIMIT_S,
    ROOT,
    TINY,
    background,
    launch_environment,
    launch_line,
    launched,
    metrics,
    overrides_of,
    wait_for_step,
    wait_until,
)

from longspec import load_pair
from longspec.pipeline.processes import free_port
from longspec.train.generations import find_latest

pytestmark = pytest.mark.slow


def overrides(work: Path, output: Path) -> list[str]:
    """An endless run that saves nothing by itself."""
    return overrides_of(work, output, "data.pack=false", "data.num_workers=1", "max_steps=100000", "save_steps=100000")


@contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[psutil.Popen]:
    """`command` in the background, in a session of its own; nothing of it is left behind."""
    with log.open("w") as stream:
        given = {"cwd": ROOT, "env": launch_environment(**environment), "start_new_session": True}
        run = psutil.Popen(command, stdout=stream, stderr=stream, **given)
        try:
            yield run
        finally:
            for one in session(run.pid):
                one.kill()
            run.wait()


def session(leader: int) -> list[psutil.Process]:
    """The processes that run in a session."""
    found = []
    for one in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(one.pid) == leader and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def assert_saved(output: Path) -> int:
    """The step of the checkpoint, which is the last one that was finished."""
    found = find_latest(output)
    assert found is not None and found[1].step == len(metrics(output))
    return found[1].step


def our_line(log: Path) -> str:
    (line,) = [line for line in log.read_text().splitlines() if "stopped" in line]
    return line


@pytest.mark.parametrize(
    ("receiver", "number", "code"),
    [
        ("launch.py", signal.SIGKILL, 0),  # DeepSpeed's command takes a killed launch.py for a good end
        ("group", signal.SIGINT, -signal.SIGINT),
    ],
)
def test_every_way_to_stop_a_launch_saves_and_ends_it(
    receiver: str, number: int, code: int, work: Path, tmp_path: Path
) -> None:
    """One line says so. A process that a signal kills has the code -n, which shells show as 128 + n. A launcher that
    hears the signal kills the ranks after 30 seconds; they would then not have saved."""
    output, log = tmp_path / "out", tmp_path / "log"
    with running(launch_line(TINY, *overrides(work, output)), log, WANDB_MODE="offline") as run:
        wait_for_step(output, log)
        if receiver == "group":
            os.killpg(run.pid, number)
        else:
            run.children()[0].send_signal(number)
        assert run.wait(timeout=LIMIT_S) == code
        wait_until(lambda: not session(run.pid), log)
    step = assert_saved(output)
    # launch.py turns SIGINT into SIGTERM, and a rank that has both pending hears the later one first.
    causes = ["SIGINT", "SIGTERM"] if receiver == "group" else ["the launcher is gone"]
    wanted = [f"{cause}: stopped after step {step}; resume=latest goes on from there" for cause in causes]
    assert our_line(log).endswith(tuple(wanted))
    # The `deepspeed` command and W&B's own process may print tracebacks, in any order; ours may not.
    frames = re.findall(r'File "(.*?)"', log.read_text())
    assert not [frame for frame in frames if Path(frame).is_relative_to(ROOT / "longspec")]


@pytest.mark.parametrize(
    ("ranks", "number", "stop"),
    [(1, signal.SIGINT, os.killpg), (2, signal.SIGINT, os.killpg), (2, signal.SIGTERM, os.kill)],
)
def test_longspec_train_ends_with_what_was_saved(
    ranks: int, number: int, stop: Callable[[int, int], None], work: Path, tmp_path: Path
) -> None:
    """Ctrl-C reaches all processes, SIGTERM only the command. It ends after its ranks, without a traceback."""
    output, log = tmp_path / "out", tmp_path / "log"
    launch = ["--num_gpus", str(ranks), "--master_port", str(free_port())]
    with running([sys.executable, "-m", "longspec", "train", *launch, TINY, *overrides(work, output)], log) as run:
        wait_for_step(output, log)
        stop(run.pid, number)
        assert run.wait(timeout=LIMIT_S) == 128 + number and not session(run.pid)
    *_, ours, last = log.read_text().splitlines()
    assert ours.endswith(f": stopped after step {assert_saved(output)}; resume=latest goes on from there")
    assert last == f"stopped by {signal.Signals(number).name}" and "Traceback" not in log.read_text()


def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on(work: Path, tmp_path: Path) -> None:
    output, log = tmp_path / "out", tmp_path / "log"
    with background(*overrides(work, output), log=log) as ranks:
        wait_for_step(output, log)
        os.kill(ranks[1].pid, signal.SIGHUP)
        assert exit_code(ranks, LIMIT_S) == 128 + signal.SIGHUP
    step = assert_saved(output)
    assert our_line(log).endswith(f"SIGHUP: stopped after step {step}; resume=latest goes on from there")
    assert "Traceback" not in log.read_text()
    more = [*overrides(work, output), "resume=latest", f"max_steps={step + 1}"]
    assert f"steps {step + 1} …" in launched(TINY, *more)


def test_a_closed_terminal_saves_and_ends_a_launch(work: Path, tmp_path: Path) -> None:
    """The kernel sends SIGHUP to all, and every write to the terminal fails from then on."""
    output, log = tmp_path / "out", tmp_path / "log"
    log.write_text("")
    command = launch_line(TINY, *overrides(work, output))
    leader, terminal = pty.fork()
    if leader == 0:
        os.chdir(ROOT)
        os.execvpe(command[0], command, launch_environment())
    os.set_blocking(terminal, False)

    def trains() -> bool:
        with suppress(BlockingIOError):
            os.read(terminal, 2**16)  # or the ranks would wait for a reader
        return (output / "metrics.jsonl").exists() and len(metrics(output)) >= 2

    try:
        wait_until(trains, log)
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]) == -signal.SIGHUP
        wait_until(lambda: not session(leader), log)
    finally:
        for one in session(leader):
            one.kill()
    assert_saved(output)


BEGUN = {
    "chat": "answers/chat/train.shards/*",
    "stage1": "training/recipe-0/stage1/last*_ds",
    "evaluation": "evaluation/samples-0.jsonl",
}
"""A file that exists once a step has begun. (Prompts and answers of other steps are written as those of `chat`.)"""


def command(target: Path, root: Path, *arguments: str) -> list[str]:
    line = [sys.executable, "-m", "longspec", "draft", str(target), "--config", "tests/tiny_draft.yaml", "--yes"]
    return [*line, "--output_dir", str(root), *arguments]


def killed(line: list[str], begun: Path, log: Path, whole_group: bool) -> None:
    """Run a command; kill it, or it and its launchers, once a file matches a pattern. Its other processes must end."""

    def has_begun() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        return any(begun.parent.glob(begun.name))

    with running(line, log) as process:
        wait_until(has_begun, log)
        others = process.children(recursive=True)
        if whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        _, alive = psutil.wait_procs(others, timeout=LIMIT_S)
        assert not alive


def finished(root: Path) -> dict[Path, int]:
    """When each complete file of text, prompts and probes was written."""
    files = [file for part in ("answers", "prompts", "probes") for file in root.glob(f"{part}/*/*.jsonl")]
    return {file: file.stat().st_mtime_ns for file in files}


def completed(line: list[str]) -> str:
    """What a command prints, which must succeed."""
    run = subprocess.run(line, cwd=ROOT, env=launch_environment(), text=True, capture_output=True, timeout=LIMIT_S)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout


def test_a_run_that_is_killed_in_each_step_continues_and_repeats_nothing(tmp_path: Path) -> None:
    """The number of processes that write text changes on the way."""
    target, texts = make_chat_target(tmp_path / "target"), write_text_folder(tmp_path / "texts")
    root, log = tmp_path / "root", tmp_path / "log"
    before: dict[Path, int] = {}
    for number, begun in enumerate(BEGUN.values()):
        line = command(target, root, f"benchmarks={texts}", f"chat.processes={2 - number % 2}")
        killed(line, root / begun, log, whole_group=number % 2 == 0)
        after = finished(root)
        assert before.items() <= after.items()
        before = after
    printed = completed(command(target, root, f"benchmarks={texts}"))
    assert before.items() <= finished(root).items()
    assert len(re.findall(r"^step \d of 9: \w+, done", printed, re.MULTILINE)) == 8, "all but the evaluation"

    starts = re.findall(r"steps (\d+) … 200", (root / "training/recipe-0/stage1/log.txt").read_text())
    assert starts[0] == "1" and int(starts[-1]) > 1, "stage 1 resumed from a checkpoint"
    steps = [json.loads(line)["step"] for line in (root / "training/recipe-0/stage1/metrics.jsonl").open()]
    assert steps == list(range(1, 201))
    samples = [json.loads(line) for line in (root / "evaluation/samples-0.jsonl").open()]
    keys = [tuple(sample[name] for name in ("task", "context", "method", "temperature", "id")) for sample in samples]
    assert len(set(keys)) == len(keys)

    summary = json.loads((root / "summary.json").read_text())
    assert [row["stage"] for row in summary["tables"]["Training"]] == ["stage1", "stage2", "stage3"]
    assert {row["method"] for row in summary["tables"]["Methods"]} == {"vanilla", "tree", "lookup", "auto"}
    assert "900 over 400" in summary["tables"]["The same text"][0]
    for name in ("report.md", "contexts.png", "tokens_per_second.png", "draft/README.md"):
        assert (root / name).stat().st_size > 0
    assert "stage1 also read up to 12 source files" in (root / "draft/README.md").read_text()
    *_, chat, serve, bench, last = printed.splitlines()
    for line, name in ((chat, "chat"), (serve, "serve"), (bench, "bench")):
        assert line == f"longspec {name} {target} --draft {root / 'draft'}"
    assert "prompt lookup" in last
    pair, _ = load_pair(str(target), draft=str(root / "draft"))
    assert pair.draft_is_trained

    again = command(target, tmp_path / "again", "--evaluate", str(root / "draft"), "chat.processes=1")
    tasks = "evaluation.tasks={everyday: {contexts: [0], max_new_tokens: 8, prompts: 1}}"
    methods = "evaluation.methods=[{name: vanilla, prompts: 1}, {name: tree, prompts: 1}, {name: lookup, prompts: 1}]"
    completed([*again, tasks, methods])
