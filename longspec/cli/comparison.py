"""The comparison of a pair's methods on the same prompts: tokens per second, acceptance, time to first token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from longspec.cli.answers import PromptRun
from longspec.cli.pair import LoadedPair, SamplingOptions
from longspec.cli.prompts import Prompt
from longspec.inference.device import device_name
from longspec.inference.generate import GenerationOutput
from longspec.inference.methods import AUTO, GLIDE_METHODS
from longspec.inference.stats import pool

METHODS = ("vanilla", "lookup", "tree", AUTO)
WARM_UP_TOKENS = 16
SEED = 0


def compare(
    pair: LoadedPair, prompts: Sequence[Prompt], sampling: SamplingOptions, report: Callable[[str], object]
) -> dict[str, Any]:
    """Measure each method that the pair has a draft for. Returns a summary.

    The methods take turns at each prompt, so that a device whose speed changes affects all of them alike. report:
    called with a method before it answers a prompt. Raises UserError, with its location, for a prompt that the target
    cannot take.
    """
    run = PromptRun(pair, prompts, sampling, batch_size=1, seed=SEED)
    token_ids = list(run.token_ids.values())

    def answer(prompt: list[int], sampling: SamplingOptions, method: str) -> GenerationOutput:
        # Without an EOS, all methods generate the same number of tokens.
        return pair.generate([prompt], sampling, method=method, eos_token_id=(), seed=SEED)

    skipped = [] if pair.model.draft_is_trained else [method for method in METHODS if method in GLIDE_METHODS]
    outputs: dict[str, list[GenerationOutput]] = {method: [] for method in METHODS if method not in skipped}
    # The longest prompt, so that kernels are compiled and caches allocated before the measurement.
    warm_up = replace(sampling, max_new_tokens=min(WARM_UP_TOKENS, sampling.max_new_tokens))
    for method in outputs:
        answer(max(token_ids, key=len), warm_up, method)
    for prompt in token_ids:
        for method, answers in outputs.items():
            report(method)
            answers.append(answer(prompt, sampling, method))

    methods = {method: figures(answers, outputs["vanilla"]) for method, answers in outputs.items()}
    return {
        "model": pair.name,
        "device": device_name(pair.model.device),
        "dtype": str(pair.model.dtype).removeprefix("torch."),
        "deterministic": pair.deterministic,
        "prompts": len(prompts),
        "prompt_tokens": sum(len(ids) for ids in token_ids),
        **vars(sampling),
        "methods": methods,
        "skipped": {method: f"{pair.name} has no trained draft" for method in skipped},
    }


def figures(answers: Sequence[GenerationOutput], vanilla: Sequence[GenerationOutput]) -> dict[str, Any]:
    """The figures of a method over all its answers, next to those of vanilla."""
    stats, base = (pool([answer.stats for answer in some]) for some in (answers, vanilla))
    pairs = zip(answers, vanilla, strict=True)
    return {
        "tokens_per_second": stats.tokens_per_second,
        "speedup": stats.tokens_per_second / base.tokens_per_second,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "ttft_s": stats.ttft_s / len(answers),
        "tree_shape": list(answers[-1].stats.tree_shape),
        # At temperature 0. In half precision, near-ties may differ unless decoding is deterministic.
        "equal_outputs": sum(own.new_tokens[0].equal(its.new_tokens[0]) for own, its in pairs),
    }


def result_table(summary: dict[str, Any]) -> Table:
    """A table of the summary's figures, one row per method."""
    title = f"{summary['model']} on {summary['device']}, {summary['dtype']}, {summary['prompts']} prompts"
    table = Table("method", title=title)
    for heading in ("tokens/s", "speedup", "tokens per pass", "first token", "as vanilla"):
        table.add_column(heading, justify="right")
    for label, row in summary["methods"].items():
        table.add_row(
            label,
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['mean_acceptance_length']:.2f}",
            f"{1000 * row['ttft_s']:.0f} ms",
            f"{row['equal_outputs']} of {summary['prompts']}" if not summary["temperature"] else "",
        )
    return table
