"""Step `evaluate`: every method on held-out prompts, in one process per device that loads the pair once."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, StaticCache
from transformers.utils import logging

from experiments.cells import Cell, SampleFile, cells, prompt_digest
from experiments.files import claim
from experiments.processes import running
from experiments.settings import STATIC, Settings
from experiments.target import TargetText
from experiments.training import final_draft
from longspec import generate, load_pair
from longspec.data.prompts import loops
from longspec.errors import UserError
from longspec.inference.device import device_name, versions
from longspec.inference.shape_cache import draft_fingerprint

FACTS = "settings.json"
"""What all samples of a folder were measured with."""
WARM_UP_TOKENS = 16
STATIC_STEP = 256
"""Sizes of static caches are multiples of it: transformers compiles its step once per size."""


def evaluation_folder(root: Path, seed: int | None = None) -> Path:
    """Samples of the main draft, or of the recipe's draft of another seed."""
    return root / ("evaluation" if seed is None else f"evaluation-seed{seed}")


def evaluate(settings: Settings, root: Path, options: Sequence[str], part: str | None = None) -> None:
    """Measure the samples that are missing: all methods with the main draft, the greedy tree with the other seeds'.

    options: of the command, for the processes that it starts on several GPUs, one for each. part: NUMBER/COUNT, the
    part of the grid of such a process.
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
    # All methods of one task and context run on the same device, because they are compared.
    places = list(dict.fromkeys((cell.task, cell.context) for cell in grid))
    mine = [cell for cell in grid if places.index((cell.task, cell.context)) % parts == number]
    # transformers comes last and by context: it compiles a step per cache size, and a failure there costs nothing else.
    mine.sort(key=lambda cell: (1, cell.context) if cell.method.kind == STATIC else (0, 0))
    measure(settings, draft, evaluation_folder(root), mine, number)
    if settings.evaluation.draft is None:
        for seed in settings.training.seeds[1:]:
            draft, greedy = str(final_draft(settings, root, seed=seed)), [cell for cell in mine if is_main(cell)]
            if Path(draft).exists():
                measure(settings, draft, evaluation_folder(root, seed), greedy, number)


def is_main(cell: Cell) -> bool:
    """Whether a cell is of the method that the targets are about: the default tree at temperature 0."""
    return cell.method.name == "tree" and cell.temperature == 0


def measure(settings: Settings, draft: str, folder: Path, grid: list[Cell], number: int) -> None:
    """Measure the missing samples of one draft. number: index of this device among those that write to `folder`."""
    most_new_tokens = max(task.max_new_tokens for task in settings.evaluation.tasks.values())
    decoder = Decoder(settings.target, draft, most_new_tokens)
    if number == 0:
        facts = {"draft": draft_fingerprint(decoder.model), "target": settings.target}
        claim(folder / FACTS, facts | {"device": device_name(decoder.model.device), "versions": versions()})
    samples = SampleFile(folder, number)
    missing = [(cell, samples.missing(cell)) for cell in grid]
    with tqdm(total=sum(len(prompts) for _, prompts in missing), desc=folder.name, unit="sample") as bar:
        warm: set[tuple[str, float, int]] = set()
        for cell, prompts in missing:
            kernels = cell.method.name, cell.temperature, cell.context
            if prompts and kernels not in warm:
                warm.add(kernels)
                decoder.sample(cell, cell.prompts[0], warm_up=True)
            for prompt in prompts:
                samples.append(decoder.sample(cell, prompt))
                bar.update()


def _start_parts(options: Sequence[str], devices: int) -> None:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(number) for number in range(devices)]
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                running(
                    [sys.executable, "-m", "experiments", "evaluate", *options, "--part", f"{number}/{devices}"],
                    env=os.environ | {"CUDA_VISIBLE_DEVICES": name},
                )
            )
            for number, name in enumerate(names)
        ]
        codes = [child.wait() for child in children]
    if any(codes):
        raise UserError(f"evaluate: a device's process ended with code {max(codes, key=abs)}")


class Decoder:
    """Continues prompts with the pair's own methods and with transformers' `generate`."""

    def __init__(self, target: str, draft: str, most_new_tokens: int) -> None:
        """most_new_tokens: largest answer of any task, for which static caches have room."""
        self.most_new_tokens = most_new_tokens
        self.text = TargetText.load(target)
        self.model, _ = load_pair(target, draft=draft)
        self.static_caches: dict[int, StaticCache] = {}

    def sample(self, cell: Cell, prompt: dict[str, Any], warm_up: bool = False) -> dict[str, Any]:
        """A sample's line. warm_up: a few tokens without an end, so that kernels are compiled and shapes chosen."""
        ids = torch.tensor([self.text.prompt_ids(prompt)], device=self.model.device)
        new_tokens = min(WARM_UP_TOKENS, cell.max_new_tokens) if warm_up else cell.max_new_tokens
        seed, began = cell.prompt_seed(prompt["id"]), time.perf_counter()
        if cell.method.kind == STATIC:
            figures = self._transformers(cell, ids, new_tokens, seed)
        else:
            figures = self._generate(cell, ids, new_tokens, seed, warm_up)
        tokens = figures["token_ids"]
        return {
            **cell.key,
            "id": prompt["id"],
            "prompt": prompt_digest(prompt),
            "prompt_tokens": ids.shape[1],
            "new_tokens": len(tokens),
            "wall_s": time.perf_counter() - began,
            "loops": loops(tokens),
            **figures,
        }

    def _generate(self, cell: Cell, ids: Tensor, new_tokens: int, seed: int, warm_up: bool) -> dict[str, Any]:
        method = cell.method
        output = generate(
            self.model,
            ids,
            method=method.kind,
            max_new_tokens=new_tokens,
            temperature=cell.temperature,
            tree_shape=method.tree_shape,
            tree_rule=method.tree_rule,
            gamma=method.gamma,
            eos_token_id=() if warm_up else None,
            seed=seed,
        )
        names = ("rounds", "decoded_tokens", "decode_s", "ttft_s", "accepted_by_depth", "tree_shape")
        figures = {name: value for name, value in asdict(output.stats).items() if name in names}
        return figures | {"token_ids": output.new_tokens[0].tolist()}

    @cached_property
    def transformers_model(self) -> Any:
        """The target through AutoModelForCausalLM, on the same device and of the same dtype."""
        path, dtype = self.text.path, self.model.dtype
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        return model.to(self.model.device).eval()

    def _transformers(self, cell: Cell, ids: Tensor, new_tokens: int, seed: int) -> dict[str, Any]:
        temperature = cell.temperature
        torch.manual_seed(seed)
        clock, model = Clock(), self.transformers_model
        options = {"temperature": temperature, "top_p": 1.0, "top_k": 0} if temperature else {}
        began = time.perf_counter()
        sequence = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=temperature > 0,
            streamer=clock,
            past_key_values=self._static_cache(max(cell.context, ids.shape[1]) + self.most_new_tokens),
            **options,
        )
        # The streamer first gets the prompt, then the token that prefill gave.
        first, last = clock.times[1], clock.times[-1]
        decoded = sum(clock.counts[2:])
        return {
            "rounds": decoded,
            "decoded_tokens": decoded,
            "decode_s": last - first,
            "ttft_s": first - began,
            "token_ids": sequence[0, ids.shape[1] :].tolist(),
        }

    def _static_cache(self, positions: int) -> StaticCache:
        size = -(-positions // STATIC_STEP) * STATIC_STEP
        if size not in self.static_caches:
            torch._dynamo.reset()  # the second size would be compiled for any size, which is slower
            self.static_caches = {size: StaticCache(self.transformers_model.config, max_cache_len=size)}
        cache = self.static_caches[size]
        cache.reset()
        return cache


class Clock:
    """A streamer that records when tokens came and how many; the loop waits for each of them anyway."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass
