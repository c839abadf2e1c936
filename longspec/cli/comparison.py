"""The comparison of a pair's methods on the same prompts: tokens per second, acceptance, time to first token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import eq
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
"""The methods that are compared."""
WARM_UP_TOKENS = 16
"""New tokens of the warm-up."""
SEED = 0


def compare(
    pair: LoadedPair, prompts: Sequence[Prompt], sampling: SamplingOptions, report: Callable[[str], object]
) -> dict[str, Any]:
    """Measure each method that the pair has a draft for. Returns a summary.

    The methods take turns at each prompt, so that a device whose speed changes affects all of them alike. report:
    called with a method before it answers a prompt. Raises UserError, with its location, for a prompt that the target
    cannot take.
    """
    run = PromptRun(pair, prompts, sampling, batch_size=1, seed=SEED, chat=pair.chat_format != "plain")
    token_ids = list(run.token_ids.values())

    skipped: dict[str, str] = {}
    outputs: dict[str, list[GenerationOutput]] = {}
    for label in METHODS:
        if label in GLIDE_METHODS and not pair.model.draft_is_trained:
            skipped[label] = f"{pair.name} has no trained draft"
        else:
            outputs[label] = []
            # The longest prompt, so that kernels are compiled and caches allocated before the measurement.
            warm_up = replace(sampling, max_new_tokens=min(WARM_UP_TOKENS, sampling.max_new_tokens))
            answer(pair, max(token_ids, key=len), warm_up, label)
    for prompt in token_ids:
        for label, answers in outputs.items():
            report(label)
            answers.append(answer(pair, prompt, sampling, label))

    methods = {label: figures(answers) for label, answers in outputs.items()}
    tokens = {label: [output.new_tokens[0].tolist() for output in answers] for label, answers in outputs.items()}
    for label, row in methods.items():
        row["speedup"] = row["tokens_per_second"] / methods["vanilla"]["tokens_per_second"]
        if not sampling.temperature:  # in half precision, near-ties may differ unless decoding is deterministic
            row["equal_outputs"] = sum(map(eq, tokens[label], tokens["vanilla"]))
    return {
        "model": pair.name,
        "device": device_name(pair.model.device),
        "dtype": str(pair.model.dtype).removeprefix("torch."),
        "deterministic": pair.deterministic,
        "prompts": len(prompts),
        "prompt_tokens": sum(len(ids) for ids in token_ids),
        **vars(sampling),
        "methods": methods,
        "skipped": skipped,
    }


def answer(pair: LoadedPair, prompt: list[int], sampling: SamplingOptions, method: str) -> GenerationOutput:
    """Answer a prompt. Without an EOS, all methods generate the same number of tokens."""
    return pair.generate([prompt], sampling, method=method, eos_token_id=(), seed=SEED)


def figures(answers: Sequence[GenerationOutput]) -> dict[str, Any]:
    """The figures of a method over all its answers."""
    stats = pool([answer.stats for answer in answers])
    return {
        "tokens_per_second": stats.tokens_per_second,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "ttft_s": stats.ttft_s / len(answers),
        "tree_shape": list(answers[-1].stats.tree_shape),
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
            f"{row['equal_outputs']} of {summary['prompts']}" if "equal_outputs" in row else "",
        )
    return table
