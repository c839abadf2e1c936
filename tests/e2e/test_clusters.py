"""Two hosts: two torchrun agents on this machine, which share nothing but the disk and a port."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from training_fixtures import (
    LIMIT_S,
    ROOT,
    TINY,
    TRAINER,
    launch_environment,
    metrics,
    overrides_of,
    plain_training,
    tiny_config,
)

from longspec.longbench.command import main
from longspec.pipeline.processes import free_port

pytestmark = pytest.mark.slow


def run_hosts(
    options: list[str], command: list[str], own: list[list[str]], **environment: str
) -> list[tuple[int, str]]:
    """The exit code and the stderr of a torchrun agent per host. own: options that differ between hosts."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", *options]
    agents = [
        subprocess.Popen(
            [*torchrun, *more, *command],
            cwd=ROOT,
            env=launch_environment(PYTHONPATH=str(ROOT), **environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for more in own
    ]
    errors = [agent.communicate(timeout=LIMIT_S)[1] for agent in agents]
    return [(agent.returncode, error) for agent, error in zip(agents, errors, strict=True)]


def test_an_evaluation_survives_the_death_of_a_rank_on_the_other_host(work: Path, tmp_path: Path) -> None:
    records = [{"_id": f"r{n}", "input": "", "context": f"x = {n}\n" * (n + 1)} for n in range(7)]
    (tmp_path / "lcc.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    line = ["--target", f"{work}/target", "--method", "vanilla", "--task", "lcc", "--data_path_prefix", str(tmp_path)]
    line += ["--min_prompt_len", "10", "--headroom", "3000", "--max_gen_len", "6", "--device", "cpu"]
    line += ["--output_dir", str(tmp_path / "out")]
    master = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    first, second = run_hosts(
        master,
        ["tests/faulty_replica.py", "evaluate", *line],
        [["--node_rank", "0"], ["--node_rank", "1"]],
        FAULT="1:1:SIGKILL",
    )
    assert first[0] != 0 and second[0] != 0
    assert "exitcode  : -9" in second[1]
    files = [tmp_path / "out" / name for name in ("samples.jsonl", "samples.jsonl.rank-1")]
    saved = {raw for file in files for raw in file.read_text().splitlines()}
    assert f"a rank has ended: {len(saved)} of 7 samples are done" in first[1], first[1]
    summary = main(line)
    written = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    assert summary is not None and (summary["samples"], summary["processes"]) == (7, 2)
    assert saved < {*written} and len(written) == 7


def test_training_on_two_hosts_is_that_of_one_plain_loop(work: Path, tmp_path: Path) -> None:
    more = ["variant=base", "max_steps=2", "data.pack=false", "resume=latest"]
    arguments = overrides_of(work, tmp_path / "out", *more)
    losses, _ = plain_training(tiny_config(*arguments), steps=2, ranks=2)
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_id", "7", "--rdzv_endpoint", f"localhost:{free_port()}"]
    hosts = run_hosts(rendezvous, [TRAINER, "-cp", "conf/exp", "-cn", TINY, *arguments], [[], []])
    assert [code for code, _ in hosts] == [0, 0], hosts
    assert [step["loss"] for step in metrics(tmp_path / "out")] == pytest.approx(losses, rel=1e-5)
