"""`tree_shape="auto"`: the tree that emits most tokens a second for a model on a device, found once and cached."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from longspec.inference.acceptance import Sampler
from longspec.inference.capture import capture_round, warm_up
from longspec.inference.engine import Engine
from longspec.inference.methods import make_drafter
from longspec.inference.runner import Runner
from longspec.models.glide import GlideMixin

logger = logging.getLogger(__name__)

AUTO = "auto"
DEFAULT_SHAPE = (4, 16, 16, 16, 16)
CANDIDATES: tuple[tuple[int, ...], ...] = (
    DEFAULT_SHAPE,
    (1,) * 4,
    (1,) * 7,
    (2, 4, 4, 4),
    (4, 8, 8, 8, 8),
    (2, 4, 4, 4, 4, 4, 4),
    (4, 8, 8, 8, 8, 8, 8, 8),
    (4, 16, 16, 16, 16, 16, 16),
)
"""From chains to wide and deep trees; of equally fast ones the first is taken."""
TOKENS = 128
"""That each candidate emits for every row. At temperature 0 all of them emit the same ones, so they are compared on the
same text."""
FORMAT = 1
"""Of the cache's files."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class MeasuredShape:
    """A candidate on the calibration's tokens."""

    shape: tuple[int, ...]
    round_s: float
    """The median round's time, in seconds."""
    acceptance_length: float
    """Tokens a row and round."""

    @property
    def tokens_per_second(self) -> float:
        return self.acceptance_length / self.round_s


def choose_shape(
    runner: Runner,
    prompts: Tensor,
    prompt_lengths: Sequence[int],
    sampler: Sampler,
    tree_rule: str,
    limit: int,
    clock: Clock = time.perf_counter,
) -> tuple[int, ...]:
    """The fastest of CANDIDATES for prompts of this length, from the cache or else measured on these prompts.

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
        shape = max(measured, key=lambda candidate: candidate.tokens_per_second).shape
        _store(path, key, shape, measured)
    return shape


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
    """Every candidate that the vocabulary has tokens for, over `tokens` tokens a row behind the same prefill."""
    generator = torch.Generator(prompts.device).manual_seed(0)
    sampler = Sampler(sampler.temperature, sampler.top_k, sampler.top_p, generator)
    shapes = [shape for shape in CANDIDATES if max(shape) <= runner.config.vocab_size]
    batch = len(prompts)

    def drafter(shape: tuple[int, ...]) -> Any:
        return make_drafter("tree", runner, batch, sampler, shape, gamma=1, tree_rule=tree_rule)

    # The cache has room for the most nodes, and for the depth that a row may go beyond its tokens.
    most_nodes, deepest = max(shapes, key=sum), max(map(len, shapes))
    engine = Engine(runner, drafter(most_nodes), sampler, prompts, prompt_lengths, tokens + deepest)
    first = engine.prefill()
    lengths = engine.cache.lengths.clone()
    found = []
    for shape in shapes:
        engine.drafter = drafter(shape)
        engine.cache.lengths.copy_(lengths)
        engine.root.copy_(first)
        engine.drafter.start(prompts, lengths.long())
        found.append(_measure(engine, shape, tokens, clock))
    return found


def _measure(engine: Engine, shape: tuple[int, ...], tokens: int, clock: Clock) -> MeasuredShape:
    """Rounds until every row has its tokens; a row that has them sits the others' rounds out."""
    play_round = engine.round
    if engine.runner.capturable:
        warm_up(engine)
        play_round = capture_round(engine)
    left = [tokens] * len(engine.root)
    active = torch.ones(len(left), dtype=torch.bool, device=engine.root.device)
    times, emitted, row_rounds = [], 0, 0
    while max(left) > 0:
        start = clock()
        counts = play_round(active)[1].tolist()
        times.append(clock() - start)
        emitted += sum(counts)
        row_rounds += sum(count > 0 for count in counts)
        left = [rest - count for rest, count in zip(left, counts, strict=True)]
        active.copy_(torch.tensor([rest > 0 for rest in left]))
    return MeasuredShape(shape, median(times), emitted / row_rounds)


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
