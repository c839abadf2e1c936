"""`make demo`: one answer with and without the draft, all methods, and a training in three stages, on two CPU cores.

`python -m experiments.demo [key=value ...]` takes the settings of smollm2.yaml in small sizes; overrides come last.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from tqdm import tqdm

from experiments.answers import write_chat
from experiments.files import read_jsonl, write_atomically
from experiments.settings import Settings, load_settings
from experiments.target import TargetText
from experiments.training import CHECKPOINT, METRICS, train_stage
from longspec.cli.bench import DEFAULT_PROMPTS
from longspec.cli.comparison import METHODS, compare, result_table
from longspec.cli.pair import LoadedPair, SamplingOptions, open_pair
from longspec.cli.picture import draw_speeds
from longspec.cli.prompts import read_prompts
from longspec.cli.side_by_side import side_by_side
from longspec.errors import UserError, reports_user_errors
from longspec.inference.methods import AUTO
from longspec.signals import StopSignals

PRESET = Path(__file__).with_name("smollm2.yaml")
CHAT = "{train: 16, validation: 4, test: 0, max_turn_tokens: 32, max_new_tokens: 32, batch_size: 16}"
STEPS, EVALUATED, ROWS, ROW_TOKENS = 2, 1, 4, 256
"""Steps per stage, steps between evaluations, rows per step, and tokens per row."""
TRAINER = {
    "model.torch_dtype": "float32",
    "optimizer": "adamw",
    "evaluation.steps": EVALUATED,
    "save_steps": STEPS,
}
LEARNING_RATES = (3e-4, 1e-4, 3e-5)
"""By stage. AdamW's first steps are as large as the rate, and later stages start from a better draft."""
ONE_PROCESS = {"data.num_proc": 1, "data.num_workers": 0}
QUESTION = "What are the benefits of regular exercise?"
COMPARED = METHODS | {"chain": {"method": "seq"}}


@reports_user_errors
def main(overrides: Sequence[str] | None = None) -> None:
    """Run the demo and write summary.json and report.png. Raises UserError if there is no draft or a check fails."""
    # In float32 on the CPU, all methods give the same tokens.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # For the trainer's processes.
    os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    sizes = ("root=outputs/demo", f"chat={CHAT}")
    settings = load_settings(PRESET, [*sizes, *(sys.argv[1:] if overrides is None else overrides)])
    root, console, began = Path(settings.root), Console(highlight=False), time.perf_counter()
    with StopSignals(at_once=True):
        pair = open_pair(settings.target, settings.evaluation.draft, AUTO, applied=())
        if not pair.model.draft_is_trained:
            raise UserError(f"{pair.name}: no trained draft in drafts/; restore it, or set evaluation.draft=FOLDER")
        answers = side_by_side(pair, QUESTION, SamplingOptions(64), console, AUTO)
        comparison = compared(pair, DEFAULT_PROMPTS, 24)
        table = result_table(comparison)
        table.box = table.box if console.is_terminal else None
        console.print(table)
        training = train(settings, root / "short-training")

    summary = {"answers": answers, "comparison": comparison, **training, "seconds": time.perf_counter() - began}
    write_atomically(root / "summary.json", json.dumps(summary, indent=1) + "\n")
    draw(summary, root / "report.png")
    check(summary)
    print(f"demo: {summary['seconds']:.0f} s; see {root / 'summary.json'} and {root / 'report.png'}")


def compared(pair: LoadedPair, prompts: Sequence[str], new_tokens: int) -> dict[str, Any]:
    """The comparison of all methods, with a progress bar."""
    with tqdm(total=len(COMPARED) * len(prompts), desc="decoding", unit="answer", disable=None) as bar:
        return compare(pair, read_prompts(prompts), SamplingOptions(new_tokens), lambda _: bar.update(), COMPARED)


def train(settings: Settings, folder: Path) -> dict[str, Any]:
    """Train a fresh draft in three short stages. Returns held-out losses by stage, and a comparison with this draft."""
    shutil.rmtree(folder, ignore_errors=True)
    write_chat(settings, folder, [])
    target = TargetText.load(settings.target).path
    draft, losses = None, {}
    for (name, stage), rate in zip(settings.training.stages.items(), LEARNING_RATES, strict=True):
        overrides = stage.overrides | TRAINER | ONE_PROCESS | {"learning_rate": rate}
        short = replace(stage, answers=["chat"], replay={}, steps=STEPS, overrides=overrides)
        short = replace(short, max_length=ROW_TOKENS, tokens_per_step=ROWS * ROW_TOKENS, micro_batch=ROWS)
        train_stage(folder / name, short, settings, folder, target, draft, settings.seed)
        draft = folder / name / CHECKPOINT
        losses[name] = [line["eval_loss"] for line in read_jsonl(folder / name / METRICS) if "eval_loss" in line]
    pair = open_pair(settings.target, str(draft), AUTO, applied=())
    return {"losses": losses, "fresh draft": compared(pair, DEFAULT_PROMPTS[:1], 12)}


def draw(summary: dict[str, Any], file: Path) -> None:
    """Plot tokens/s by method and the held-out loss by stage."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    speeds, losses = figure.subplots(1, 2)
    draw_speeds(speeds, summary["comparison"])
    for name, values in summary["losses"].items():
        losses.plot([EVALUATED * (number + 1) for number in range(len(values))], values, "o-", label=name)
    losses.set(title="Training of a fresh draft", xlabel="step of the stage", ylabel="held-out loss in nats per token")
    losses.legend()
    figure.savefig(file, dpi=120)


def check(summary: dict[str, Any]) -> None:
    """Raise UserError if an output differs from vanilla's or a loss does not fall."""
    faults = [] if len({answer["text"] for answer in summary["answers"].values()}) == 1 else ["the two answers differ"]
    for name in ("comparison", "fresh draft"):
        for method, figures in summary[name]["methods"].items():
            if figures["equal_outputs"] < summary[name]["prompts"]:
                faults.append(f"{name}: the output of {method} is not vanilla's")
    losses = summary["losses"].items()
    faults += [f"{stage}: the loss does not fall" for stage, values in losses if not values[-1] < values[0]]
    if faults:
        raise UserError(f"demo: {'; '.join(faults)}")


if __name__ == "__main__":
    main()
