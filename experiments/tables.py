"""Figures from samples: pooled ratios with bootstrap standard errors, and tables in Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas
from numpy.typing import ArrayLike

BOOTSTRAPS = 1000
KEY = ["task", "context", "id", "seed"]
"""Columns that name a prompt of a sample and its random numbers."""


class Figure(NamedTuple):
    """A measured value, its standard error over prompts (nan for fewer than two), and the number of samples."""

    value: float
    error: float
    samples: int

    def __str__(self) -> str:
        if np.isnan(self.value):
            return "-"
        return f"{self.value:.2f}" if np.isnan(self.error) else f"{self.value:.2f} ± {self.error:.2f}"


NOTHING = Figure(float("nan"), float("nan"), 0)


def pooled(columns: Sequence[ArrayLike], prompts: Sequence[str]) -> Figure:
    """Sum over sum of two columns, or of four the first two's over the last two's, with its bootstrap standard error.

    prompts: the name of each row's prompt; rows of one prompt are drawn together.
    """
    values = np.stack([np.asarray(column, float) for column in columns])
    if not values.shape[1]:
        return NOTHING
    names = pandas.factorize(pandas.Series(list(prompts)))[0]
    sums = np.stack([np.bincount(names, weights=column) for column in values])
    prompt_count, error = sums.shape[1], float("nan")
    if prompt_count > 1:
        chances = np.full(prompt_count, 1 / prompt_count)
        draws = np.random.default_rng(0).multinomial(prompt_count, chances, size=BOOTSTRAPS)
        drawn = _ratio(sums @ draws.T)
        error = float(np.std(drawn[np.isfinite(drawn)], ddof=1))
    return Figure(float(_ratio(sums.sum(1))), error, values.shape[1])


def _ratio(sums: np.ndarray) -> np.ndarray:
    """Along the first axis, of length 2 or 4."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = sums[::2] / sums[1::2]
        return ratios[0] / ratios[1] if len(ratios) == 2 else ratios[0]


def tokens_per_round(samples: pandas.DataFrame) -> Figure:
    """Tokens that verification passes emitted, per pass."""
    return pooled([samples["decoded_tokens"], samples["rounds"]], _prompts(samples))


def tokens_per_second(samples: pandas.DataFrame) -> Figure:
    """Decoding speed, prefill apart."""
    return pooled([samples["decoded_tokens"], samples["decode_s"]], _prompts(samples))


def speed_ratio(
    samples: pandas.DataFrame, others: pandas.DataFrame, tokens: str = "decoded_tokens", seconds: str = "decode_s"
) -> Figure:
    """Tokens/s over those of another method, on the prompts that both decoded."""
    both = samples.merge(others, on=KEY, suffixes=("", "_other"))
    return pooled([both[name] for name in (tokens, seconds, f"{tokens}_other", f"{seconds}_other")], _prompts(both))


def _prompts(samples: pandas.DataFrame) -> list[str]:
    return [f"{task} {context} {name}" for task, context, name in zip(*(samples[k] for k in KEY[:3]), strict=True)]


def markdown(frame: pandas.DataFrame) -> str:
    """A table in Markdown; numbers with three digits after the point, missing values as -."""
    header = [str(name) for name in frame.columns]
    rows = [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "-"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
