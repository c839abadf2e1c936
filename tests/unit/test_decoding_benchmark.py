"""The benchmark of decoding on tiny shapes: parts of a round, other implementations, acceptance files and tables."""

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

from benchmarks import parts, transformers_baseline
from benchmarks.acceptance import Key, key, read_acceptance
from benchmarks.decoding import Measured, filled_batch, main, settings
from benchmarks.parts import parts_of_round
from benchmarks.read_bandwidth import LAUNCHES, read_sums
from benchmarks.shapes import random_pair
from benchmarks.tables import round_name, tables
from benchmarks.transformers_baseline import dynamic_ms, static_ms
from experiments.claims import Samples
from longspec.errors import UserError
from longspec.inference.engine.rounds import Rounds
from longspec.inference.methods import DEFAULT_SHAPE
from longspec.inference.runner import Runner
from longspec.models.glide import GlideMixin
from longspec.pipeline.report import by_method
from longspec.pipeline.settings import MethodSettings

SHAPE = [2, 3]
COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "results" / "smollm2-135m" / "summary.json"
OPTIONS = {"temperature": 0.0, "tree_shape": SHAPE, "gamma": 4, "tree_nodes": None, "lookup_branches": False}


@pytest.fixture(scope="module")
def pair() -> GlideMixin:
    return random_pair("tiny", "cpu", torch.float32)


def filled(pair: GlideMixin, method: str, **changes: Any) -> Rounds:
    batch, mode = filled_batch(Runner(pair), [20], method, Namespace(**OPTIONS | changes))
    return batch.state(mode, slice(0, 1))


@pytest.mark.parametrize(("block", "steps", "warps"), [*LAUNCHES, (64, 3, 1)])
def test_the_read_kernel_reads_every_number_once(block: int, steps: int, warps: int, device: str) -> None:
    x = torch.randint(-8, 8, (2 * 3 * block * steps,), generator=torch.Generator().manual_seed(0))
    x = x.to(device, torch.float16)
    assert torch.equal(read_sums(x, block, steps, warps), x.float().view(-1, block * steps).sum(1))


@pytest.mark.parametrize(
    ("changes", "nodes"),
    [({}, 6), ({"tree_nodes": 4}, 4), ({"tree_nodes": 4, "lookup_branches": True}, 4)],
)
def test_the_parts_of_a_round_add_up_to_it_with_a_negative_residual(
    pair: GlideMixin, changes: dict[str, Any], nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that take 5 ms alone do not fit into a round of 9 ms. Only "accept + compact" changes the cache."""
    lengths: list[int] = []

    def timed(work: Callable[[], object]) -> float:
        work()
        lengths.append(int(engine.cache.lengths))
        return 5.0

    monkeypatch.setattr(parts, "captured_ms", timed)
    engine = filled(pair, "tree", **changes)
    assert engine.drafter.nodes == nodes
    with torch.no_grad():
        found = parts_of_round(engine, 9.0)
    assert sum(found.values()) == pytest.approx(9.0)
    assert found["accept + compact"] == 5.0 and found["residual"] == -6.0
    assert set(lengths[:-1]) == {20} and lengths[-1] > 20


def test_transformers_decodes_on_the_pairs_own_weights_with_both_caches(pair: GlideMixin) -> None:
    attention = pair.config._attn_implementation
    assert static_ms(pair, 40) > 0 and pair.config._attn_implementation == attention
    assert dynamic_ms(pair, 40) > 0 if torch.cuda.is_available() else True


def test_a_stall_during_a_short_generation_does_not_count(pair: GlideMixin, monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = iter([0, 0, 0, 5] + [0] * 5)  # the warm-up, and the first that is measured
    monkeypatch.setattr(
        transformers_baseline, "generate_seconds", lambda *arguments: arguments[-1] * 1e-3 + next(stalls)
    )
    assert static_ms(pair, 40) == pytest.approx(1.0)


def summary(folder: Path, shape: list[int], tokens: int, rounds: int, **changes: Any) -> Path:
    path = folder / f"summary-{tokens}.json"
    config = {"tree_shape": shape, "gamma": 4, "draft": "draft", "temperature": 0.0}
    path.write_text(
        json.dumps(
            {"method": "tree", "model": "m", "decoded_tokens": tokens, "rounds": rounds, "config": config} | changes
        )
    )
    return path


def test_acceptance_is_pooled_over_evaluations_of_one_pair(tmp_path: Path) -> None:
    files = [summary(tmp_path, SHAPE, 30, 10), summary(tmp_path, SHAPE, 20, 10), summary(tmp_path, [1], 9, 6)]
    chain = summary(tmp_path, SHAPE, 8, 4, method="seq")
    assert read_acceptance([*files, chain]) == {
        Key("tree", 0.0, (2, 3)): 2.5,
        Key("tree", 0.0, (1,)): 1.5,
        Key("seq", 0.0, (4,)): 2.0,
    }
    assert read_acceptance([]) == {}
    with pytest.raises(UserError, match="one pair"):
        read_acceptance([*files, summary(tmp_path, SHAPE, 31, 10, model="other")])


@pytest.mark.parametrize(
    "changes", [{"temperature": 1.0}, {"tree_nodes": 4}, {"lookup_branches": True}, {"tree_shape": [3]}]
)
def test_runs_that_accept_differently_are_not_pooled(changes: dict[str, Any]) -> None:
    assert key("tree", OPTIONS) != key("tree", OPTIONS | changes)


def experiment(folder: Path) -> Path:
    """The summary of an experiment that measured a tree at T = 0 and 1, and with 4 nodes at T = 0 only."""
    sample = {"task": "chat", "context": 0, "seed": 0, "id": "a", "decode_s": 1.0, "rounds": 10, "loops": False}
    lengths = {("tree", 0.0): 40, ("tree", 1.0): 28, ("tree-4", 0.0): 38, ("lookup-tree", 0.0): 47}
    lines = [
        sample | {"method": method, "temperature": temperature, "decoded_tokens": tokens}
        for (method, temperature), tokens in lengths.items()
    ]
    # A second task counts in the overall figure, an output that loops does not.
    lines += [lines[0] | {"task": "lcc", "decoded_tokens": 30}, lines[0] | {"loops": True, "decoded_tokens": 60}]
    methods = [
        MethodSettings("tree", temperatures=[0.0, 1.0], tree_shape=SHAPE),
        MethodSettings("tree-4", "tree", [0.0, 1.0], tree_shape=SHAPE, tree_nodes=4),
        MethodSettings("lookup-tree", "tree", tree_shape=SHAPE, tree_nodes=4, lookup_branches=True),
    ]
    evaluation = {"methods": [asdict(method) for method in methods]}
    path = folder / "experiment.json"
    table = by_method(Samples(pandas.DataFrame(lines))).to_dict("records")
    path.write_text(json.dumps({"tables": {"Methods": table}, "settings": {"evaluation": evaluation}}))
    return path


def test_rows_have_the_experiments_figure_for_their_nodes_and_temperature(pair: GlideMixin, tmp_path: Path) -> None:
    """Whether the draft has a list or not. The tree of 4 nodes at T = 1 was not measured."""
    lengths = read_acceptance([experiment(tmp_path)])
    options = OPTIONS | {"contexts": [40], "batches": [], "methods": ["tree"], "temperature": [0.0, 1.0]}
    found = [
        (setting.temperature, setting.tree_nodes, lengths.get(key(setting.method, vars(setting))))
        for _, setting in settings(Namespace(**options | {"tree_nodes": [0, 4], "draft_vocabulary": [0, 9]}), pair)
    ]
    pair.draft_model.set_vocabulary(None)
    assert found == 2 * [(0.0, None, 3.5), (0.0, 4, 3.8), (1.0, None, 2.8), (1.0, 4, None)]


def test_the_committed_experiment_has_the_figures_of_the_documented_trees() -> None:
    lengths = read_acceptance([COMMITTED])
    whole, part = OPTIONS | {"tree_shape": DEFAULT_SHAPE}, OPTIONS | {"tree_shape": DEFAULT_SHAPE, "tree_nodes": 32}
    assert 1 < lengths[key("tree", whole | {"temperature": 1.0})] < lengths[key("tree", whole)] < 6
    assert 1 < lengths[key("tree", part)] < lengths[key("tree", whole)]


def test_an_experiment_is_not_pooled_with_other_files(tmp_path: Path) -> None:
    """Its figures come without the number of rounds."""
    other = summary(tmp_path, SHAPE, 30, 10)
    with pytest.raises(UserError, match=r"give one experiment, or evaluations of one pair, not .* and the experiment"):
        read_acceptance([experiment(tmp_path), other])


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"tables": {}}', '{"tables": {"Methods": [1]}}'])
def test_a_file_of_neither_kind_is_one_clear_line_before_any_work(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """content: None for a file that does not exist."""
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr("sys.argv", ["benchmarks.decoding", "--acceptance", str(path)])
    with pytest.raises(SystemExit):
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --acceptance {path}: not the summary.json of an evaluation or an experiment")
    assert line.endswith("give a file that inference_long-bench.py or `longspec draft` wrote")


def result(acceptance_length: float | None) -> dict[str, Any]:
    row = Measured("llama", 4096, 2, "tree", 0.0, 32, None, 8.0, 5.0, 1.0, {"verify": 8.5, "residual": -0.5})
    row.acceptance_length = acceptance_length
    shown = vars(row) | {"ratio": row.ratio, "tokens_per_s": row.tokens_per_s}
    return {"rounds": [shown], "peers": [{"shape": "llama", "context": 4096, "name": "other", "ms": None}]}


def test_tables_have_every_part_and_speeds_only_at_a_measured_acceptance() -> None:
    with_speed, without = tables(result(3.25)), tables(result(None))
    assert "| llama | 4096 | 2 | tree, 32 nodes | 8.00 | 5.00 | 1.60 | 3.25 | 812 |" in with_speed
    mixed = tables(result(3.25) | {"rounds": result(3.25)["rounds"] + result(None)["rounds"]})
    assert "| 1.60 | 3.25 | 812 |" in mixed and "| 1.60 | – | – |" in mixed
    assert "tokens/s" not in without and "| llama | 4096 | 2 | tree, 32 nodes | 8.00 | 5.00 | 1.60 |" in without
    assert "| llama | 4096 | 2 | tree, 32 nodes | 8.50 | -0.50 | 8.00 |" in without and "| other | – |" in without


def test_the_name_of_a_round_tells_apart_the_settings_of_one_run() -> None:
    row = {"method": "tree", "nodes": 32, "columns": 34816, "temperature": 1.0}
    assert round_name(row) == "tree, 32 nodes, 34816 columns, T = 1"
    assert round_name({"method": "vanilla", "nodes": 1, "columns": None, "temperature": 0.0}) == "vanilla"
    assert round_name({"method": "tree", "temperature": 0.0}) == "tree", "the output of an earlier version"


def test_options_with_several_values_are_combined_where_they_apply(pair: GlideMixin) -> None:
    options = {"contexts": [40], "batches": [2], "batch_context": 80, "methods": ["vanilla", "seq", "tree"]}
    lists = {"temperature": [0.0, 1.0], "tree_nodes": [0, 4], "draft_vocabulary": [0, 9]}
    found = []
    for lengths, setting in settings(Namespace(**options | lists), pair):
        vocabulary = pair.draft_model.vocabulary
        size = 0 if vocabulary is None else len(vocabulary)
        found.append((len(lengths), setting.method, setting.temperature, setting.tree_nodes, size))
    pair.draft_model.set_vocabulary(None)
    both = [(temperature, size) for size in (0, 9) for temperature in (0.0, 1.0)]
    trees = [(rows, "tree", t, nodes, size) for rows in (1, 2) for t, size in both for nodes in (None, 4)]
    chains = [(1, "seq", t, None, size) for t, size in both]
    assert sorted(found, key=str) == sorted(
        [*trees, *chains, *((rows, "vanilla", t, None, 0) for rows in (1, 2) for t in (0.0, 1.0))], key=str
    )
