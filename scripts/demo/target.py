"""The target: a byte-level BPE tokenizer and a small causal LM, trained from scratch with transformers' Trainer.

`python -m scripts.demo.target FOLDER CORPUS SETTINGS` is what each rank of the training runs.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from scripts.pipeline.files import ANSWERS, TEXTS, read_jsonl
from scripts.pipeline.machine import CPU_RANKS, bf16_is_faster, gpus, run, threads_a_rank
from scripts.pipeline.target_model import MuonWithAdamW, TargetShape, fresh_target, warm_up_hold_decay
from scripts.pipeline.tokenizer import make_tokenizer


@dataclass(frozen=True)
class TargetSettings(TargetShape):
    steps: int = 300
    tokens_a_step: int = 4096
    short: int = 256
    """Tokens in a row of running text, with which training begins: attention costs least there."""
    long: int = 1024
    """Tokens in a row of a completion prompt and its answer, with which it ends."""
    long_share: float = 0.3
    """Of the steps."""
    matrix_lr: float = 3e-3
    embedding_lr: float = 8e-3
    momentum: float = 0.9
    seed: int = 0


def train_target(folder: Path, corpus: Path, settings: TargetSettings) -> None:
    """Tokenizer and target in `folder`: one process on a GPU, two ranks on the CPU."""
    texts = (record["text"] for record in read_jsonl(corpus / TEXTS))
    make_tokenizer(texts, settings.family, settings.vocab_size, settings.positions).save_pretrained(folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(1 if gpus() else CPU_RANKS), "-m", "scripts.demo.target"]
    command += [str(folder), str(corpus), json.dumps(asdict(settings))]
    run(command, folder / "log.txt", {"OMP_NUM_THREADS": str(threads_a_rank())})


def text_rows(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Tensor:
    """All texts, each with its EOS, end to end, cut into rows [rows, length]."""
    ids = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, verbose=False)["input_ids"]]
    stream = torch.tensor([token for document in ids for token in document])
    return stream[: len(stream) // length * length].view(-1, length)


def completion_rows(corpus: Path, tokenizer: PreTrainedTokenizerFast, length: int) -> Tensor:
    """The completion records as the target will be asked, their first `length` tokens; shorter ones are left out."""
    texts = [record["source"] + record["target"] for record in read_jsonl(corpus / ANSWERS)]
    ids = tokenizer(texts, verbose=False)["input_ids"]
    return torch.tensor([row[:length] for row in ids if len(row) >= length])


def shuffled(rows: Tensor, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches of `count` rows without end, in a new order each time round."""
    left = rows[:0]
    while True:
        while len(left) < count:
            left = torch.cat([left, rows[torch.randperm(len(rows), generator=generator)]])
        yield left[:count]
        left = left[count:]


def schedule_of_batches(short: Tensor, long: Tensor, settings: TargetSettings, ranks: int) -> list[dict[str, Tensor]]:
    """The micro-batch of each rank in each step, in order: short rows first, then long ones."""
    generator = torch.Generator().manual_seed(settings.seed)
    batches = []
    long_steps = round(settings.steps * settings.long_share)
    for rows, steps in ((short, settings.steps - long_steps), (long, long_steps)):
        source = shuffled(rows, max(1, settings.tokens_a_step // rows.shape[1] // ranks), generator)
        batches += [next(source) for _ in range(steps * ranks)]
    return [{"input_ids": batch, "labels": batch} for batch in batches]


def train_rank(folder: Path, corpus: Path, settings: TargetSettings) -> None:
    """One rank's part of the training; rank 0 saves the target."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(settings.seed)
    model = fresh_target(settings, tokenizer)
    texts = [record["text"] for record in read_jsonl(corpus / TEXTS)]
    batches = schedule_of_batches(
        text_rows(texts, tokenizer, settings.short),
        completion_rows(corpus, tokenizer, settings.long),
        settings,
        int(os.environ["WORLD_SIZE"]),
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=settings.steps,
        per_device_train_batch_size=1,  # an item is a whole micro-batch
        train_sampling_strategy="sequential",
        bf16=bf16_is_faster(),
        use_cpu=not gpus(),
        ddp_backend=None if gpus() else "gloo",
        ddp_find_unused_parameters=False,
        max_grad_norm=1.0,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=settings.seed,
    )
    optimizer = MuonWithAdamW(model, settings.matrix_lr, settings.embedding_lr, settings.momentum)
    total, warm_up = settings.steps, max(1, settings.steps // 50)
    schedule = LambdaLR(optimizer, lambda step: warm_up_hold_decay(step, warm_up, step / total))
    trainer = Trainer(
        model,
        arguments,
        data_collator=lambda items: items[0],
        train_dataset=batches,
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    trainer.save_model(str(folder))


def end_rank() -> NoReturn:
    """Leave without the interpreter's clean-up: DDP keeps gloo's threads alive, and there they abort now and then."""
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    train_rank(Path(sys.argv[1]), Path(sys.argv[2]), TargetSettings(**json.loads(sys.argv[3])))
    end_rank()
