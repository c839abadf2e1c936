"""`tree_shape="auto"`: the tree that emits most tokens a second for a model on a device, found once and cached."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, stdev
from typing import Any

import torch
from torch import Tensor

from longspec.inference.capture import capture_round, warm_up
from longspec.inference.drafting.proposal import Drafter
from longspec.inference.engine import Engine, Round
from longspec.inference.methods import DEFAULT_SHAPE, make_drafter
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler
from longspec.models.glide import GlideMixin

logger = logging.getLogger(__name__)

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
"""From chains to wide and deep trees. The first that the vocabulary has tokens for is the default."""
PLACES = 8
"""Of the prompts, from which every candidate decodes: one place may begin a loop, where drafts are all accepted."""
TOKENS = 32
"""That each candidate emits for every row from each place. At temperature 0 all of them emit the same ones, so they are
compared on the same text."""
STANDARD_ERRORS = 2
"""By more than so many a candidate must be faster than the default to be taken."""
FORMAT = 2
"""Of the cache's files."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class MeasuredShape:
    """A candidate on the calibration's tokens; the lists have an entry a place."""

    shape: tuple[int, ...]
    tokens: list[int]
    """Emitted, over all rows."""
    rounds: list[int]
    """Counted for each row."""
    round_s: list[float]
    """The median round's time, in seconds."""

    def speed(self, places: Iterable[int]) -> float:
        """Tokens a second and row over these places."""
        emitted, seconds = zip(*((self.tokens[at], self.rounds[at] * self.round_s[at]) for at in places), strict=True)
        return sum(emitted) / sum(seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.speed(range(len(self.tokens)))

    @property
    def acceptance_length(self) -> float:
        """Tokens a row and round."""
        return sum(self.tokens) / sum(self.rounds)


def choose_shape(
    runner: Runner,
    prompts: Tensor,
    prompt_lengths: Sequence[int],
    sampler: Sampler,
    tree_rule: str,
    limit: int,
    clock: Clock = time.perf_counter,
) -> tuple[int, ...]:
    """The default, or the fastest of the CANDIDATES that are surely faster for prompts of this length.

    From the cache, or else measured on these prompts.

    prompts: LongTensor [B, P], padded right. The calibration reads them once, decodes with every candidate and throws
    its tokens away; it draws from a generator of its own, so what is generated afterwards is the same with it and
    without. limit: positions that the target has.
    """
    key = _key(runner, prompts, sampler, tree_rule)
    path = cache_folder() / f"{_digest(key)}.json"
    shape = _cached(path, key)
    if shape is None:
        tokens = min(TOKENS, limit - max(prompt_lengths))
        measured = measure_shapes(runner, prompts, prompt_lengths, sampler, tree_rule, tokens, clock)
        shape = surely_fastest(measured)
        _store(path, key, shape, measured)
    return shape


def surely_fastest(measured: Sequence[MeasuredShape]) -> tuple[int, ...]:
    """The fastest of those that are faster than the first by more than STANDARD_ERRORS; the first if none is."""
    default, *others = measured
    surer = [row for row in others if (gain := gain_over(row, default))[0] > STANDARD_ERRORS * gain[1]]
    return max([default, *surer], key=lambda row: row.tokens_per_second).shape


def gain_over(row: MeasuredShape, default: MeasuredShape) -> tuple[float, float]:
    """log(speed / the default's speed), and its standard error by the jackknife over places: inf for a single one."""
    places = range(len(row.tokens))

    def gain(chosen: Sequence[int]) -> float:
        return math.log(row.speed(chosen) / default.speed(chosen))

    if len(places) == 1:
        return gain(places), math.inf
    without = [gain([at for at in places if at != left_out]) for left_out in places]
    return gain(places), stdev(without) * (len(places) - 1) / math.sqrt(len(places))


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
    """Every candidate that the vocabulary has tokens for, over `tokens` tokens a row from each place.

    The places are the prompts' ends and others before them, back to their middles. One prefill reads for all: from the
    last place to the first, what a round writes lies behind its place. Candidates take turns at each place, so that a
    device which slows down or speeds up does so for all; so they are all in memory at once, with what their trees were
    sampled from, 0.2 GiB a row in a vocabulary of 128k.
    """
    generator = torch.Generator(prompts.device).manual_seed(0)
    sampler = Sampler(sampler.temperature, sampler.top_k, sampler.top_p, generator, sampler.extra_warpers)
    window = runner.model.draft_model.window
    shapes = [shape for shape in CANDIDATES if max(shape) <= runner.config.vocab_size and len(shape) < window]
    drafters = [make_drafter("tree", runner, len(prompts), sampler, shape, 1, tree_rule) for shape in shapes]
    # The cache has room for the most nodes, and for the depth that a row may go beyond its tokens.
    most_nodes, deepest = max(drafters, key=lambda drafter: drafter.nodes), max(map(len, shapes))
    engine = Engine(runner, most_nodes, sampler, prompts, prompt_lengths, tokens + deepest)
    ends = torch.tensor(prompt_lengths, device=prompts.device)[:, None]
    roots = torch.cat([prompts, prompts[:, :1]], 1).scatter(1, ends, engine.prefill()[:, None])
    plays = [_playable(engine, drafter) for drafter in drafters]
    found = [MeasuredShape(shape, [], [], []) for shape in shapes]
    for place in _places(prompt_lengths):
        lengths = torch.tensor(place, device=prompts.device)[:, None]
        for row, drafter, play_round in zip(found, drafters, plays, strict=True):
            engine.switch_drafter(drafter)
            engine.rewind(lengths[:, 0], roots.gather(1, lengths)[:, 0])
            _measure(row, play_round, [tokens] * len(prompts), prompts.device, clock)
    return found


def _places(prompt_lengths: Sequence[int]) -> list[list[int]]:
    """The rows' lengths at each of PLACES, the prompts' own first, then back to half of them; none is twice there."""
    places = [[length - length * number // (2 * PLACES) for length in prompt_lengths] for number in range(PLACES)]
    return [list(place) for place in dict.fromkeys(map(tuple, places))]


def _playable(engine: Engine, drafter: Drafter) -> Round:
    """The engine's round with this drafter, captured where decoding captures it; else the engine has to have it set."""
    engine.switch_drafter(drafter)
    if not engine.runner.capturable:
        return engine.round
    warm_up(engine)
    return capture_round(engine)


def _measure(row: MeasuredShape, play_round: Round, left: list[int], device: torch.device, clock: Clock) -> None:
    """Rounds until every row has the tokens that are left for it; a row that has them sits the others' rounds out."""
    active = torch.ones(len(left), dtype=torch.bool, device=device)
    times, emitted, row_rounds = [], 0, 0
    while max(left) > 0:
        start = clock()
        counts = play_round(active)[1].tolist()
        times.append(clock() - start)
        emitted += sum(counts)
        row_rounds += sum(count > 0 for count in counts)
        left = [rest - count for rest, count in zip(left, counts, strict=True)]
        active.copy_(torch.tensor([rest > 0 for rest in left]))
    row.tokens.append(emitted)
    row.rounds.append(row_rounds)
    row.round_s.append(median(times))


def cache_folder() -> Path:
    """Where shapes are kept: below $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longspec" / "tree_shapes"


def _key(runner: Runner, prompts: Tensor, sampler: Sampler, tree_rule: str) -> dict[str, Any]:
    """What a shape was measured for."""
    config = runner.config.to_dict()
    unrelated = ("_name_or_path", "transformers_version", "architectures")
    device = runner.device
    return {
        "target": _digest({name: value for name, value in config.items() if name not in unrelated}),
        "draft": draft_fingerprint(runner.model),
        "window": runner.model.draft_model.window,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "attention": runner.attention.name,
        "captured": runner.capturable,
        "dtype": str(runner.dtype),
        "rows": len(prompts),
        "context": 1 << (prompts.shape[1] - 1).bit_length(),
        "tree_rule": "greedy" if sampler.greedy else tree_rule,
        "candidates": CANDIDATES,
        "format": FORMAT,
    }


def draft_fingerprint(model: GlideMixin) -> str:
    """Tells drafts apart: the sums of the bits of their weights, in integers, so that every device adds up the same."""
    widths = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = {
        name: int(weight.detach().contiguous().view(widths[weight.element_size()]).sum(dtype=torch.int64))
        for name, weight in model.draft_model.named_parameters()
    }
    return _digest(sums)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _cached(path: Path, key: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape in a file of the cache; None where there is none, or none that can be read."""
    try:
        shape = tuple(json.loads(path.read_text())["shape"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        logger.warning("%s: a damaged tree shape; it is measured again", path)
        return None
    if shape not in key["candidates"]:
        logger.warning("%s: %s is no candidate; the tree shape is measured again", path, shape)
        return None
    return shape


def _store(path: Path, key: dict[str, Any], shape: tuple[int, ...], measured: list[MeasuredShape]) -> None:
    """Write the file whole or not at all; a cache that cannot be written costs a calibration in every process."""
    rows = [asdict(row) | {"tokens_per_second": row.tokens_per_second} for row in measured]
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({"key": key, "shape": shape, "measured": rows}, indent=2) + "\n")
        os.replace(unfinished, path)
    except OSError as error:
        logger.warning("%s: the tree shape is not kept (%s)", path, error)
