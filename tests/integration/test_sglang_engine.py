"""GLIDE on SGLang gives the answers of SGLang without speculation, and samples from the same distribution."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import make_pair
from sglang_float32 import environment

from longspec.models.draft_layer import DraftOptions
from longspec.models.draft_saving import save_draft_file

RUN = Path(__file__).parents[1] / "sglang_run.py"
VOCABULARY = 128  # two GPUs split multiples of this without padding
OPTIONS = DraftOptions(window=32, kv_layers=(1,), target_feature=True)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Target and draft; heads of 64, which all attention backends have."""
    pytest.importorskip("sglang")
    if not any(point.value == "longspec.sglang:register" for point in entry_points(group="sglang.srt.plugins")):
        pytest.skip("longspec is not installed with its entry point for SGLang: pip install -e .")
    folder = tmp_path_factory.mktemp("sglang")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
    model = make_pair(folder / "target", "llama", options=OPTIONS, **sizes)
    save_draft_file(model.draft_model.state_dict(), folder / "draft.pth", OPTIONS)
    return str(folder / "target"), str(folder / "draft.pth")


def answers(pair: tuple[str, str], calls: list[Any], speculates: bool, **further: Any) -> dict[str, Any]:
    """The engine's answers to calls, each a list of prompts and its sampling parameters."""
    options: dict[str, Any] = {
        "model_path": pair[0],
        "dtype": "float32",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "chunked_prefill_size": 32,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 8192,
        "max_running_requests": 16,
        "random_seed": 1,
    }
    if speculates:
        options |= {"speculative_algorithm": "GLIDE", "speculative_draft_model_path": pair[1]}
        options |= {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 10}
    options, variables = options | further, environment(Path(pair[0]).parent)
    if options.get("tp_size", 1) > torch.cuda.device_count():  # graphs cannot capture gloo
        variables |= {"SHARE_ONE_GPU": "1", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
        options |= {"disable_cuda_graph": True, "disable_custom_all_reduce": True}
    task, command = json.dumps({"options": options, "calls": calls}), [sys.executable, str(RUN)]
    done = subprocess.run(command, input=task, capture_output=True, text=True, timeout=500, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "further",
    [
        pytest.param({}, id="default"),
        pytest.param({"max_total_tokens": 700}, id="few slots"),
        pytest.param({"disable_cuda_graph": True}, id="no graphs"),
        pytest.param({"tp_size": 2}, id="two ranks"),
    ],
)
def test_greedy_answers_are_those_without_speculation(pair: tuple[str, str], further: dict[str, Any]) -> None:
    """With shared prefixes, prefill in chunks, batches of unlike lengths and too few slots for all of them."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randint(1, VOCABULARY, (70,), generator=generator).tolist()
    ends = [torch.randint(1, VOCABULARY, (row,), generator=generator).tolist() for row in range(9)]
    prompts = [common[: 5 + 8 * row] + end for row, end in enumerate(ends)]
    greedy = [{"temperature": 0.0, "max_new_tokens": 20 + 9 * row, "ignore_eos": True} for row in range(9)]
    calls = [[prompts, greedy], [prompts[::-1], greedy]]
    plain, drafted = (answers(pair, calls, speculates, **further) for speculates in (False, True))
    assert drafted["ids"] == plain["ids"]
    assert all(drafted["rounds"])


def test_sampled_tokens_have_the_distribution_without_speculation(pair: tuple[str, str]) -> None:
    """A chi-square test of each of the first tokens, at 1e-4 over both samples together."""
    prompt, count = list(range(1, 40)), 4000
    sampling = {"temperature": 1.0, "max_new_tokens": 4, "ignore_eos": True}
    samples = []
    for speculates in (False, True):
        ids = answers(pair, [[[prompt] * count, [sampling] * count]], speculates)["ids"][0]
        samples.append(torch.tensor(ids)[:, -4:])
    for position in range(4):
        counts = torch.stack([torch.bincount(sample[:, position], minlength=VOCABULARY) for sample in samples]).double()
        frequent = counts.sum(0) >= 20
        counts = torch.cat([counts[:, frequent], counts[:, ~frequent].sum(1, keepdim=True)], 1)
        expected = counts.sum(0) / 2
        statistic = float(((counts - expected) ** 2 / expected.clamp(min=1)).sum())
        freedom = counts.shape[1] - 1
        # The normal approximation of chi-square at 1e-4 (Wilson and Hilferty).
        bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
        assert statistic < bound, (position, statistic, bound)
