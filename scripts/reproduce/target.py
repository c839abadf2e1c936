"""The target: a causal LM from random weights, trained with transformers' Trainer for as long as its limit allows.

`python -m scripts.reproduce.target FOLDER TOKENS BEGAN SETTINGS` is what the training runs in; from BEGAN, a
time.time(), the limit counts.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

from scripts.pipeline.files import write_json
from scripts.pipeline.machine import CommandFailed, bf16_is_faster, gpus, run, threads
from scripts.pipeline.target_model import MuonWithAdamW, TargetShape, fresh_target, warm_up_hold_decay
from scripts.reproduce.tokens import ANSWER_IDS, HELD_OUT_IDS, TEXT_IDS, read_rows, shuffled

TRAINING = "training.json"
SAVE_S = 15.0
"""Left at the end of the limit for saving the target."""
LOSS_CHUNK = 8192
"""Tokens whose logits exist at a time."""
EVALUATIONS = 12


@dataclass(frozen=True)
class TargetSettings(TargetShape):
    limit_s: float = 540.0
    """For all of the step. The learning rate has come down by then, however fast the machine is."""
    steps: int = 100_000
    """At most; on most machines the limit comes first."""
    short: int = 2048
    """Tokens in a row, with which training begins: attention costs least there."""
    long: int = 16_896
    """Tokens in a row with which it ends: the longest prompt and its answer."""
    long_share: float = 0.25
    """Of the time."""
    micro_batch: int = 50_688
    """Tokens that are in memory at a time."""
    accumulation: int = 2
    warm_up: int = 30
    """Steps."""
    held_out_rows: int = 48
    """Short ones, for the held-out loss."""
    matrix_lr: float = 2e-3
    embedding_lr: float = 4e-3
    momentum: float = 0.95
    compile: bool = True
    """Each layer, for the two lengths of rows. Not on a CPU."""
    seed: int = 0


class Clock:
    """How far a training is that ends after `steps` steps or when its time is up, whichever comes first."""

    def __init__(self, steps: int, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.steps, self.seconds, self.now = steps, seconds, now
        self.began = now()

    @property
    def elapsed(self) -> float:
        """Seconds."""
        return self.now() - self.began

    def share(self, step: int) -> float:
        """Of the training, that is over before `step`: 0 … 1, and never less than before."""
        return min(1.0, max(step / self.steps, self.elapsed / self.seconds))


def train_target(folder: Path, corpus_tokenizer: Path, tokens: Path, settings: TargetSettings) -> None:
    """Tokenizer and target in `folder`, and training.json: {step, seconds, tokens, loss, held_out_loss, …} a line.

    Raises CommandFailed.
    """
    began = time.time()
    PreTrainedTokenizerFast.from_pretrained(corpus_tokenizer).save_pretrained(folder)
    command = [sys.executable, "-m", "scripts.reproduce.target", str(folder), str(tokens), str(began)]
    command.append(json.dumps(asdict(settings)))
    log = folder / "log.txt"
    if not run(command, log, {"OMP_NUM_THREADS": str(threads())}, limit_s=settings.limit_s + 4 * SAVE_S):
        raise CommandFailed(f"the target was not saved within {settings.limit_s} s; {log} says what took so long")


class Batches(IterableDataset):
    """Micro-batches without end: short rows of text, then long rows, of text and of prompts with answers in turn."""

    def __init__(self, tokens: Path, settings: TargetSettings, clock: Clock) -> None:
        self.tokens, self.settings, self.clock = tokens, settings, clock

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        settings, step = self.settings, 0
        short = self.batches(TEXT_IDS, settings.short, 0)
        long = [self.batches(name, settings.long, 1 + number) for number, name in enumerate((TEXT_IDS, ANSWER_IDS))]
        while True:
            is_long = self.clock.share(step) >= 1 - settings.long_share
            for number in range(settings.accumulation):
                yield next(long[(step * settings.accumulation + number) % 2] if is_long else short)
            step += 1

    def batches(self, name: str, length: int, seed: int) -> Iterator[dict[str, Tensor]]:
        rows = read_rows(self.tokens / name, length)
        count = max(1, self.settings.micro_batch // length)
        for batch in shuffled(rows, count, np.random.default_rng([self.settings.seed, seed])):
            yield {"input_ids": batch}


def held_out_batches(tokens: Path, settings: TargetSettings) -> list[dict[str, Tensor]]:
    """Rows spread over the held-out texts, as many to a batch as in training."""
    rows = read_rows(tokens / HELD_OUT_IDS, settings.short)
    rows = rows[:: max(1, len(rows) // settings.held_out_rows)][: settings.held_out_rows]
    count = min(len(rows), max(1, settings.micro_batch // settings.short))
    whole = torch.from_numpy(rows[: len(rows) // count * count].astype(np.int64))
    return [{"input_ids": part} for part in whole.split(count)]


def next_token_loss(model: Any, input_ids: Tensor) -> Tensor:
    """Mean cross-entropy of input_ids[:, 1:], LongTensor [B, T]; of LOSS_CHUNK tokens at a time the logits exist."""
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    wanted = input_ids[:, 1:].flatten()

    def chunk_loss(hidden: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(hidden).float(), wanted, reduction="sum")

    chunks = zip(hidden.split(LOSS_CHUNK), wanted.split(LOSS_CHUNK), strict=True)
    losses = [checkpoint(chunk_loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(losses).sum() / len(wanted)


class TargetTrainer(Trainer):
    """Scores a batch without holding all its logits.

    Trainer leaves mixed precision to the model's `forward`, which `next_token_loss` goes past: it is set here.
    """

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with self.accelerator.autocast():
            return next_token_loss(model, inputs["input_ids"])

    def prediction_step(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        # In training mode and with gradients, for which layers are compiled already; nothing drops out in either.
        with torch.enable_grad():
            return self.compute_loss(model.train(), self._prepare_inputs(inputs)).detach(), None, None


class Progress(TrainerCallback):
    """Ends the training when its time is up, asks for held-out losses on the way, and keeps `training.json`."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock = folder, clock
        self.lines: list[dict[str, float]] = []
        self.evaluations = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        share = self.clock.share(state.global_step)
        control.should_training_stop = share >= 1
        if share >= (self.evaluations + 1) / EVALUATIONS or control.should_training_stop:
            self.evaluations = int(share * EVALUATIONS)
            control.should_log = control.should_evaluate = True

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        logs = given["logs"]
        if "eval_loss" in logs and self.lines:
            self.lines[-1]["held_out_loss"] = logs["eval_loss"]
        elif "loss" in logs:
            self.note(state, logs["loss"], logs["learning_rate"])
        write_json(self.folder / TRAINING, self.lines)

    def note(self, state: Any, loss: float, rate: float) -> None:
        seconds, tokens = self.clock.elapsed, state.num_input_tokens_seen
        before = self.lines[-1] if self.lines else {"seconds": 0.0, "tokens": 0}
        speed = (tokens - before["tokens"]) / (seconds - before["seconds"])
        self.lines.append(
            {
                "step": state.global_step,
                "seconds": seconds,
                "tokens": tokens,
                "loss": loss,
                "learning_rate": rate,
                "tokens_per_second": speed,
            }
        )
        print(" ".join(f"{name} {value:.5g}" for name, value in self.lines[-1].items()), flush=True)


def arguments(folder: Path, settings: TargetSettings) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=settings.steps,
        per_device_train_batch_size=1,  # an item is a whole micro-batch
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=settings.accumulation,
        bf16=bf16_is_faster(),
        use_cpu=not gpus(),
        max_grad_norm=1.0,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        include_num_input_tokens_seen="all",
        remove_unused_columns=False,
        dataloader_pin_memory=bool(gpus()),
        accelerator_config={"dispatch_batches": False},
        disable_tqdm=True,
        seed=settings.seed,
    )


def compile_layers(model: Any, backend: Any = "inductor") -> None:
    """One graph serves all layers: they differ in nothing but their weights."""
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=backend)


def train(folder: Path, tokens: Path, began: float, settings: TargetSettings) -> None:
    """The whole training, on one device, and the target in `folder`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(settings.seed)
    model: Any = fresh_target(settings, tokenizer)
    if settings.compile and gpus():
        compile_layers(model)
    left = settings.limit_s - SAVE_S - (time.time() - began)
    clock = Clock(settings.steps, left)
    optimizer = MuonWithAdamW(model, settings.matrix_lr, settings.embedding_lr, settings.momentum)
    schedule = LambdaLR(optimizer, lambda step: warm_up_hold_decay(step, settings.warm_up, clock.share(step)))
    trainer = TargetTrainer(
        model,
        arguments(folder, settings),
        data_collator=lambda items: items[0],
        train_dataset=Batches(tokens, settings, clock),
        eval_dataset=held_out_batches(tokens, settings),  # type: ignore[arg-type]
        optimizers=(optimizer, schedule),
        callbacks=[Progress(folder, clock)],
    )
    trainer.train()
    model.to(dtype=torch.bfloat16 if gpus() else torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), TargetSettings(**json.loads(sys.argv[4])))
    sys.stdout.flush()
    os._exit(0)  # without waiting for the threads of compilers
