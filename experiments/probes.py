"""Step `probe`: compare fresh drafts with one change each, trained next to each other on stage 1's text."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch

from experiments.files import claim, write_atomically
from experiments.settings import ProbeSettings, Settings
from experiments.tables import markdown
from experiments.target import TargetText
from experiments.training import answer_files, hydra_value, training_files
from longspec.cli.train import CONFIGS, ROOT
from longspec.train.config import compose_config, typed
from longspec.train.config_checks import check
from longspec.train.config_schema import TrainConfig
from longspec.train.inputs import Inputs, read_inputs
from longspec.train.probe import probe

DRAWS = 2000
"""Bootstrap samples of a standard error."""
Scores = dict[str, dict[str, list[tuple[float, float]]]]


def write_probes(settings: Settings, root: Path) -> None:
    """Run the probes that have no result yet, in order, and write their tables."""
    target = TargetText.load(settings.target).path
    for name, setting in settings.probes.items():
        file = root / "probes" / f"{name}.json"
        claim(file.with_suffix(".settings.json"), asdict(setting))
        if not file.exists():
            scores = run_probe(settings, setting, root, target)
            write_atomically(file, json.dumps(scores) + "\n")
        table = markdown(probe_table(json.loads(file.read_text())))
        write_atomically(file.with_suffix(".md"), table + "\n")
        print(f"probe {name}\n{table}", flush=True)


def run_probe(settings: Settings, setting: ProbeSettings, root: Path, target: str) -> Scores:
    """Train and score the candidates of one probe."""
    first, *others = settings.training.stages
    configs = {
        name: _config(settings, first, root, target, setting, setting.shared | changes)
        for name, changes in setting.candidates.items()
    }
    base = next(iter(configs.values()))
    inputs = read_inputs(base)
    held_out: dict[str, tuple[TrainConfig, Inputs]] = {"short": (base, inputs)}
    for stage in others[:1]:
        long = _config(settings, stage, root, target, setting)
        rows = read_inputs(long)
        held_out["long"] = long, replace(rows, held_out=rows.rows)
    return probe(configs, inputs, held_out, "cuda" if torch.cuda.is_available() else "cpu")


def _config(
    settings: Settings,
    stage_name: str,
    root: Path,
    target: str,
    setting: ProbeSettings,
    changes: dict[str, Any] | None = None,
) -> TrainConfig:
    """The trainer's configuration of a stage. changes: keys of a candidate; None to read the held-out rows only."""
    stage = settings.training.stages[stage_name]
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
    config = typed(compose_config(ROOT / CONFIGS, stage.config, [f"{k}={hydra_value(v)}" for k, v in values.items()]))
    check(config)
    return config


def probe_table(scores: Scores) -> pandas.DataFrame:
    """One row per candidate: tokens per round of a chain, and the difference to the first one in percent.

    Standard errors are bootstrapped over held-out rows, the same for both drafts.
    """
    first = next(iter(scores.values()))
    rows = []
    for name, groups in scores.items():
        row: dict[str, Any] = {"candidate": name}
        for group, pairs in groups.items():
            own, other = np.array(pairs), np.array(first[group])
            draws = np.random.default_rng(0).integers(len(own), size=(DRAWS, len(own)))
            ratio = _length(own[draws].sum(1)) / _length(other[draws].sum(1))
            row[group] = f"{_length(own.sum(0)):.3f}"
            change = _length(own.sum(0)) / _length(other.sum(0)) - 1
            row[f"{group}, relative"] = "" if name == next(iter(scores)) else f"{change:+.1%} ± {ratio.std():.1%}"
        rows.append(row)
    return pandas.DataFrame(rows)


def _length(sums: Any) -> Any:
    """Tokens per round from sums [..., 2] of correct tokens and chains."""
    return 1 + sums[..., 0] / sums[..., 1]
