"""How often rounding in half precision makes greedy output differ from vanilla's at batch 1.

The runs that are compared are each method, vanilla itself at another batch size, and transformers. `python -m
benchmarks.lossless --target FOLDER --draft FOLDER --data FILE.jsonl` prints a table and one JSON line.
"""

import argparse
import copy
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
from longspec import generate
from longspec.data.prompts import loops
from longspec.errors import UserError, reports_user_errors
from longspec.inference.device import versions
from longspec.inference.drafting.proposal import chain as chain_proposal
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.fused_runner import FusedRunner
from longspec.inference.methods import Drafting, make_drafter
from longspec.inference.sampling import GREEDY
from longspec.models.families import family_class
from longspec.models.glide import GlideMixin
from longspec.models.target_files import load_tokenizer, read_config

Continue = Callable[[Tensor], Tensor]
"""Maps prompts LongTensor [B, P] to their greedy continuations LongTensor [B, new]."""


COLUMNS = {
    **{"run": "", "compared_tokens": "", "diverged": "", "per_1000_tokens": ".2f"},
    **{"median_gap": ".4f", "largest_gap": ".4f", "largest_gap_in_ulps": ".1f"},
}


@reports_user_errors
def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        raise UserError("benchmarks.lossless: needs a CUDA device; none is available")
    config = read_config(options.target)
    prompts = read_prompts(options.data, load_tokenizer(options.target, config), options.prompts, options.prompt_len)
    prompts = prompts.to("cuda")
    rows: list[dict[str, Any]] = []
    errors: dict[str, dict[str, float]] = {}
    looping: dict[str, int] = {}

    for name in options.dtypes:
        pair = family_class(config, options.target).from_pretrained(
            options.target, glide_path=options.draft, torch_dtype=name
        )
        model: Any = pair.cuda().eval()  # type: ignore[call-arg]
        # All runs generate the same number of tokens, without the penalties of the file.
        model.generation_config = GenerationConfig()
        reference, divergences = compare(model, prompts, options)
        rows += divergences
        looping[name] = sum(map(loops, reference.tolist()))
        errors[name] = logit_errors(model, torch.cat([prompts, reference], 1), options)
        figures = ", ".join(f"{kind} {error:.4f}" for kind, error in errors[name].items())
        print(f"\n{name}: compared with vanilla, batch 1\n\n{table(divergences, COLUMNS)}")
        print(f"\nRMS error of the logits against fp32: {figures}", flush=True)
        del model, pair

    results = {"runs": rows, "logit_rms_error": errors, "looping_outputs": looping}
    print_result("lossless", options, device=torch.cuda.get_device_name(), versions=versions(), **results)


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


def compare(model: Any, prompts: Tensor, options: argparse.Namespace) -> tuple[Tensor, list[dict[str, Any]]]:
    """Vanilla's tokens at batch 1, LongTensor [prompts, new], and the divergence of every other run from them."""

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
    return reference, divergences


def in_batches(run: Continue, prompts: Tensor, batch: int, name: str) -> Tensor:
    chunks = prompts.split(batch)
    return torch.cat([run(chunk) for chunk in tqdm(chunks, desc=name, unit="batch")])


def divergence(model: Any, prompts: Tensor, reference: Tensor, other: Tensor, name: str) -> dict[str, Any]:
    """A run compared with vanilla at batch 1, both LongTensor [prompts, new], up to the first token that differs.

    diverged: number of prompts whose continuation differs. Gaps are differences between the target's logits of
    vanilla's token and of the run's token (transformers, same dtype, converted to fp32), in units in the last place
    (ulps) of the dtype at the logit of vanilla's token.
    """
    compared = 0
    gaps, ulps = [], []
    for prompt, expected, actual in zip(prompts, reference, other, strict=True):
        differing = (expected != actual).nonzero()
        last = int(differing[0]) if len(differing) else len(expected) - 1
        compared += last + 1
        if len(differing):
            with torch.no_grad():
                logits = model(torch.cat([prompt, expected[:last]])[None], logits_to_keep=1).logits[0, -1]
            top = logits[expected[last]].float()
            gaps.append((top - logits[actual[last]].float()).abs().item())
            # One ulp of a number in [2^e, 2^(e+1)) is eps * 2^e.
            ulp = torch.finfo(logits.dtype).eps * 2 ** top.abs().log2().floor().item()
            ulps.append(gaps[-1] / ulp)
    gap = torch.tensor(gaps or [0.0])
    return {
        "run": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "compared_tokens": compared,
        "diverged": len(gaps),
        "per_1000_tokens": 1000 * len(gaps) / compared,
        "median_gap": gap.median().item(),
        "largest_gap": gap.max().item(),
        "largest_gap_in_ulps": max(ulps, default=0.0),
    }


@torch.no_grad()
def logit_errors(model: Any, rows: Tensor, options: argparse.Namespace) -> dict[str, float]:
    """RMS error of the logits for one tree's number of tokens after the prompt, against fp32 with the same weights.

    rows: LongTensor [prompts, T]. The tokens are read in three ways: by transformers in one forward pass, by the engine
    one by one ("vanilla"), and by the engine in one verification pass.
    """
    nodes = min(1 + sum(options.tree_shape), options.new_tokens)
    exact = copy.deepcopy(model).float()
    squares = {"transformers": 0.0, "vanilla": 0.0, "verification": 0.0}
    for row in rows[:, None, : options.prompt_len + nodes].unbind():
        exact_logits = exact(row, logits_to_keep=nodes).logits
        read = {
            "transformers": model(row, logits_to_keep=nodes).logits,
            "vanilla": read_on(model, row, options.prompt_len, [1] * nodes),
            "verification": read_on(model, row, options.prompt_len, [nodes]),
        }
        for name, logits in read.items():
            squares[name] += (logits.float() - exact_logits).square().mean().item() / len(rows)
    return {name: square**0.5 for name, square in squares.items()}


def read_on(model: GlideMixin, row: Tensor, prompt_len: int, steps: list[int]) -> Tensor:
    """The engine's logits [1, sum(steps), V] for the tokens after the prompt, read in passes of `steps` tokens each."""
    sampler = GREEDY
    runner = FusedRunner(model)
    drafter = make_drafter(Drafting("vanilla"), runner, 1, sampler)
    engine = StaticBatch(runner, drafter, sampler, row[:, :prompt_len], [prompt_len], sum(steps) + max(steps))
    engine.prefill()
    logits = []
    start = prompt_len
    for count in steps:
        logits.append(engine.verify(chain_proposal(row[:, start : start + count])))
        path, counts = torch.arange(count, device=row.device)[None], torch.tensor([count], device=row.device)
        engine.cache.keep(path, counts, runner.backend)
        start += count
    return torch.cat(logits, 1)


if __name__ == "__main__":
    main()
