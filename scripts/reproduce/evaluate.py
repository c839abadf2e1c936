"""What the trained pair can do on held-out tasks: every method at every context, in one process and a fixed time."""

import hashlib
import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from longspec import generate
from longspec.inference.device import device_name, versions
from longspec.inference.methods import DEFAULT_SHAPE
from longspec.models.content import state_digest
from scripts.pipeline.files import write_json
from scripts.reproduce.baselines import BASELINES, LOOKUP_TOKENS, BaselineFailed, Transformers
from scripts.reproduce.cells import CELLS, Budget, Cell, CellLog, Measurement
from scripts.reproduce.forced import on_held_out_text, on_samples
from scripts.reproduce.pair import LoadedPair, Prompt, load_pair, sample_line
from scripts.reproduce.plan import DESCEND, EvaluationSettings
from scripts.reproduce.rounds import attention_by_context, parts_by_context
from scripts.reproduce.run import Run
from scripts.reproduce.tokens import HELD_OUT_IDS

FACTS, FORCED, ROUNDS = "facts.json", "forced.json", "rounds.json"
IDENTITY = "measured.json"
NO_TIME = "no time left"
WARM_UP_TOKENS = 16


def evaluate(folder: Path, run: Run, settings: EvaluationSettings) -> None:
    """What the run's main draft can do; see `measure_draft`."""
    measure_draft(folder, run, run.draft(settings.variant, settings.stage), settings)


def measure_draft(folder: Path, run: Run, draft: Path, settings: EvaluationSettings) -> None:
    """Everything measured, into `folder`: a line a cell in cells.jsonl, with facts.json, forced.json and rounds.json.

    draft: a checkpoint's folder. What the time did not reach is listed in facts.json; the next call goes on there,
    with all of the time again, unless draft, prompts or settings other than the time are others now.
    """
    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    pair = load_pair(run.target, draft)
    prompts = read_prompts(pair, run, settings)
    budget = Budget(settings.limit_s - settings.forced_s, [measurement.share for measurement in settings.plan])
    keep_or_clear(folder, identity_of(pair, prompts, settings))
    before = seconds_before(folder)
    log = CellLog(folder / CELLS)
    if any(row["name"] == DESCEND for row in left_out(prompts, log, settings)):
        (folder / FORCED).unlink(missing_ok=True)  # it reads these samples
    try:
        if settings.rounds and not (folder / ROUNDS).exists():
            write_json(folder / ROUNDS, rounds_by_context(pair, settings))
        measure_plan(Decoders(pair, run.target, settings), prompts, log, budget, settings)
        if not (folder / FORCED).exists():
            write_json(folder / FORCED, forced_acceptance(pair, run, settings, log, prompts))
    finally:  # what there is can be reported, also after SIGTERM
        missing = left_out(prompts, log, settings)
        facts = describe(pair, prompts, settings) | {"seconds": before + budget.passed(), "left_out": missing}
        write_json(folder / FACTS, facts)
    print(f"evaluation: {len(log.cells)} cells measured, {len(missing)} cut short or left out, see {folder / FACTS}")


def identity_of(pair: LoadedPair, prompts: list[Prompt], settings: EvaluationSettings) -> dict[str, Any]:
    """What figures that belong together have in common."""
    asked = [(prompt.task, prompt.context, prompt.id, prompt.token_ids.tolist()) for prompt in prompts]
    return {
        "draft": state_digest(pair.model.draft_model.state_dict()),
        "prompts": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
        **asdict(replace(settings, limit_s=0.0)),
    }


def keep_or_clear(folder: Path, identity: dict[str, Any]) -> None:
    """Remove what was measured with another identity."""
    path, described = folder / IDENTITY, json.dumps(identity)
    if not path.exists() or path.read_text() != described:
        for name in (CELLS, FACTS, FORCED, ROUNDS):
            (folder / name).unlink(missing_ok=True)
        path.write_text(described)


def seconds_before(folder: Path) -> float:
    """That earlier calls took for what is kept."""
    path = folder / FACTS
    return json.loads(path.read_text())["seconds"] if path.exists() else 0.0


def describe(pair: LoadedPair, prompts: list[Prompt], settings: EvaluationSettings) -> dict[str, Any]:
    """What was measured, on what."""
    found = {(prompt.task, prompt.context) for prompt in prompts}
    return {
        "device": device_name(pair.model.device),
        "dtype": str(pair.model.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in pair.model.model.parameters()),
        "draft_parameters": sum(p.numel() for p in pair.model.draft_model.parameters()),
        "layers": pair.model.config.num_hidden_layers,
        "versions": versions(),
        "absent": [f"{task}-{c}" for task in settings.tasks for c in settings.contexts if (task, c) not in found],
        "settings": asdict(settings),
    }


def rounds_by_context(pair: LoadedPair, settings: EvaluationSettings) -> dict[str, Any]:
    return {
        "parts": parts_by_context(pair, settings.contexts, DEFAULT_SHAPE),
        "attention": attention_by_context(pair, settings.contexts, DEFAULT_SHAPE),
    }


def forced_acceptance(
    pair: LoadedPair, run: Run, settings: EvaluationSettings, log: CellLog, prompts: list[Prompt]
) -> dict[str, dict[int, Any]]:
    """By context: the tree on held-out text, and on what the target emitted under the rule `descend`."""
    ids = run.root / "tokens" / HELD_OUT_IDS
    sampled = [line for line in log.cells.values() if line["name"] == DESCEND]
    rows, tokens = settings.forced_rows, settings.forced_tokens
    return {
        "held_out": {c: on_held_out_text(pair, ids, c, rows, tokens, DEFAULT_SHAPE) for c in settings.contexts},
        "sampled": {
            c: on_samples(pair, [line for line in sampled if line["context"] == c], prompts, DEFAULT_SHAPE)
            for c in settings.contexts
        },
    }


def read_prompts(pair: LoadedPair, run: Run, settings: EvaluationSettings) -> list[Prompt]:
    """The prompts of all task files that exist, as many as the plan needs and one to warm up with."""
    most = 1 + max(measurement.prompts for measurement in settings.plan)
    return [
        prompt
        for context in settings.contexts
        for task in settings.tasks
        if run.tasks(task, context).is_file()
        for prompt in pair.prompts(run.tasks(task, context), task, context, most)
    ]


class Decoders:
    """Continues a prompt in the way a measurement says: the pair's own methods, or transformers' `generate`."""

    def __init__(self, pair: LoadedPair, target: Path, settings: EvaluationSettings) -> None:
        self.pair, self.settings = pair, settings
        self.transformers = Transformers(target, pair.model)

    def sample(self, cell: Cell, prompt: Prompt, seed: int, warm_up: bool = False) -> dict[str, Any]:
        """One prompt's line in the results. warm_up: a few tokens, none of them an end."""
        how = cell.measurement
        new_tokens = min(WARM_UP_TOKENS, self.settings.new_tokens) if warm_up else self.settings.new_tokens
        if how.kind in BASELINES:
            return self.transformers.sample(how.kind, prompt, new_tokens, warm_up)
        output = generate(
            self.pair.model,
            prompt.token_ids,
            method=how.kind,
            max_new_tokens=new_tokens,
            temperature=how.temperature,
            tree_shape=how.tree_shape,
            tree_rule=how.tree_rule,
            gamma=LOOKUP_TOKENS if how.kind == "lookup" else self.settings.gamma,
            eos_token_id=() if warm_up else None,
            seed=seed,
        )
        stats, tokens = output.stats, output.new_tokens[0].tolist()
        return sample_line(self.pair.model, prompt, tokens, stats.decoded_tokens, stats.decode_s, stats.ttft_s) | {
            "rounds": stats.rounds,
            "accepted_by_depth": stats.accepted_by_depth,
            "tree_shape": list(stats.tree_shape),
        }


def cells_of(measurement: Measurement, prompts: list[Prompt]) -> Iterator[tuple[Cell, list[Prompt]]]:
    """The measurement's cells, from short contexts to long ones, with their prompts: all that there are, the first
    `measurement.prompts` of which are measured."""
    contexts = sorted({prompt.context for prompt in prompts})[-measurement.longest_contexts :]
    for context in contexts:
        for task in dict.fromkeys(prompt.task for prompt in prompts):
            mine = [prompt for prompt in prompts if (prompt.task, prompt.context) == (task, context)]
            if mine and task in (measurement.tasks or (task,)):
                for seed in range(measurement.seeds):
                    yield Cell(measurement, task, context, seed), mine


def measure_plan(
    decoders: Decoders, prompts: list[Prompt], log: CellLog, budget: Budget, settings: EvaluationSettings
) -> None:
    """Measure what is not in the log yet, as far as the time reaches."""
    planned = [list(cells_of(measurement, prompts)) for measurement in settings.plan]
    with tqdm(total=sum(map(len, planned)), desc="evaluation", unit="cell", mininterval=2) as progress:
        for cells in planned:
            budget.next_part()
            todo = [(cell, mine) for cell, mine in cells if not log.is_done(cell)]
            progress.update(len(cells) - len(todo))
            warm: set[int] = set()
            for number, (cell, mine) in enumerate(todo):
                line = measure_cell(decoders, cell, mine, log.samples(cell), budget, len(todo) - number, warm)
                if len(line["samples"]) > len(log.samples(cell)) or "failed" in line:
                    log.append(line)
                progress.update()


def left_out(prompts: list[Prompt], log: CellLog, settings: EvaluationSettings) -> list[dict[str, Any]]:
    """Of the plan what the log does not have, and why."""
    found = []
    for measurement in settings.plan:
        for cell, mine in cells_of(measurement, prompts):
            missing = min(measurement.prompts, len(mine)) - len(log.samples(cell))
            if missing:
                reason = log.cells.get(cell.key, {}).get("failed") or NO_TIME
                found.append(cell.describe() | {"prompts": missing, "reason": reason})
    return found


def seed_of(prompt: Prompt, seed: int) -> int:
    """Of what is drawn for a prompt: another one for each, as equal draws would make their figures rise and fall
    together, and the standard errors, which take samples for independent, too small."""
    return zlib.crc32(f"{prompt.task} {prompt.context} {prompt.id} {seed}".encode())


def measure_cell(
    decoders: Decoders,
    cell: Cell,
    prompts: list[Prompt],
    samples: list[dict[str, Any]],
    budget: Budget,
    cells: int,
    warm: set[int],
) -> dict[str, Any]:
    """The cell's line: `samples`, those that it has, and as many more as begin within the time for the next of `cells`.

    A context that is not among the `warm` ones is warmed up first, on a prompt behind those that are measured: there
    kernels are compiled and tree shapes chosen, for which the part's share is not charged.
    """
    measured = prompts[: cell.measurement.prompts]
    line: dict[str, Any] = cell.describe() | {"planned": len(measured), "samples": samples}
    try:
        if cell.context not in warm and budget.left() > 0:
            warm.add(cell.context)
            with budget.uncharged():
                decoders.sample(cell, prompts[: len(measured) + 1][-1], seed=0, warm_up=True)
        end = time.monotonic() + budget.share_of(cells)
        for number in range(len(samples), len(measured)):
            if time.monotonic() > end:
                break
            prompt = measured[number]
            samples.append(decoders.sample(cell, prompt, seed_of(prompt, cell.seed)))
    except BaselineFailed as error:
        line["failed"] = str(error)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the next context's caches have other sizes
    return line
