"""`tree_shape="auto"`: the tree that emits the most tokens per second, measured once per model, device and context."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, stdev

import torch
from torch import Tensor

from longspec.inference.capture import capture_round, warm_up
from longspec.inference.drafting.proposal import Drafter
from longspec.inference.engine import Engine, Round
from longspec.inference.methods import DEFAULT_SHAPE, make_drafter
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler
from longspec.inference.shape_cache import cache_file, cache_key, load_shape, store_shape

CANDIDATES: tuple[tuple[int, ...], ...] = (
    DEFAULT_SHAPE,
    (1,) * 4,
    (1,) * 7,
    (2, 4, 4, 4),
    (4, 8, 8, 8, 8),
    (2, 4, 4, 4, 4, 4, 4),
    (4, 8, 8, 8, 8, 8, 8, 8),
    (4, 16, 16, 16, 16, 16, 16),
    (12, 16, 16, 16, 16),
    (16, 32, 32, 32, 32),
)
"""From chains to wide and deep trees. The default is the first one that the vocabulary has enough tokens for."""
PREFIXES = 8
"""Number of prefixes of the prompts from which every candidate decodes. A single one could be the start of a loop, in
which any draft is accepted."""
TOKENS = 32
"""Number of tokens per row that each candidate emits after each prefix. At temperature 0 all candidates emit the same
tokens, so they are compared on the same text."""
STANDARD_ERRORS = 2
"""Minimum lead over the default shape, in standard errors, for a candidate to be selected."""

Clock = Callable[[], float]
"""Returns the time in seconds."""


@dataclass(frozen=True)
class MeasuredShape:
    """Figures of a candidate. Each list has an entry per prefix."""

    shape: tuple[int, ...]
    """Number of nodes in each level."""
    tokens: list[int]
    """Number of emitted tokens, summed over rows."""
    rounds: list[int]
    """Number of rounds, summed over rows."""
    round_s: list[float]
    """Median time of a round in seconds."""

    def speed(self, prefixes: Iterable[int]) -> float:
        """Tokens per second and row over the prefixes with these numbers."""
        tokens = 0
        seconds = 0.0
        for number in prefixes:
            tokens += self.tokens[number]
            seconds += self.rounds[number] * self.round_s[number]
        return tokens / seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and row over all prefixes."""
        return self.speed(range(len(self.tokens)))

    @property
    def acceptance_length(self) -> float:
        """Tokens per row and round."""
        return sum(self.tokens) / sum(self.rounds)


def choose_shape(
    runner: Runner,
    prompts: Tensor,
    prompt_lengths: Sequence[int],
    sampler: Sampler,
    tree_rule: str,
    max_positions: int,
    clock: Clock = time.perf_counter,
) -> tuple[int, ...]:
    """The fastest of the CANDIDATES for prompts of this length, or the default if none is significantly faster.

    The shape comes from the cache, or is measured on these prompts and cached. The measurement has an engine and a
    random generator of its own, so it does not change the tokens that are generated afterwards.

    prompts: LongTensor [B, P], padded on the right; max_positions: context length of the target.
    """
    key = cache_key(runner, prompts, sampler, tree_rule, CANDIDATES)
    path = cache_file(key)
    shape = load_shape(path, CANDIDATES)
    if shape is None:
        tokens = min(TOKENS, max_positions - max(prompt_lengths))
        measured = measure_shapes(runner, prompts, prompt_lengths, sampler, tree_rule, tokens, clock)
        shape = surely_fastest(measured)
        figures = [asdict(candidate) | {"tokens_per_second": candidate.tokens_per_second} for candidate in measured]
        store_shape(path, key, shape, figures)
    return shape


def surely_fastest(measured: Sequence[MeasuredShape]) -> tuple[int, ...]:
    """The fastest candidate of those faster than the first one by more than STANDARD_ERRORS; the first if none is."""
    default, *others = measured
    selected = [default]
    for candidate in others:
        gain, standard_error = gain_over(candidate, default)
        if gain > STANDARD_ERRORS * standard_error:
            selected.append(candidate)
    return max(selected, key=lambda candidate: candidate.tokens_per_second).shape


def gain_over(candidate: MeasuredShape, default: MeasuredShape) -> tuple[float, float]:
    """log(speed / speed of the default) and its standard error, which is infinite for a single prefix."""
    prefixes = range(len(candidate.tokens))

    def gain(chosen: Sequence[int]) -> float:
        return math.log(candidate.speed(chosen) / default.speed(chosen))

    if len(prefixes) == 1:
        return gain(prefixes), math.inf

    # The jackknife: the spread of the gain when each prefix in turn is left out.
    without_one = []
    for left_out in prefixes:
        without_one.append(gain([number for number in prefixes if number != left_out]))
    standard_error = stdev(without_one) * (len(prefixes) - 1) / math.sqrt(len(prefixes))
    return gain(prefixes), standard_error


@torch.no_grad()
def measure_shapes(
    runner: Runner,
    prompts: Tensor,
    prompt_lengths: Sequence[int],
    sampler: Sampler,
    tree_rule: str,
    tokens: int,
    clock: Clock,
) -> list[MeasuredShape]:
    """Measure every candidate that the vocabulary has enough tokens for, over `tokens` tokens per row and prefix.

    The prefixes are the whole prompts and shorter ones, down to half of each prompt. One prefill serves all of them:
    they run from the longest to the shortest, so rounds overwrite only cache entries after the remaining prefixes.
    Candidates take turns at each prefix, so a change of the device's speed affects all of them. They are
    in memory together, including the distributions that their trees are sampled from: 0.2 GiB per row with a
    vocabulary of 128k.
    """
    # The caller's generator must not move, so that "auto" draws the same tokens as the shape that it selects.
    generator = torch.Generator(prompts.device).manual_seed(0)
    sampler = Sampler(sampler.temperature, sampler.top_k, sampler.top_p, generator, sampler.extra_warpers)
    window = runner.model.draft_model.window
    shapes = [shape for shape in CANDIDATES if max(shape) <= runner.config.vocab_size and len(shape) < window]
    drafters = [make_drafter("tree", runner, len(prompts), sampler, shape, 1, tree_rule) for shape in shapes]

    # The cache must have room for the largest tree, and for the deepest one to pass the limit in its last round.
    most_nodes = max(drafters, key=lambda drafter: drafter.nodes)
    deepest = max(drafter.depth for drafter in drafters)
    engine = Engine(runner, most_nodes, sampler, prompts, prompt_lengths, tokens + deepest)
    first_tokens = engine.prefill()

    # The root after a prefix is the prompt's next token, and after the whole prompt the first new token.
    ends = torch.tensor(prompt_lengths, device=prompts.device)[:, None]
    roots = torch.cat([prompts, prompts[:, :1]], 1).scatter(1, ends, first_tokens[:, None])
    rounds = [_playable_round(engine, drafter) for drafter in drafters]
    measured = [MeasuredShape(shape, [], [], []) for shape in shapes]
    for prefix_lengths in _prefix_lengths(prompt_lengths):
        lengths = torch.tensor(prefix_lengths, device=prompts.device)
        root = roots.gather(1, lengths[:, None])[:, 0]
        for candidate, drafter, play_round in zip(measured, drafters, rounds, strict=True):
            engine.switch_drafter(drafter)
            engine.rewind(lengths, root)
            _measure(candidate, play_round, [tokens] * len(prompts), prompts.device, clock)
    return measured


def _prefix_lengths(prompt_lengths: Sequence[int]) -> list[list[int]]:
    """The lengths of all rows at each prefix, from the whole prompts down to their halves, without duplicates."""
    prefixes = []
    for number in range(PREFIXES):
        lengths = [length - length * number // (2 * PREFIXES) for length in prompt_lengths]
        if lengths not in prefixes:
            prefixes.append(lengths)
    return prefixes


def _playable_round(engine: Engine, drafter: Drafter) -> Round:
    """The engine's round with a drafter, captured if the runner allows it.

    A round that is not captured uses the engine's drafter at the time of the call.
    """
    engine.switch_drafter(drafter)
    if not engine.runner.capturable:
        return engine.round
    warm_up(engine)
    return capture_round(engine)


def _measure(
    candidate: MeasuredShape, play_round: Round, remaining: list[int], device: torch.device, clock: Clock
) -> None:
    """Play rounds until every row has its `remaining` tokens, and append the figures to the candidate's.

    Finished rows are inactive while others continue.
    """
    active = torch.ones(len(remaining), dtype=torch.bool, device=device)
    seconds = []
    tokens = 0
    rounds = 0
    while max(remaining) > 0:
        start = clock()
        _, counts = play_round(active)
        emitted = counts.tolist()  # waits for the round
        seconds.append(clock() - start)
        tokens += sum(emitted)
        rounds += sum(count > 0 for count in emitted)
        remaining = [left - count for left, count in zip(remaining, emitted, strict=True)]
        active.copy_(torch.tensor([left > 0 for left in remaining]))
    candidate.tokens.append(tokens)
    candidate.rounds.append(rounds)
    candidate.round_s.append(median(seconds))
