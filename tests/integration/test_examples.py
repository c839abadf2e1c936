"""The scripts and the notebook of examples/ run as they stand, on a tiny pair."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from http_server import printable_pair

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "pair"
    printable_pair(folder)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Run a script with arguments; the lines that it prints."""

    def run(script: str, *arguments: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        exec(compile((EXAMPLES / script).read_text(), script, "exec"), {"__name__": "__main__", "__doc__": "A script."})
        return capsys.readouterr().out.splitlines()

    return run


def test_own_prompts(pair: Path, tmp_path: Path, run: Callable[..., list[str]]) -> None:
    (tmp_path / "prompts.txt").write_text("one\n\ntwo two\n")
    lines = run("own_prompts.py", tmp_path / "prompts.txt", "--model", pair, "--max_new_tokens", 6)
    assert lines[0].startswith("vanilla: ") and lines[1].startswith("auto: ")
    assert sum(line.startswith("-> ") for line in lines) == 2 and any("two two" in line for line in lines)


def test_own_model(pair: Path, tmp_path: Path, run: Callable[..., list[str]]) -> None:
    lines = run("own_model.py", pair, "--save", tmp_path / "saved", "--max_new_tokens", 6)
    assert [line.partition(":")[0] for line in lines[:3]] == ["vanilla", "lookup", "tree"]
    assert "the methods agree: True" in lines and (tmp_path / "saved" / "draft").is_dir()


def test_the_notebook(pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PAIR", str(pair))
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in code]
    # The outputs are those of the embedded pair.
    assert len(sources) == 10 and all(cell["outputs"] for cell in code)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, source in enumerate(sources, 1):
        exec(compile(source, f"cell {number}", "exec"), names)
        assert capsys.readouterr().out, f"cell {number} prints nothing"


@pytest.mark.slow
def test_own_data(pair: Path, tmp_path: Path) -> None:
    prompts = [{"prompt": f"Write about {word}."} for word in ("tides", "rivers", "wind", "snow")] * 2
    prompts = [{"prompt": f"{line['prompt']} ({number})"} for number, line in enumerate(prompts)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    command = [sys.executable, EXAMPLES / "own_data.py", "--target", pair, "--prompts", tmp_path / "prompts.jsonl"]
    command += ["--output", tmp_path / "own", "--max_new_tokens", "32", "max_steps=2", "data.max_length=64"]
    command += ["per_device_train_batch_size=4", "gradient_accumulation_steps=2", "data.num_proc=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" tokens per round")
