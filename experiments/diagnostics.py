"""Cheap figures on validation answers: teacher-forced acceptance of the tree, and the bound on it at temperature 1.

A round's root is a token of the text; its tree is drafted as in decoding, and the text decides what is accepted. The
target's logits at the tree's nodes also give the probability that the target's own draws stay in the tree for d steps:
the sum over nodes at depth d of the target's probabilities along the node's path. Summed over depths, plus one, it is
the expected acceptance length of a tree built without chance.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.prompts import answers_file
from experiments.settings import Settings, read_jsonl, write_atomically
from experiments.target import TargetText
from experiments.training import all_runs, final_draft
from longspec import load_pair
from longspec.data.templates import encode_texts
from longspec.inference.acceptance import Sampler
from longspec.inference.drafting.proposal import Proposal
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine import Engine
from longspec.inference.runner import Runner
from longspec.inference.tree_shapes import DEFAULT_SHAPE
from longspec.kernels.watch import Watch

DIAGNOSTICS = "diagnostics.json"


class TextSampler(Sampler):
    """Takes the text for the target's choice at every node, and keeps the target's logits."""

    def __init__(self, text: Tensor, read: int, shape: Sequence[int]) -> None:
        """text: LongTensor [T]; the target has read the first `read` tokens of it. shape: the tree's."""
        super().__init__(temperature=0.0, top_k=0, top_p=1.0)
        self.text, self.read = text, read
        self.levels = torch.arange(len(shape) + 1).repeat_interleave(torch.tensor([1, *shape])).to(text.device)
        self.logits = torch.empty(0)
        """The target's at every node [1, N, V], of the last round."""

    def choose(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        if logits.dim() == 2:  # [1, V] after prefill
            return self.text[self.read][None]
        self.logits = logits
        return self.text[self.read + self.levels + 1][None]


def forced_acceptance(model: Any, text: Tensor, prompt: int, shape: Sequence[int] = DEFAULT_SHAPE) -> dict[str, float]:
    """Rounds over text[prompt:], the tokens that they went through, and the sum over rounds of the tree's bound.

    text: LongTensor [T] on the model's device; prompt: the number of tokens read first, at least 1.
    """
    sampler = TextSampler(text, prompt, shape)
    runner = Runner(model)
    drafter = TreeDrafter(runner, 1, shape, sampler, "descend")
    engine = Engine(runner, drafter, sampler, text[None, :prompt], [prompt], len(text) - prompt)
    engine.prefill()
    active = torch.ones(1, dtype=torch.bool, device=text.device)
    sums = {"rounds": 0.0, "tokens": 0.0, "bound": 0.0}
    while sampler.read + drafter.depth + 2 <= len(text):
        count = int(engine.round(active)[1])
        sums["bound"] += 1 + float(depth_probabilities(drafter.proposal, sampler.logits).sum())
        sums["rounds"] += 1
        sums["tokens"] += count
        sampler.read += count
    return sums


def depth_probabilities(proposal: Proposal, logits: Tensor) -> Tensor:
    """[B, depth]: entry d - 1 is the probability that draws from `logits` [B, N, V] stay in the tree for d steps."""
    log_p = logits.float().log_softmax(-1)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    step = log_p[rows, proposal.parents.clamp(min=0), proposal.tokens]
    step = torch.where(proposal.parents < 0, -torch.inf, step)
    step[:, 0] = 0.0
    paths = torch.where(proposal.visible, step[:, None, :], 0.0).sum(-1).exp()
    depths = torch.arange(1, proposal.depth + 1, device=logits.device)
    return paths @ (proposal.levels[:, None] == depths).float()


@torch.no_grad()
def diagnose(settings: Settings, root: Path, model: Any, text: TargetText) -> dict[str, dict[str, float]]:
    """Per run of the target: acceptance of its validation answers by the draft that `model` holds, and the bound."""
    figures = {}
    for name in ("chat", *settings.answers):
        file = answers_file(root, name, "validation")
        records = read_jsonl(file)[: settings.evaluation.diagnostic_rows] if file.exists() else []
        sums = {"rounds": 0.0, "tokens": 0.0, "bound": 0.0}
        for record in records:
            prompt, answer = _split(record)
            ids = text.prompt_ids(prompt)
            row = torch.tensor(ids + encode_texts([answer], text.tokenizer)[0], device=model.device)
            for key, value in forced_acceptance(model, row, len(ids)).items():
                sums[key] += value
        if sums["rounds"]:
            figures[name] = {key: sums[key] / sums["rounds"] for key in ("tokens", "bound")} | {
                "rounds": sums["rounds"]
            }
    return figures


def _split(record: dict[str, Any]) -> tuple[dict[str, Any], str]:
    if "prefix" in record:
        return {"prefix": record["prefix"]}, record["suffix"]
    return {"messages": record["messages"][:-1]}, record["messages"][-1]["content"]


def write_diagnostics(settings: Settings, root: Path) -> None:
    """The diagnostics of every trained arm that has none yet, into training/diagnostics.json."""
    file, text = root / "training" / DIAGNOSTICS, TargetText.load(settings.target)
    done = json.loads(file.read_text()) if file.exists() else {}
    for arm, seed in tqdm(all_runs(settings), desc="diagnose", unit="draft"):
        draft, name = final_draft(settings, root, arm, seed), f"{arm}-{seed}"
        if name not in done and draft.exists():
            model, _ = load_pair(settings.target, draft=str(draft))
            done[name] = diagnose(settings, root, model, text)
            write_atomically(file, json.dumps(done, indent=1) + "\n")
