"""Ratios pooled over samples with bootstrap standard errors, and Markdown tables."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas
from numpy.typing import ArrayLike

BOOTSTRAPS = 1000
KEY = ["task", "context", "id", "seed"]
"""Columns that identify a prompt and the seed of its decoding; methods are compared on equal keys."""


class Figure(NamedTuple):
    """A measured value, its standard error over prompts (nan with fewer than two), and its number of samples."""

    value: float
    error: float
    samples: int

    def text(self, digits: int) -> str:
        if np.isnan(self.value):
            return "-"
        return f"{self.value:.{digits}f}" + ("" if np.isnan(self.error) else f" ± {self.error:.{digits}f}")

    def __str__(self) -> str:
        return self.text(2)


NOTHING = Figure(float("nan"), float("nan"), 0)


def pooled(columns: Sequence[ArrayLike], prompts: Sequence[str]) -> Figure:
    """The ratio of two columns' sums, with its bootstrap standard error over prompts.

    With four columns a, b, c, d the value is (sum(a) / sum(b)) / (sum(c) / sum(d)). prompts: the prompt of each row;
    the bootstrap resamples prompts, so rows of one prompt stay together.
    """
    values = np.stack([np.asarray(column, float) for column in columns])
    if not values.shape[1]:
        return NOTHING
    names = pandas.factorize(pandas.Series(list(prompts)))[0]
    sums = np.stack([np.bincount(names, weights=column) for column in values])
    prompt_count = sums.shape[1]
    error = float("nan")
    if prompt_count > 1:
        chances = np.full(prompt_count, 1 / prompt_count)
        draws = np.random.default_rng(0).multinomial(prompt_count, chances, size=BOOTSTRAPS)
        drawn = _ratio(sums @ draws.T)
        error = float(np.std(drawn[np.isfinite(drawn)], ddof=1))
    return Figure(float(_ratio(sums.sum(1))), error, values.shape[1])


def _ratio(sums: np.ndarray) -> np.ndarray:
    """The ratio (see `pooled`) along the first axis, of length 2 or 4."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = sums[::2] / sums[1::2]
        return ratios[0] / ratios[1] if len(ratios) == 2 else ratios[0]


def tokens_per_round(samples: pandas.DataFrame, tokens: str = "decoded_tokens") -> Figure:
    """Tokens emitted per verification pass, or the sum of another column per pass."""
    return pooled([samples[tokens], samples["rounds"]], prompt_names(samples))


def tokens_per_second(samples: pandas.DataFrame) -> Figure:
    """Decoding speed without prefill, over the samples that have a time."""
    timed = samples.dropna(subset="decode_s")
    return pooled([timed["decoded_tokens"], timed["decode_s"]], prompt_names(timed))


def speed_ratio(
    samples: pandas.DataFrame, others: pandas.DataFrame, tokens: str = "decoded_tokens", seconds: str = "decode_s"
) -> Figure:
    """Tokens/s of `samples` divided by those of `others`, over the prompts for which both have a time."""
    names = [tokens, seconds, f"{tokens}_other", f"{seconds}_other"]
    both = samples.merge(others, on=KEY, suffixes=("", "_other")).dropna(subset=names)
    return pooled([both[name] for name in names], prompt_names(both))


def prompt_names(samples: pandas.DataFrame) -> list[str]:
    """The prompt of each sample."""
    return [f"{task} {context} {name}" for task, context, name in zip(*(samples[k] for k in KEY[:3]), strict=True)]


def context_name(context: int) -> str:
    return f"{context} tokens" if context else "short"


def markdown(frame: pandas.DataFrame) -> str:
    """A Markdown table. Numbers have at most three decimals; missing values are shown as -."""
    header = [str(name) for name in frame.columns]
    rows = [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "-"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
