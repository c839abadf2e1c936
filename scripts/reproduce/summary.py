"""What the cells of an evaluation say together: pooled, with spread, and apart for outputs that loop.

A pooled figure weighs every verification pass, or every second, the same. Its spread is the standard error of a
bootstrap over samples; where there are several seeds, the least and the largest seed's own figure are told too.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from statistics import stdev
from typing import Any, TypeVar

from scripts.reproduce.cells import CELL_FIELDS
from scripts.reproduce.pair import CODE_TASKS

T = TypeVar("T")
Sample = dict[str, Any]
"""A sample's line, with its cell's name, temperature, seed, task and context."""

LOOPS_BELOW = 0.5
"""An output with a smaller share of distinct 4-grams loops."""
RESAMPLES = 400


def samples_of(lines: Iterable[dict[str, Any]]) -> list[Sample]:
    """All samples of an evaluation's cells."""
    return [{field: line[field] for field in CELL_FIELDS} | sample for line in lines for sample in line["samples"]]


def chosen(samples: Iterable[Sample], **wanted: Any) -> list[Sample]:
    """The samples with these values; a tuple, list or set stands for any of its members."""
    return [
        sample
        for sample in samples
        if all(
            sample[name] in value if isinstance(value, tuple | list | set) else sample[name] == value
            for name, value in wanted.items()
        )
    ]


def loops(sample: Sample) -> bool:
    share = sample["distinct_4grams"]
    return share is not None and share < LOOPS_BELOW


def without_loops(samples: Iterable[Sample]) -> list[Sample]:
    return [sample for sample in samples if not loops(sample)]


def acceptance(samples: Sequence[Sample]) -> float | None:
    """Tokens that verification passes emitted, over passes; None without any."""
    return _ratio(samples, "decoded_tokens", "rounds")


def speed(samples: Sequence[Sample]) -> float | None:
    """Decoded tokens a second."""
    return _ratio(samples, "decoded_tokens", "decode_s")


def round_ms(samples: Sequence[Sample]) -> float | None:
    seconds = _ratio(samples, "decode_s", "rounds")
    return None if seconds is None else 1e3 * seconds


def _ratio(samples: Sequence[Sample], above: str, below: str) -> float | None:
    pairs = [(sample[above], sample[below]) for sample in samples if sample.get(below)]
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs) if pairs else None


def pooled(samples: Sequence[Sample], figure: Callable[[Sequence[Sample]], float | None]) -> dict[str, Any] | None:
    """A figure over all samples, its spread, and its range over the seeds; None if nothing was measured."""
    value = figure(samples)
    if value is None:
        return None
    seeds = [figure(chosen(samples, seed=seed)) for seed in sorted({sample["seed"] for sample in samples})]
    by_seed = [one for one in seeds if one is not None]
    return {
        "value": value,
        "error": spread(samples, figure),
        "samples": len(samples),
        "seeds": [min(by_seed), max(by_seed)] if len(by_seed) > 1 else None,
    }


def spread(found: Sequence[T], figure: Callable[[Sequence[T]], float | None]) -> float | None:
    """The standard error of a figure, by a bootstrap over what it is taken of."""
    chance = random.Random(0)
    again = [figure(chance.choices(found, k=len(found))) for _ in range(RESAMPLES)]
    known = [one for one in again if one is not None]
    return stdev(known) if len(found) > 1 and len(known) > 1 else None


def shown(figure: dict[str, Any] | None) -> str:
    """A pooled figure with its spread."""
    if figure is None:
        return "–"
    text = f"{figure['value']:.2f}"
    if figure["error"] is not None:
        text += f" ± {figure['error']:.2f}"
    if figure["seeds"] is not None:
        text += f" (seeds {figure['seeds'][0]:.2f} … {figure['seeds'][1]:.2f})"
    return text


def by_depth(samples: Sequence[Sample]) -> list[float]:
    """Entry d - 1: the share of rounds that emitted at least d draft tokens."""
    counted = [sample for sample in samples if sample.get("rounds")]
    rounds = sum(sample["rounds"] for sample in counted)
    columns = zip_longest(*(sample["accepted_by_depth"] for sample in counted), fillvalue=0)
    return [sum(column) / rounds for column in columns]


def paired(samples: Sequence[Sample], others: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Both restricted to the prompts that both have."""

    def places(found: Sequence[Sample]) -> set[tuple[Any, ...]]:
        return {_place(sample) for sample in found}

    both = places(samples) & places(others)
    mine, theirs = ([sample for sample in found if _place(sample) in both] for found in (samples, others))
    return mine, theirs


def _place(sample: Sample) -> tuple[Any, ...]:
    return sample["task"], sample["context"], sample["id"]


def speed_up(samples: Sequence[Sample], others: Sequence[Sample]) -> dict[str, Any] | None:
    """The ratio of decoding speeds on the prompts that both have, with its spread over them, as a pooled figure."""
    prompts: dict[tuple[Any, ...], tuple[list[Sample], list[Sample]]] = defaultdict(lambda: ([], []))
    for side, found in enumerate(paired(samples, others)):
        for sample in found:
            prompts[_place(sample)][side].append(sample)

    def ratio(prompts: Sequence[tuple[list[Sample], list[Sample]]]) -> float | None:
        mine, theirs = (speed([*chain.from_iterable(prompt[side] for prompt in prompts)]) for side in (0, 1))
        return mine / theirs if mine and theirs else None

    both = list(prompts.values())
    if (value := ratio(both)) is None:
        return None
    return {"value": value, "error": spread(both, ratio), "samples": len(both), "seeds": None}


def speed_up_by_cell(samples: Sequence[Sample], others: Sequence[Sample]) -> dict[tuple[str, int], float]:
    """The ratio of decoding speeds by task and context, where both were measured, whichever the prompts: for others
    that emit a token a pass, so that neither their text nor whether it loops tells in their speed."""
    ratios = {}
    for task, context in dict.fromkeys((sample["task"], sample["context"]) for sample in samples):
        mine, theirs = (speed(chosen(found, task=task, context=context)) for found in (samples, others))
        if mine and theirs:
            ratios[task, context] = mine / theirs
    return ratios


def sameness(samples: Sequence[Sample], vanilla: Sequence[Sample]) -> dict[str, Any] | None:
    """How the tokens of a method differ from vanilla's at temperature 0: in half precision near-ties can flip.

    per_1000_tokens: first differences among the tokens up to and with them.
    """
    theirs = {_place(sample): sample["token_ids"] for sample in vanilla}
    outputs = compared = different = 0
    first: list[int] = []
    for sample in samples:
        if (other := theirs.get(_place(sample))) is None:
            continue
        mine = sample["token_ids"]
        length = min(len(mine), len(other))  # a baseline may have been given fewer tokens
        at = next((place for place in range(length) if mine[place] != other[place]), None)
        compared += length if at is None else at + 1
        if at is not None:
            first.append(at)
        different += at is not None
        outputs += 1
    if not compared:
        return None
    return {
        "outputs": outputs,
        "different": different,
        "per_1000_tokens": 1000 * different / compared,
        "earliest_difference": min(first, default=None),
    }


def method_summary(samples: Sequence[Sample], vanilla: Sequence[Sample]) -> dict[str, Any]:
    """The figures of one method at one temperature, over whichever cells these samples come from."""
    looping = [sample for sample in samples if loops(sample)]
    straight = without_loops(samples)
    shares = [sample["distinct_4grams"] for sample in samples if sample["distinct_4grams"] is not None]
    return {
        "samples": len(samples),
        "acceptance_length": pooled(samples, acceptance),
        "acceptance_length_of_loops": pooled(looping, acceptance),
        "acceptance_length_without_loops": pooled(straight, acceptance),
        "acceptance_by_depth": by_depth(straight),
        "tokens_per_second": pooled(samples, speed),
        "tokens_per_second_without_loops": pooled(straight, speed),
        "speed_up_over_vanilla": speed_up(samples, vanilla),
        "speed_up_over_vanilla_without_loops": speed_up(straight, vanilla),
        "round_ms": round_ms(samples),
        "ttft_s": sum(sample["ttft_s"] for sample in samples) / len(samples),
        "loops": len(looping),
        "distinct_4grams": sum(shares) / len(shares) if shares else None,
        "stopped_at_eos": sum(sample["stopped_at_eos"] for sample in samples),
        "tree_shapes": sorted({(s["context"], *s["tree_shape"]) for s in samples if s.get("tree_shape")}),
    }


def summarise(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each method and temperature: all its cells together, by context, task and kind of text, and each cell."""
    samples = samples_of(lines)
    rows = []
    for name, temperature in dict.fromkeys((sample["name"], sample["temperature"]) for sample in samples):
        mine = chosen(samples, name=name, temperature=temperature)
        vanilla = chosen(samples, name="vanilla", temperature=temperature)
        contexts, tasks = (list(dict.fromkeys(sample[of] for sample in mine)) for of in ("context", "task"))

        def group(mine: list[Sample] = mine, vanilla: list[Sample] = vanilla, **wanted: Any) -> dict[str, Any] | None:
            found = chosen(mine, **wanted)
            return method_summary(found, chosen(vanilla, **wanted)) if found else None

        rows.append(
            {
                "name": name,
                "temperature": temperature,
                "all": group(),
                "by_context": {str(context): group(context=context) for context in sorted(contexts)},
                "by_task": {task: group(task=task) for task in tasks},
                "by_kind": {
                    "code": group(task=CODE_TASKS),
                    "others": group(task=[task for task in tasks if task not in CODE_TASKS]),
                },
                "cells": [
                    {"task": task, "context": context, "samples": len(cell)}
                    | {of.__name__: pooled(cell, of) for of in (acceptance, speed)}
                    | {"acceptance_without_loops": pooled(without_loops(cell), acceptance)}
                    for task in tasks
                    for context in sorted(contexts)
                    if (cell := chosen(mine, task=task, context=context))
                ],
                "same_as_vanilla": sameness(mine, vanilla) if temperature == 0 else None,
            }
        )
    return rows
