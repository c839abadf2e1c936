"""Runs before any test module: Triton's interpreter where there is no GPU, and the helpers' folder on the path."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
os.environ.setdefault("WANDB_MODE", "offline")
# Method "auto" keeps the times of rounds in the user's cache folder; the hub's cache stays where it is.
os.environ.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="longspec-tests-")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))
# Tests send signals that `nohup` or a shell's `&` makes a process ignore, and its children inherit that.
for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
torch.set_num_threads(1)  # tensors this small lose more to the hand-over between threads than they gain


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need a GPU where there is none, and skip those that need gcc."""
    if not torch.cuda.is_available():
        on_gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    if shutil.which("gcc") is None:
        for item in items:
            if item.get_closest_marker("gcc"):
                item.add_marker(pytest.mark.skip(reason="needs gcc"))


def pytest_collection_finish() -> None:
    """Leave out everything that is imported from garbage collections, which otherwise take a quarter of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Runs a test on the CPU and, where there is one, on the GPU."""
    if request.param == "cpu" and request.node.get_closest_marker("kernel") and "TRITON_INTERPRET" not in os.environ:
        pytest.skip("needs interpreter")
    return request.param


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls a command that must refuse its arguments; the error, which is all that it says."""

    def refusal(main: Callable[..., Any], *arguments: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(*arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and line.startswith("error: ")
        return line

    return refusal


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "longspec"


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank in this process."""
    from training_fixtures import one_rank_alone  # imports deepspeed

    yield from one_rank_alone(monkeypatch)
