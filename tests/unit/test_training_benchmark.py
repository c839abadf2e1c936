"""The training benchmark: FLOP counts by hand, and a run on a tiny shape."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import training
from benchmarks.shapes import SHAPES
from benchmarks.training_flops import training_flops


def test_flops_of_llama_3_8b_at_32k_are_those_worked_out_by_hand() -> None:
    """One segment of T = 32768 tokens, layers of 218.1M weights, and 4 · 32 · 128 operations per pair of tokens."""
    tokens, pair = 32768, 4 * 32 * 128
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    causal = pair * tokens * (tokens + 1) / 2
    window = pair * (512 * 513 / 2 + (tokens - 512) * 513)
    draft, logits = 2 * tokens * (layer + 2 * 4096 * 4096), 2 * tokens * 128256 * 4096
    alone = training_flops(SHAPES["llama3-8b"], [tokens], tokens, reads_target=False)
    assert alone.target == 32 * (2 * tokens * layer + causal)
    assert alone.draft_forward == draft + window + causal
    assert alone.draft_backward == 2 * draft + 2 * window + causal
    assert alone.loss == 2 * logits
    assert alone.total == pytest.approx(876e12, rel=0.01)
    assert training_flops(SHAPES["llama3-8b"], [tokens], tokens, reads_target=True).loss == 3 * logits


@pytest.mark.slow
def test_the_whole_benchmark_runs(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Both stages and variants, all losses, ZeRO-3, the profile, and the efficiency against an earlier call."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(training.dist, "destroy_process_group", lambda: None)
    arguments = ["--shapes", "tiny", "--rows", "2", "--tokens", "40", "--steps", "1", "--accumulation", "1"]

    def run(*more: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["training", *arguments, *more])
        training.main()
        return capsys.readouterr().out.splitlines()

    printed = run()
    cases = json.loads(printed[-1])["cases"]
    assert [(case["stage"], case["variant"], case["loss"]) for case in cases] == [
        (stage, *kind)
        for stage in (1, 2)
        for kind in [("base", "ce"), *(("sinkpi-slicing", loss) for loss in training.LOSSES)]
    ]
    assert all(case["tokens"] == 80 and case["micro_batch_ms"] > 0 and case["tflops"] > 0 for case in cases)
    assert all(sum(case["parts"].values()) == pytest.approx(1) for case in cases)
    assert all(min(case["parts"].values()) > 0 for case in cases)
    target = sum(p.numel() for p in training.random_pair("tiny", "cpu").model.parameters()) + 512 * 64
    assert cases[0]["target_gib"] * 2**30 == 2 * target
    (tmp_path / "one.json").write_text("\n".join(printed))
    printed = run("--zero", "3", "--stages", "2", "--losses", "ce", "--profile", "--one_gpu", f"{tmp_path}/one.json")
    cases = json.loads(printed[-1])["cases"]
    assert len(cases) == 2 and all(case["efficiency"] > 0 for case in cases)
    assert any(line.strip().startswith("aten::mm ") for line in printed)
