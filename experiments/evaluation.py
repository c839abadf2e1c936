"""Step `evaluate`: decode held-out prompts with every method, in one process per device."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from experiments.cells import Cell, SampleFile, cells, prompt_digest
from experiments.diagnostics import forced_acceptance
from experiments.files import claim
from experiments.processes import running
from experiments.settings import FORCED, HEAD_TOKENS, MethodSettings, Settings
from experiments.target import TargetText
from experiments.training import final_draft
from longspec import generate, load_pair
from longspec.data.prompts import loops
from longspec.errors import UserError
from longspec.inference.device import device_name, versions
from longspec.inference.options import WITHOUT_FILE
from longspec.models.content import state_digest

FACTS = "settings.json"
"""File with the draft, target, device and versions that all samples of a folder share."""
WARM_UP_TOKENS = 16


def evaluation_folder(root: Path, seed: int | None = None) -> Path:
    """Folder with the samples of the main draft, or of the recipe's draft with another seed."""
    return root / ("evaluation" if seed is None else f"evaluation-seed{seed}")


def evaluate(settings: Settings, root: Path, options: Sequence[str], part: str | None = None) -> None:
    """Measure the missing samples: all methods with the main draft, and the greedy tree with the drafts of other seeds.

    On several GPUs, one process per GPU measures a part of the grid. options: the command's options, which are passed
    on to these processes. part: NUMBER/COUNT, the part that such a process measures.

    Raises UserError if the draft does not exist or a process fails.
    """
    devices = torch.cuda.device_count()
    if part is None and devices > 1:
        return _start_parts(options, devices)
    number, parts = map(int, (part or "0/1").split("/"))
    logging.disable_progress_bar()
    draft = settings.evaluation.draft or str(final_draft(settings, root))
    if not Path(draft).exists():
        raise UserError(f"{draft}: no such draft; run the step train first, or set evaluation.draft")

    grid = list(cells(settings.evaluation, root))
    # All methods of a task and context run on the same device, because they are compared.
    groups = list(dict.fromkeys((cell.task, cell.context) for cell in grid))
    own_cells = [cell for cell in grid if groups.index((cell.task, cell.context)) % parts == number]
    measure(settings, draft, evaluation_folder(root), own_cells, number)

    if settings.evaluation.draft is None:
        main_cells = [cell for cell in own_cells if is_main(cell)]
        for seed in settings.training.seeds[1:]:
            draft = str(final_draft(settings, root, seed=seed))
            if Path(draft).exists():
                measure(settings, draft, evaluation_folder(root, seed), main_cells, number)


def is_main(cell: Cell) -> bool:
    """Whether a cell belongs to the main method: the default tree at temperature 0."""
    return cell.method.name == "tree" and cell.temperature == 0


def measure(settings: Settings, draft: str, folder: Path, grid: list[Cell], number: int) -> None:
    """Measure the missing samples of one draft. number: index of this device among those that write to `folder`.

    Raises UserError if `folder` holds samples of a different draft, target, device or version.
    """
    decoder = Decoder(settings.target, draft)
    if number == 0:
        facts = {"draft": state_digest(decoder.model.draft_model.state_dict()), "target": settings.target}
        claim(folder / FACTS, facts | {"device": device_name(decoder.model.device), "versions": versions()})

    samples = SampleFile(folder, number)
    missing = [(cell, samples.missing(cell)) for cell in grid]
    with tqdm(total=sum(len(prompts) for _, prompts in missing), desc=folder.name, unit="sample") as bar:
        warmed_up: set[tuple[str, float, int]] = set()
        for cell, prompts in missing:
            kernels = cell.method.name, cell.temperature, cell.context
            is_forced = cell.method.kind == FORCED
            if prompts and kernels not in warmed_up and not is_forced:  # forced rounds are not timed
                warmed_up.add(kernels)
                decoder.sample(cell, cell.prompts[0], warm_up=True)
            for prompt in prompts:
                answer = samples.answer(cell, prompt) if is_forced else []
                samples.append(decoder.sample(cell, prompt, answer))
                bar.update()


def _start_parts(options: Sequence[str], devices: int) -> None:
    """Run one process per device and wait for all of them. Raises UserError if one fails."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(devices)]
    with ExitStack() as stack:
        children = []
        for number, name in enumerate(names):
            command = [sys.executable, "-m", "experiments", "evaluate", *options, "--part", f"{number}/{devices}"]
            child = running(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": name})
            children.append(stack.enter_context(child))
        codes = [child.wait() for child in children]
    if any(codes):
        raise UserError(f"evaluate: the process of a device ended with code {max(codes, key=abs)}")


def shortened(ids: list[int], tokens: int | None) -> list[int]:
    """The first HEAD_TOKENS and the last ids of a prompt, `tokens` in all; None for the whole prompt."""
    return ids if tokens is None or len(ids) <= tokens else ids[:HEAD_TOKENS] + ids[HEAD_TOKENS - tokens :]


class Decoder:
    """Continues prompts with the methods of `longspec.generate` and with FORCED."""

    def __init__(self, target: str, draft: str) -> None:
        self.text = TargetText.load(target)
        self.model, _ = load_pair(target, draft=draft)

    def sample(
        self, cell: Cell, prompt: dict[str, Any], answer: Sequence[int] = (), warm_up: bool = False
    ) -> dict[str, Any]:
        """Decode a prompt and return its sample.

        answer: the token ids that method FORCED decodes. warm_up: generate a few tokens without stopping at EOS, to
        compile kernels and choose tree shapes.
        """
        ids = shortened(self.text.prompt_ids(prompt), cell.method.last_tokens)
        began = time.perf_counter()
        if cell.method.kind == FORCED:
            figures = self._forced(cell.method, ids, answer)
        else:
            figures = self._generate(cell, ids, cell.prompt_seed(prompt["id"]), warm_up)
        tokens = figures["token_ids"]
        return {
            **cell.key,
            "id": prompt["id"],
            "prompt": prompt_digest(prompt),
            "prompt_tokens": len(ids),
            "new_tokens": len(tokens),
            "wall_s": time.perf_counter() - began,
            "loops": loops(tokens),
            **figures,
        }

    def _forced(self, method: MethodSettings, ids: list[int], answer: Sequence[int]) -> dict[str, Any]:
        text = torch.tensor([*ids, *answer], device=self.model.device)
        sums = forced_acceptance(self.model, [text], [len(ids)], method.tree_shape)
        figures = {"rounds": sums["rounds"], "decoded_tokens": sums["tokens"], "bound": sums["bound"]}
        return figures | {"last_tokens": method.last_tokens, "token_ids": list(answer)}

    def _generate(self, cell: Cell, ids: list[int], seed: int, warm_up: bool) -> dict[str, Any]:
        method = cell.method
        output = generate(
            self.model,
            torch.tensor([ids], device=self.model.device),
            method=method.kind,
            max_new_tokens=min(WARM_UP_TOKENS, cell.max_new_tokens) if warm_up else cell.max_new_tokens,
            temperature=cell.temperature,
            tree_shape=method.tree_shape,
            tree_nodes=method.tree_nodes,
            lookup_branches=method.lookup_branches,
            tree_rule=method.tree_rule,
            gamma=method.gamma,
            eos_token_id=() if warm_up else None,
            seed=seed,
            **WITHOUT_FILE,
        )
        names = ("rounds", "decoded_tokens", "decode_s", "ttft_s", "accepted_by_depth", "tree_shape", "rounds_by_plan")
        figures = {name: value for name, value in asdict(output.stats).items() if name in names}
        return figures | {"token_ids": output.new_tokens[0].tolist()}
