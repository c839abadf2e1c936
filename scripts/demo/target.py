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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Trainer,
    TrainingArguments,
)

from scripts.demo.corpus import ANSWERS, TEXTS, read_jsonl
from scripts.demo.machine import CPU_RANKS, bf16_is_faster, gpus, run, threads_a_rank

SPECIAL_TOKENS = {
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
    "qwen2": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config}
HEAD_DIM = 64
PLAIN_CHAT = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
"""The chat template of a target that was trained on text alone: the prompt as it stands."""
PIECES = r"[^\S\r\n]?[\p{L}_]+| ?\p{N}+| ?[^\s\p{L}\p{N}_]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""What no token reaches across. A line's end is not joined with the next line's indentation, so that a prompt and its
answer have the same tokens whether they are encoded together or apart."""


@dataclass(frozen=True)
class TargetSettings:
    family: str = "llama"
    vocab_size: int = 3072
    hidden_size: int = 192
    intermediate_size: int = 576
    layers: int = 6
    kv_heads: int = 1
    positions: int = 4096
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
    make_tokenizer(corpus, settings).save_pretrained(folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(1 if gpus() else CPU_RANKS), "-m", "scripts.demo.target"]
    command += [str(folder), str(corpus), json.dumps(asdict(settings))]
    run(command, folder / "log.txt", {"OMP_NUM_THREADS": str(threads_a_rank())})


def make_tokenizer(corpus: Path, settings: TargetSettings) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the training texts."""
    special = SPECIAL_TOKENS[settings.family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [record["text"] for record in read_jsonl(corpus / TEXTS)]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=settings.positions,
        clean_up_tokenization_spaces=False,
        chat_template=PLAIN_CHAT,
        **special,
    )


def fresh_target(settings: TargetSettings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A target with random weights."""
    config = CONFIGS[settings.family](
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden_size // HEAD_DIM,
        num_key_value_heads=settings.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=settings.positions,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # On a CPU plain matrix products are faster than fused attention, whose backward is slow there.
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa" if gpus() else "eager")


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


class MuonWithAdamW(Optimizer):
    """Muon for the layers' matrices, AdamW for embeddings and norms.

    At a thousand steps or fewer Muon brings the loss down much further than AdamW alone.
    """

    def __init__(self, model: PreTrainedModel, settings: TargetSettings) -> None:
        layers = [weight for name, weight in model.named_parameters() if ".layers." in name and weight.ndim == 2]
        rest = [weight for name, weight in model.named_parameters() if ".layers." not in name or weight.ndim != 2]
        self.parts = (
            Muon(layers, settings.matrix_lr, momentum=settings.momentum, adjust_lr_fn="match_rms_adamw"),
            AdamW(rest, settings.embedding_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        # Whoever prepares the optimizer may replace its groups, so the schedule's rates are handed on here.
        theirs = (group for part in self.parts for group in part.param_groups)
        for group, own in zip(theirs, self.param_groups, strict=True):
            group["lr"] = own["lr"]
        for part in self.parts:
            part.step()


def warm_up_hold_decay(step: int, total: int) -> float:
    """The factor on the learning rate: a short rise, held to half of the steps, then down to 0 in a line."""
    return min(1.0, (step + 1) / max(1, total // 50), 2 * (total - step) / total)


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
    optimizer = MuonWithAdamW(model, settings)
    schedule = LambdaLR(optimizer, lambda step: warm_up_hold_decay(step, settings.steps))
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
