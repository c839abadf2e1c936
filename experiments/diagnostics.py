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

from experiments.files import answers_file, read_jsonl, write_atomically
from experiments.settings import Settings
from experiments.target import TargetText
from experiments.training import CHECKPOINT, all_runs, arm_stages, run_folder
from longspec import load_pair
from longspec.data.templates import encode_texts
from longspec.inference.drafting.proposal import Proposal
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine import Engine
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler
from longspec.inference.tree_shapes import DEFAULT_SHAPE
from longspec.kernels.watch import Watch

DIAGNOSTICS = "diagnostics.json"
ANSWER_TOKENS = 128
"""Tokens of each answer that rounds go through, at most."""


class TextSampler(Sampler):
    """Takes the text for the target's choice at every node, and keeps the target's logits."""

    def __init__(self, rows: Tensor, read: Sequence[int], shape: Sequence[int]) -> None:
        """rows: LongTensor [B, T], padded right; read: the number of tokens of each row that the target has read."""
        super().__init__(temperature=0.0, top_k=0, top_p=1.0)
        self.rows, self.read = rows, torch.tensor(read, device=rows.device)
        self.levels = torch.arange(len(shape) + 1).repeat_interleave(torch.tensor([1, *shape])).to(rows.device)
        self.logits = torch.empty(0)
        """The target's at every node [B, N, V], of the last round."""

    def choose(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        if logits.dim() == 2:  # [B, V] after prefill
            return self.rows.gather(1, self.read[:, None])[:, 0]
        self.logits = logits
        following = self.read[:, None] + self.levels + 1
        return self.rows.gather(1, following.clamp(max=self.rows.shape[1] - 1))


def forced_acceptance(
    model: Any, texts: Sequence[Tensor], prompts: Sequence[int], shape: Sequence[int] = DEFAULT_SHAPE
) -> dict[str, float]:
    """Rounds over what follows the prompts, the tokens they went through, and the sum over rounds of the bound.

    texts: LongTensors [T] on the model's device; prompts: the number of tokens of each that are read first.
    """
    rows = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    ends = torch.tensor([len(text) for text in texts], device=rows.device)
    sampler, runner = TextSampler(rows, prompts, shape), Runner(model)
    drafter = TreeDrafter(runner, len(rows), shape, sampler, "descend")
    new_tokens = max(len(text) - prompt for text, prompt in zip(texts, prompts, strict=True))
    engine = Engine(runner, drafter, sampler, rows[:, : max(prompts)], prompts, new_tokens)
    engine.prefill()
    sums = {"rounds": 0.0, "tokens": 0.0, "bound": 0.0}
    while (active := sampler.read + drafter.depth + 2 <= ends).any():
        counts = engine.round(active)[1]
        bounds = 1 + depth_probabilities(drafter.proposal, sampler.logits).sum(1)
        sums["rounds"] += int(active.sum())
        sums["tokens"] += int(counts.sum())
        sums["bound"] += float(bounds[active].sum())
        sampler.read += counts
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
        texts, prompts = [], []
        for record in read_jsonl(file)[: settings.evaluation.diagnostic_rows] if file.exists() else []:
            prompt, answer = _split(record)
            ids = text.prompt_ids(prompt)
            answer_ids = encode_texts([answer], text.tokenizer)[0][:ANSWER_TOKENS]
            texts.append(torch.tensor(ids + answer_ids, device=model.device))
            prompts.append(len(ids))
        sums = forced_acceptance(model, texts, prompts) if texts else {"rounds": 0.0}
        if rounds := sums["rounds"]:
            figures[name] = {"rounds": rounds, "tokens": sums["tokens"] / rounds, "bound": sums["bound"] / rounds}
    return figures


def _split(record: dict[str, Any]) -> tuple[dict[str, Any], str]:
    if "prefix" in record:
        return {"prefix": record["prefix"]}, record["suffix"]
    return {"messages": record["messages"][:-1]}, record["messages"][-1]["content"]


def write_diagnostics(settings: Settings, root: Path) -> None:
    """The diagnostics of every trained stage that has none yet, into training/diagnostics.json."""
    file, text = root / "training" / DIAGNOSTICS, TargetText.load(settings.target)
    done = json.loads(file.read_text()) if file.exists() else {}
    drafts = {
        f"{arm}-{seed} {stage}": run_folder(root, arm, seed) / stage / CHECKPOINT
        for arm, seed in all_runs(settings)
        for stage in arm_stages(settings, arm)
    }
    missing = {name: draft for name, draft in drafts.items() if name not in done and draft.exists()}
    for name, draft in tqdm(missing.items(), desc="diagnose", unit="draft"):
        model, _ = load_pair(settings.target, draft=str(draft))
        done[name] = diagnose(settings, root, model, text)
        write_atomically(file, json.dumps(done, indent=1) + "\n")
