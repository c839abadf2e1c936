"""How often half precision makes a method leave vanilla's greedy tokens, beside what vanilla does to itself.

`python -m benchmarks.lossless --target FOLDER --draft FOLDER --data held_out.jsonl` prints a table and one JSON line.
`python -m scripts.demo --size gpu --output OUT` makes such a pair (OUT/target, OUT/stage3/checkpoint-last) and held-out
text (OUT/corpus/held_out.jsonl) on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationMixin, PreTrainedTokenizerBase

from longspec import generate
from longspec.errors import UserError, reports_user_errors
from longspec.inference.drafting.proposal import chain
from longspec.inference.engine import Engine
from longspec.inference.fused_runner import FusedRunner
from longspec.inference.methods import make_drafter
from longspec.inference.sampling import Sampler
from longspec.models.families import family_class
from longspec.models.glide import GlideMixin
from longspec.models.target_files import load_tokenizer, read_config
from scripts.pipeline.quality import distinct_share

Continue = Callable[[Tensor], Tensor]
"""Greedy continuation [B, new] of prompts [B, P]."""


@dataclass
class Divergence:
    """One run against vanilla at batch 1: counts up to the first difference of each prompt."""

    run: str
    dtype: str
    compared_tokens: int
    diverged: int
    per_1000_tokens: float
    median_gap: float
    """Of the target's logits (transformers, same dtype, read as fp32) between vanilla's token and the run's."""
    largest_gap: float
    largest_gap_in_ulps: float
    """In units of the dtype's last place at that logit."""


@reports_user_errors
def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        raise UserError("benchmarks.lossless: half precision is measured on a CUDA device, and there is none here")
    config = read_config(options.target)
    prompts = read_prompts(options.data, load_tokenizer(options.target, config), options.prompts, options.prompt_len)
    prompts = prompts.to("cuda")
    rows: list[Divergence] = []
    errors: dict[str, dict[str, float]] = {}
    distinct: dict[str, float] = {}
    for name in options.dtypes:
        pair = family_class(config, options.target).from_pretrained(
            options.target, glide_path=options.draft, torch_dtype=name
        )
        model: Any = pair.cuda().eval()  # type: ignore[call-arg]
        model.generation_config.eos_token_id = None  # every run gives as many tokens
        reference, found = compare(model, prompts, options)
        rows += found
        distinct[name] = distinct_share(reference.tolist())
        errors[name] = logit_errors(model, torch.cat([prompts, reference], 1), options)
        print(table(found, errors[name]), flush=True)
        del model, pair
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "config": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
    }
    results = {"runs": [asdict(row) for row in rows], "logit_rms_error": errors, "distinct_4grams": distinct}
    print(json.dumps({"benchmark": "lossless"} | results | facts))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--target", required=True)
    add("--draft", required=True)
    add("--data", type=Path, required=True, help="JSONL with a field `text`; prompts are cut from it")
    add("--prompts", type=int, default=48)
    add("--prompt_len", type=int, default=768)
    add("--new_tokens", type=int, default=256)
    add("--dtypes", nargs="+", default=["bfloat16", "float16"], choices=["bfloat16", "float16", "float32"])
    add("--tree_shape", type=int, nargs="+", default=[4, 16, 16, 16, 16])
    add("--gamma", type=int, default=4)
    add("--batch_size", type=int, default=8, help="the other batch size, at which vanilla is compared with itself")
    return parser.parse_args()


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, count: int, length: int) -> Tensor:
    """LongTensor [count, length], spread over the texts' tokens."""
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    tokens = torch.tensor([token for ids in tokenizer(texts, verbose=False)["input_ids"] for token in ids])
    starts = torch.linspace(0, len(tokens) - length, count).long()
    return torch.stack([tokens[start : start + length] for start in starts])


def compare(model: Any, prompts: Tensor, options: argparse.Namespace) -> tuple[Tensor, list[Divergence]]:
    """Vanilla's tokens at batch 1 [prompts, new], and how each other run leaves them."""

    def ours(method: str) -> Continue:
        def run(ids: Tensor) -> Tensor:
            drafting = {"method": method, "tree_shape": options.tree_shape, "gamma": options.gamma}
            out = generate(model, ids, max_new_tokens=options.new_tokens, **drafting)
            return torch.stack(out.new_tokens)

        return run

    def theirs(ids: Tensor) -> Tensor:
        settings = {"max_new_tokens": options.new_tokens, "do_sample": False, "pad_token_id": 0}
        out = GenerationMixin.generate(model, ids, attention_mask=torch.ones_like(ids), **settings)
        return out[:, ids.shape[1] :]

    others: dict[str, tuple[Continue, int]] = {
        f"vanilla, batch {options.batch_size}": (ours("vanilla"), options.batch_size),
        f"transformers, batch {options.batch_size}": (theirs, options.batch_size),
        "seq": (ours("seq"), 1),
        "tree": (ours("tree"), 1),
        "magicdec": (ours("magicdec"), 1),
        f"tree, batch {options.batch_size}": (ours("tree"), options.batch_size),
    }
    reference = in_batches(ours("vanilla"), prompts, 1, "vanilla")
    found = []
    for name, (run, batch) in others.items():
        found.append(divergence(model, prompts, reference, in_batches(run, prompts, batch, name), name))
    return reference, found


def in_batches(run: Continue, prompts: Tensor, batch: int, name: str) -> Tensor:
    chunks = prompts.split(batch)
    return torch.cat([run(chunk) for chunk in tqdm(chunks, desc=name, unit="batch")])


def divergence(model: Any, prompts: Tensor, reference: Tensor, other: Tensor, name: str) -> Divergence:
    """What the first differences of `other` from `reference`, both [prompts, new], look like."""
    compared, gaps, ulps = 0, [], []
    for prompt, mine, yours in zip(prompts, reference, other, strict=True):
        differ = (mine != yours).nonzero()
        at = int(differ[0]) if len(differ) else len(mine) - 1
        compared += at + 1
        if len(differ):
            with torch.no_grad():
                logits = model(torch.cat([prompt, mine[:at]])[None], logits_to_keep=1).logits[0, -1]
            top = logits[mine[at]].float()
            gaps.append((top - logits[yours[at]].float()).abs().item())
            ulps.append(gaps[-1] / (torch.finfo(logits.dtype).eps * 2 ** top.abs().log2().floor().item()))
    gap = torch.tensor(gaps or [0.0])
    return Divergence(
        name,
        str(model.dtype).removeprefix("torch."),
        compared,
        len(gaps),
        1000 * len(gaps) / compared,
        gap.median().item(),
        gap.max().item(),
        max(ulps, default=0.0),
    )


@torch.no_grad()
def logit_errors(model: Any, rows: Tensor, options: argparse.Namespace) -> dict[str, float]:
    """Root mean square error of the logits after a tree's worth of tokens, against fp32 arithmetic on the same weights.

    rows: LongTensor [prompts, T]. By the ways to read those tokens: transformers, one by one, all in one verification.
    """
    nodes = min(1 + sum(options.tree_shape), options.new_tokens)
    exact = copy.deepcopy(model).float()
    squares = {"transformers": 0.0, "vanilla": 0.0, "verification": 0.0}
    for row in rows[:, None, : options.prompt_len + nodes].unbind():
        truth = exact(row, logits_to_keep=nodes).logits
        read = {
            "transformers": model(row, logits_to_keep=nodes).logits,
            "vanilla": read_on(model, row, options.prompt_len, [1] * nodes),
            "verification": read_on(model, row, options.prompt_len, [nodes]),
        }
        for name, logits in read.items():
            squares[name] += (logits.float() - truth).square().mean().item() / len(rows)
    return {name: square**0.5 for name, square in squares.items()}


def read_on(model: GlideMixin, row: Tensor, prompt_len: int, steps: list[int]) -> Tensor:
    """The engine's logits [1, sum(steps), V] after the tokens behind the prompt, read in passes of so many tokens."""
    sampler = Sampler(0.0, 0, 1.0)
    runner = FusedRunner(model)
    drafter = make_drafter("vanilla", runner, 1, sampler, (), 0, "descend")
    engine = Engine(runner, drafter, sampler, row[:, :prompt_len], [prompt_len], sum(steps) + max(steps))
    engine.prefill()
    found, start = [], prompt_len
    for count in steps:
        found.append(engine.verify(chain(row[:, start : start + count])))
        engine.cache.keep(torch.arange(count, device=row.device)[None], torch.tensor([count], device=row.device))
        start += count
    return torch.cat(found, 1)


def table(rows: list[Divergence], errors: dict[str, float]) -> str:
    lines = ["", f"{rows[0].dtype}: against vanilla, batch 1"]
    lines.append(
        f"{'run':<26}{'diverged':>9}{'tokens':>9}{'per 1000':>10}{'median gap':>12}{'largest':>9}{'in ulps':>9}"
    )
    for row in rows:
        lines.append(
            f"{row.run:<26}{row.diverged:>9}{row.compared_tokens:>9}{row.per_1000_tokens:>10.2f}"
            f"{row.median_gap:>12.4f}{row.largest_gap:>9.4f}{row.largest_gap_in_ulps:>9.1f}"
        )
    lines.append(
        "logits' RMS error against fp32: " + ", ".join(f"{name} {error:.4f}" for name, error in errors.items())
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
