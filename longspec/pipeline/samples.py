"""All samples of an evaluation, ratios pooled over them with bootstrap standard errors, and Markdown tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas
from numpy.typing import ArrayLike

from longspec.pipeline.settings import TASKS

BOOTSTRAPS = 1000
KEY = ["task", "context", "id"]
"""Columns that identify a prompt; methods are compared on equal keys."""


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


def rate(samples: pandas.DataFrame, per: str, tokens: str = "decoded_tokens") -> Figure:
    """The ratio of two columns' sums: tokens per "rounds", or per second of "decode_s", which is without prefill."""
    return pooled([samples[tokens], samples[per]], prompt_names(samples))


def speed_ratio(
    samples: pandas.DataFrame, others: pandas.DataFrame, tokens: str = "decoded_tokens", seconds: str = "decode_s"
) -> Figure:
    """Tokens/s of `samples` divided by those of `others`, over the prompts that both have."""
    both = samples.merge(others, on=KEY, suffixes=("", "_other"))
    return pooled([both[name] for name in (tokens, seconds, f"{tokens}_other", f"{seconds}_other")], prompt_names(both))


def prompt_names(samples: pandas.DataFrame) -> list[str]:
    """The prompt of each sample."""
    return [f"{task} {context} {name}" for task, context, name in zip(*(samples[key] for key in KEY), strict=True)]


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


@dataclass(frozen=True)
class Samples:
    """All samples of an evaluation."""

    frame: pandas.DataFrame
    forced: pandas.DataFrame = field(default_factory=pandas.DataFrame)
    """The samples of method FORCED at the longest context, outputs without loops. `length`: prompt tokens read."""

    @classmethod
    def of_lines(cls, lines: Sequence[dict[str, Any]]) -> "Samples":
        """The samples of an evaluation's lines (see `cells.read_samples`)."""
        forced = pandas.DataFrame([line for line in lines if "bound" in line])
        if len(forced):
            forced = forced[(forced["context"] == forced["context"].max()) & ~forced["loops"]]
            forced = forced.assign(length=forced["last_tokens"].fillna(forced["context"]).astype(int))
        return cls(pandas.DataFrame([line for line in lines if "bound" not in line]), forced)

    def of(self, method: str, temperature: float = 0.0, *, loops: bool = False, **columns: Any) -> pandas.DataFrame:
        """The samples of a method at a temperature.

        loops: include outputs with repetition loops. columns: allowed value of a column, or a tuple of allowed values;
        None for all.
        """
        frame = self.frame
        chosen = (frame["method"] == method) & (frame["temperature"] == temperature)
        if not loops:
            chosen &= ~frame["loops"]
        for name, value in columns.items():
            if value is not None:
                chosen &= frame[name].isin(value if isinstance(value, tuple) else (value,))
        return frame[chosen]

    def tokens_per_round(self, method: str, temperature: float = 0.0, **columns: Any) -> Figure:
        return rate(self.of(method, temperature, **columns), "rounds")

    def tokens_per_second(self, method: str, temperature: float = 0.0, **columns: Any) -> Figure:
        return rate(self.of(method, temperature, **columns), "decode_s")

    def speed_up(self, method: str, other: str, temperature: float = 0.0, **columns: Any) -> Figure:
        """Tokens/s of `method` divided by those of `other`, over the prompts where neither output loops."""
        return speed_ratio(self.of(method, temperature, **columns), self.of(other, temperature, **columns))

    @property
    def tasks(self) -> list[str]:
        return [task for task in TASKS if task in set(self.frame["task"])]

    @property
    def contexts(self) -> list[int]:
        """The contexts without 0, the bare question."""
        return sorted(set(self.frame["context"]) - {0})

    @property
    def long_tasks(self) -> tuple[str, ...]:
        """The tasks that have samples of the tree at every context, so that contexts compare over these tasks."""
        tree = self.of("tree", loops=True)
        measured = {task: set(tree["context"][tree["task"] == task]) for task in self.tasks}
        return tuple(task for task, contexts in measured.items() if contexts >= set(self.contexts))

    def read(self, length: int, task: str | None = None) -> pandas.DataFrame:
        """The forced samples that read this number of prompt tokens; task: None for all."""
        chosen = self.forced["length"] == length
        return self.forced[chosen if task is None else chosen & (self.forced["task"] == task)]
