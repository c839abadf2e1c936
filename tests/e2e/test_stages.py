"""A stage of the experiment as it runs on one GPU, here on the CPU: without a launcher, when its turn is there."""

import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock

import pytest
from training_fixtures import NEEDS_MUON, make_target, metrics, write_texts

from longspec.train.config import CONFIG_NAME, read_config_file
from longspec.train.logging import METRICS_NAME
from scripts.pipeline.stages import CHECKPOINT, StageSettings, draft_weights, train_stage
from scripts.pipeline.warm_start import write_warm_start

LOADED = "end bf16_ optimizer"
"""What DeepSpeed prints when the engine is there."""


@pytest.mark.slow
@NEEDS_MUON
def test_a_stage_trains_in_its_turn(tmp_path: Path) -> None:
    """As one rank, whatever the machine has, with Muon, from a warm start; all is loaded by then, no step taken. The
    turn is given back."""
    make_target(tmp_path / "target")
    write_warm_start(tmp_path / "start", tmp_path / "target", window=512)
    write_texts(tmp_path / "data.jsonl")
    turn, folder = Lock(), tmp_path / "stage1"
    folder.mkdir()
    log = folder / "log.txt"
    given = {"optimizer": "muon", "model.torch_dtype": "bfloat16", "data.chat_format": "published"}
    stage = StageSettings(1, "llama", 3, 1e-2, 128, rows_a_step=4, accumulation=2, overrides=given)
    data, target, start = (tmp_path / name for name in ("data.jsonl", "target", "start"))
    with ThreadPoolExecutor(1) as pool:
        with turn:
            trained = pool.submit(train_stage, folder, data, target, start, stage, turn=turn)
            deadline = time.monotonic() + 90
            while LOADED not in (log.read_text() if log.exists() else "") and time.monotonic() < deadline:
                assert not wait([trained], timeout=0.05).done
            assert not wait([trained], timeout=3).done  # in which it would take its three steps
            assert LOADED in log.read_text() and not (folder / METRICS_NAME).exists()
        trained.result()
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3]
    assert draft_weights(folder).is_file() and not turn.locked()
    saved = read_config_file(folder / CHECKPOINT / CONFIG_NAME)
    assert saved.per_device_train_batch_size * saved.gradient_accumulation_steps == stage.rows_a_step
