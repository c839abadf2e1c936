"""How often rounding in half precision makes greedy output differ from vanilla's at batch 1.

The runs that are compared are each method, vanilla itself at another batch size, and transformers. `python -m
benchmarks.lossless --target FOLDER --draft FOLDER --data FILE.jsonl` prints a table and one JSON line.
"""

import argparse
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerBase

from benchmarks.tables import print_result, table
from longspec import generate, load_pair
from longspec.errors import UserError, reports_user_errors
from longspec.inference.device import versions

Continue = Callable[[Tensor], Tensor]
"""Maps prompts LongTensor [B, P] to their greedy continuations LongTensor [B, new]."""


COLUMNS = {
    **{"run": "", "compared_tokens": "", "diverged": "", "per_1000_tokens": ".2f"},
    "largest_gap_in_ulps": ".1f",
}


@reports_user_errors
def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        raise UserError("benchmarks.lossless: needs a CUDA device; none is available")
    rows: list[dict[str, Any]] = []
    for name in options.dtypes:
        model, tokenizer = load_pair(options.target, draft=options.draft, dtype=name)
        prompts = read_prompts(options.data, tokenizer, options.prompts, options.prompt_len).to("cuda")
        # All runs generate the same number of tokens, without the penalties of the file.
        model.generation_config = GenerationConfig()
        divergences = compare(model, prompts, options)
        rows += divergences
        print(f"\n{name}: compared with vanilla, batch 1\n\n{table(divergences, COLUMNS)}", flush=True)
        del model
    print_result("lossless", options, device=torch.cuda.get_device_name(), versions=versions(), runs=rows)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--target", required=True)
    add("--draft", required=True)
    add("--data", type=Path, required=True, help="JSONL file with a field `text`, from which prompts are cut")
    add("--prompts", type=int, default=48)
    add("--prompt_len", type=int, default=768)
    add("--new_tokens", type=int, default=256)
    add("--dtypes", nargs="+", default=["bfloat16", "float16"], choices=["bfloat16", "float16", "float32"])
    add("--tree_shape", type=int, nargs="+", default=[4, 16, 16, 16, 16])
    add("--gamma", type=int, default=4)
    add("--batch_size", type=int, default=8, help="batch size of the runs that are not at batch 1")
    return parser.parse_args()


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, count: int, length: int) -> Tensor:
    """LongTensor [count, length]: pieces at equal distances in the concatenated tokens of all texts."""
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    token_ids = tokenizer(texts, verbose=False)["input_ids"]
    tokens = torch.tensor(list(chain.from_iterable(token_ids)))
    starts = torch.linspace(0, len(tokens) - length, count).long()
    return torch.stack([tokens[start : start + length] for start in starts])


def compare(model: Any, prompts: Tensor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The divergence of every other run from vanilla at batch 1."""

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
    divergences = []
    for name, (run, batch) in others.items():
        output = in_batches(run, prompts, batch, name)
        divergences.append(divergence(model, prompts, reference, output, name))
    return divergences


def in_batches(run: Continue, prompts: Tensor, batch: int, name: str) -> Tensor:
    chunks = prompts.split(batch)
    return torch.cat([run(chunk) for chunk in tqdm(chunks, desc=name, unit="batch")])


def divergence(model: Any, prompts: Tensor, reference: Tensor, other: Tensor, name: str) -> dict[str, Any]:
    """A run compared with vanilla at batch 1, both LongTensor [prompts, new], up to the first token that differs.

    diverged: number of prompts whose continuation differs. The gap is the difference between the target's logits of
    vanilla's token and of the run's token (transformers, same dtype), in units in the last place (ulps) of the dtype at
    the logit of vanilla's token.
    """
    compared = 0
    ulps = []
    for prompt, expected, actual in zip(prompts, reference, other, strict=True):
        differing = (expected != actual).nonzero()
        last = int(differing[0]) if len(differing) else len(expected) - 1
        compared += last + 1
        if len(differing):
            with torch.no_grad():
                logits = model(torch.cat([prompt, expected[:last]])[None], logits_to_keep=1).logits[0, -1]
            top = logits[expected[last]].float()
            gap = (top - logits[actual[last]].float()).abs().item()
            # One ulp of a number in [2^e, 2^(e+1)) is eps * 2^e.
            ulps.append(gap / (torch.finfo(logits.dtype).eps * 2 ** top.abs().log2().floor().item()))
    return {
        "run": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "compared_tokens": compared,
        "diverged": len(ulps),
        "per_1000_tokens": 1000 * len(ulps) / compared,
        "largest_gap_in_ulps": max(ulps, default=0.0),
    }


if __name__ == "__main__":
    main()
