"""Probes: fresh drafts with one change each, trained next to each other on stage 1's text, to choose what it trains."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas
import torch

from longspec.cli.train import CONFIGS, ROOT
from longspec.errors import UserError
from longspec.inference.registry import choose_pair
from longspec.pipeline.files import answer_files, claim, training_files
from longspec.pipeline.processes import hydra_overrides, share_work
from longspec.pipeline.samples import Figure, markdown, pooled
from longspec.pipeline.settings import ProbeSettings, Settings, StageSettings
from longspec.ranks.replicas import Replicas
from longspec.replacing import write_atomically
from longspec.train.config import load_config
from longspec.train.config_schema import TrainConfig
from longspec.train.inputs import Inputs, read_inputs
from longspec.train.probe import probe

Scores = dict[str, dict[str, list[tuple[float, float]]]]
"""(correct tokens, chains) per held-out row, by candidate and by set of rows: short, and long with two stages."""


def probe_file(root: Path, name: str) -> Path:
    return root / "probes" / f"{name}.json"


def write_probes(settings: Settings, root: Path) -> None:
    """Run the probes that have no result yet, in order, and write their tables."""
    for name, setting in settings.probes.items():
        facts = asdict(setting)
        del facts["adopt"]
        claim(probe_file(root, name).with_suffix(".settings.json"), facts)
    if not all(probe_file(root, name).exists() for name in settings.probes):
        share_work(run_probes, settings, root, 1)
    for name in settings.probes:
        table = markdown(probe_table(read_scores(root, name)))
        write_atomically(probe_file(root, name).with_suffix(".md"), table + "\n")
        print(f"probe {name}\n{table}", flush=True)


def run_probes(settings: Settings, root: Path, replicas: Replicas) -> None:
    """Train and score the candidates of the probes without a result."""
    target = choose_pair(settings.target).target
    for name, setting in settings.probes.items():
        if not probe_file(root, name).exists():
            write_atomically(probe_file(root, name), json.dumps(_run(settings, setting, root, target)) + "\n")


def read_scores(root: Path, name: str) -> Scores:
    return json.loads(probe_file(root, name).read_text())


def _run(settings: Settings, setting: ProbeSettings, root: Path, target: str) -> Scores:
    """Train and score the candidates of one probe."""

    def config_of(stage: StageSettings, changes: dict[str, Any] | None = None) -> TrainConfig:
        """That of the trainer. changes: keys of a candidate; None to read the held-out rows only."""
        held_out = answer_files(root, stage.answers, "validation")
        values = {
            "model_name_or_path": target,
            "draft_model_name_or_path": None,
            "output_dir": str(root / "probes"),
            "seed": settings.seed,
            "max_steps": setting.steps,
            "data.max_length": stage.max_length,
            "data.cache_dir": str((root / "cache").absolute()),
            "data.files": held_out if changes is None else training_files(root, stage),
            "evaluation.files": held_out if changes is not None else None,
            "evaluation.rows": setting.rows[0 if changes is not None else 1],
            "per_device_train_batch_size": stage.tokens_per_step // stage.max_length,
            **stage.overrides,
            **(changes or {}),
        }
        config = load_config(["-cp", str(ROOT / CONFIGS), "-cn", stage.config, *hydra_overrides(values)])
        assert config is not None
        return config

    first, *others = settings.training.stages.values()
    configs = {name: config_of(first, setting.shared | changes) for name, changes in setting.candidates.items()}
    base = next(iter(configs.values()))
    inputs = read_inputs(base)
    held_out: dict[str, tuple[TrainConfig, Inputs]] = {"short": (base, inputs)}
    for stage in others[:1]:
        long = config_of(stage)
        rows = read_inputs(long)
        held_out["long"] = long, replace(rows, held_out=rows.rows)
    return probe(configs, inputs, held_out, "cuda" if torch.cuda.is_available() else "cpu")


def best_candidate(scores: Scores) -> str:
    """The candidate with the largest product of its tokens per round over the sets of held-out rows."""
    return max(scores, key=lambda name: math.prod(_length(pairs).value for pairs in scores[name].values()))


def adopted(settings: Settings, root: Path) -> dict[str, Any]:
    """The values that stage 1 takes from the best candidate of a probe. Raises UserError if it has no result yet."""
    for name, setting in settings.probes.items():
        if setting.adopt:
            if not probe_file(root, name).exists():
                raise UserError(f"{probe_file(root, name)}: no such file; stage 1 takes its layers from this probe")
            return setting.candidates[best_candidate(read_scores(root, name))]
    return {}


def probe_table(scores: Scores) -> pandas.DataFrame:
    """Tokens per round of a chain by candidate, and the difference to the first one, bootstrapped over rows."""
    first = next(iter(scores))
    rows = []
    for name, groups in scores.items():
        row: dict[str, Any] = {"candidate": name}
        for group, pairs in groups.items():
            ratio = _length(pairs, scores[first][group])
            row[group] = f"{_length(pairs).value:.3f}"
            row[f"{group}, relative"] = "" if name == first else f"{ratio.value - 1:+.1%} ± {ratio.error:.1%}"
        rows.append(row)
    return pandas.DataFrame(rows)


def _length(*scores: list[tuple[float, float]]) -> Figure:
    """Tokens per round of a chain, 1 + correct tokens / chains; with a second draft's scores, divided by its own."""
    columns = [
        [correct + chains for correct, chains in pairs] if total else [chains for _, chains in pairs]
        for pairs in scores
        for total in (True, False)
    ]
    return pooled(columns, [str(number) for number in range(len(scores[0]))])
