"""All samples of an evaluation, and comparisons of methods and contexts on them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas

from longspec.pipeline.settings import TASKS
from longspec.pipeline.tables import NOTHING, Figure, speed_ratio, tokens_per_round, tokens_per_second


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

        loops: include outputs with repetition loops. columns: allowed value of a column, or a tuple of allowed values.
        """
        frame = self.frame
        chosen = (frame["method"] == method) & (frame["temperature"] == temperature)
        if not loops:
            chosen &= ~frame["loops"]
        for name, value in columns.items():
            chosen &= frame[name].isin(value if isinstance(value, tuple) else (value,))
        return frame[chosen]

    def tokens_per_round(self, method: str, temperature: float = 0.0, **columns: Any) -> Figure:
        return tokens_per_round(self.of(method, temperature, **columns))

    def tokens_per_second(self, method: str, temperature: float = 0.0, **columns: Any) -> Figure:
        return tokens_per_second(self.of(method, temperature, **columns))

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

    def length_ratio(self) -> tuple[Figure, str]:
        """The tree's tokens per round at the longest context divided by those at the shortest, and this ratio's name.

        The ratio is that of the same answers, teacher-forced, if they were measured. Otherwise it compares different
        prompts of the tasks that have samples at both contexts. Context 0, the bare question, does not count.
        """
        if len(self.forced):
            shortest, longest = self.forced["length"].min(), self.forced["length"].max()
            same = speed_ratio(self.read(longest), self.read(shortest), seconds="rounds")
            return same, f"{longest} over {shortest} tokens, the same text"
        if len(self.contexts) < 2:
            return NOTHING, ""

        first, last = self.contexts[0], self.contexts[-1]
        both = set(self.of("tree", context=first)["task"]) & set(self.of("tree", context=last)["task"])
        short, long = (self.tokens_per_round("tree", context=one, task=tuple(both)) for one in (first, last))
        # The relative errors of two independent figures add in squares.
        ratio = long.value / short.value
        error = ratio * ((long.error / long.value) ** 2 + (short.error / short.value) ** 2) ** 0.5
        return Figure(ratio, error, long.samples), f"{last} over {first} tokens"
