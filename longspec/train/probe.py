"""Probes: short trainings of several fresh drafts on the same batches, to choose layers, sizes and learning rates.

The frozen target takes most of a training step. Here one pass of it serves all candidates, so that comparing twenty
drafts takes only a few times as long as training one. A candidate trains in a single process, with the same optimizer,
schedule, noise and loss as in the trainer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from longspec.data.collators import IGNORED
from longspec.errors import UserError
from longspec.kernels.training.segments import Segments
from longspec.models.draft import Reads, TargetStates
from longspec.models.draft_layer import GLIDE
from longspec.train.config_schema import TrainConfig
from longspec.train.engine import MUON_MOMENTUM, build_pair, cosine_with_warmup, muon_scale
from longspec.train.evaluation import Evaluation, held_out_row_count
from longspec.train.inputs import Inputs, fresh_vocabulary
from longspec.train.loss import DraftLoss
from longspec.train.micro_batches import training_inputs
from longspec.train.sampler import ResumableSampler, loader

SHARED_KEYS = ("data", "evaluation", "variant", "seed", "max_steps", "per_device_train_batch_size")
"""Parts of the configuration that are the same for all candidates, because they determine the batches."""


class SharedPass:
    """A pair's `target_pass` that several drafts share: computed for the first draft, repeated for the others."""

    def __init__(self, pair: Any, layers: set[int]) -> None:
        """layers: the target layers that any of the drafts reads besides the last one."""
        self.pair, self.layers = pair, (pair.config.num_hidden_layers - 1, *sorted(layers))
        self.key: tuple[Tensor, Tensor] | None = None
        self.states: TargetStates

    def __call__(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> TargetStates:
        if self.key is None or not all(map(torch.equal, self.key, (input_ids, position_ids))):
            self.states = self.pair.run_target(input_ids, position_ids, segments, reads=Reads(self.layers))
            self.key = input_ids, position_ids
        by_layer = dict(zip(self.layers, self.states.keys_values, strict=True))
        return TargetStates(self.states.hidden, [by_layer[layer] for layer in self.pair.draft_model.reads.kv_layers])


class Candidate:
    """A fresh draft, its loss and its optimizer. The draft has the target's dtype, and fp32 master weights."""

    def __init__(self, config: TrainConfig, pair: Any, vocabulary: Tensor | None) -> None:
        """vocabulary: the draft's list, LongTensor [Vd]; None for the whole vocabulary."""
        torch.manual_seed(config.seed)
        self.layer = pair.draft_layer_class(pair.config, config.model.draft_options)
        self.layer.reset_parameters(pair.config.initializer_range)
        self.layer.set_vocabulary(vocabulary)
        self.layer.to(pair.lm_head.weight.device, pair.lm_head.weight.dtype)
        self.loss = DraftLoss(config.loss, vocabulary=self.layer.vocabulary)
        self.rate, self.max_norm = config.learning_rate, config.max_grad_norm
        self.schedule = cosine_with_warmup(config.max_steps or 1, config.warmup_ratio)

        self.masters = [parameter.detach().float() for parameter in self.layer.parameters()]
        least = 2 if config.optimizer == "muon" else math.inf  # dimensions of a weight that Muon trains
        matrices = [master for master in self.masters if master.dim() >= least]
        others = [master for master in self.masters if master.dim() < least]
        decay, scale = config.weight_decay, muon_scale(pair.config.hidden_size)
        adamw = torch.optim.AdamW(others, betas=tuple(config.adam_betas), weight_decay=decay)  # type: ignore[arg-type]
        self.optimizers: list[tuple[Any, float]] = [(adamw, 1.0)]
        if matrices:
            # Imports torch's compiler, which takes longer than the rest of this module.
            from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuon

            muon = SingleDeviceMuon(matrices, weight_decay=decay / scale, momentum=MUON_MOMENTUM, ns_method="standard")
            self.optimizers.append((muon, scale))

    def step(self, number: int) -> None:
        """Update the draft from its gradients. number: the step, from 0."""
        for parameter, master in zip(self.layer.parameters(), self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.max_norm)
        for optimizer, scale in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * self.schedule(number) * scale
            optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.layer.parameters(), self.masters, strict=True):
                parameter.copy_(master)


def probe(
    configs: Mapping[str, TrainConfig], inputs: Inputs, held_out: Mapping[str, tuple[TrainConfig, Inputs]], device: str
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Train a fresh draft per configuration and score it: name -> held-out set -> (correct tokens, chains) per row.

    configs: candidates by name, which differ in `model`, `loss` and the optimizer's keys only. inputs: data of the
    first one. held_out: sets of held-out rows by name, each with the configuration that determines its rows. Tokens per
    round of a chain are 1 + Σ correct tokens / Σ chains. Raises UserError for candidates that need different batches.
    """
    base = next(iter(configs.values()))
    for name, config in configs.items():
        if differing := [key for key in SHARED_KEYS if getattr(config, key) != getattr(base, key)]:
            raise UserError(f"probe {name}: {differing[0]} must be the same for all candidates")
        if config.model.architecture != GLIDE:
            raise UserError(f"probe {name}: model.architecture must be {GLIDE}")
    pair: Any = build_pair(base, None).to(device)
    if device != "cpu":
        from longspec.models.target_kernels import use_kernels

        use_kernels(pair.model, pair.draft_layer_class)
    candidates = {name: Candidate(config, pair, fresh_vocabulary(config, inputs)) for name, config in configs.items()}
    pair.target_pass = SharedPass(pair, {layer for config in configs.values() for layer in config.model.kv_layers})
    with torch.compiler.set_stance("force_eager"):  # compiling Muon's update takes longer than a probe
        _train(base, inputs, pair, list(candidates.values()))
    scores = {group: _score(config, rows, pair, candidates) for group, (config, rows) in held_out.items()}
    return {name: {group: scores[group][name] for group in scores} for name in candidates}


def _train(config: TrainConfig, inputs: Inputs, pair: Any, candidates: Sequence[Candidate]) -> None:
    steps = config.max_steps or 1
    sampler = ResumableSampler(len(inputs.rows), config.per_device_train_batch_size, 0, 1, config.seed, 0, steps)
    batches = loader(inputs, sampler, config.data.num_workers, accumulation=1)
    for number, arrays in enumerate(tqdm(batches, desc=f"probe of {len(candidates)} drafts", unit="step")):
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        tokens = max(1, int((batch["labels"] != IGNORED).sum()))
        # One upload for all candidates, so that the shared pass recognizes its inputs.
        first, device = candidates[0], pair.lm_head.weight.device
        arguments = training_inputs(
            batch, config, inputs.max_positions, first.layer, first.loss, device, micro_step=number, rank=0
        )
        for candidate in candidates:
            pair.draft_model = candidate.layer
            loss, _ = pair(**arguments | {"objective": candidate.loss})
            (loss / tokens).backward()
            candidate.step(number)


def _score(
    config: TrainConfig, inputs: Inputs, pair: Any, candidates: Mapping[str, Candidate]
) -> dict[str, list[tuple[float, float]]]:
    """For each candidate and held-out row, the number of correct tokens in chains and the number of chains."""
    rows = held_out_row_count(config, inputs)
    scored: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for row in tqdm(range(rows), desc="evaluation", unit="row"):
        for name, candidate in candidates.items():
            pair.draft_model = candidate.layer
            sums = Evaluation(config, pair, inputs, candidate.loss, rows).score_row(row)
            scored[name].append((float(sums["correct"]), float(sums["chains"])))
    return scored
