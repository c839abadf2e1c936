"""Time of a decoding step and of a speculation round at published shapes, compared with the floor of the device.

`python -m benchmarks.decoding` prints tables and, last, one JSON line, from which `benchmarks.tables` makes them again.
`--picture` also draws the parts of a tree round. Weights and caches are random, because the time of a round depends on
shapes alone. Tokens/s need acceptance lengths that an evaluation of a real pair measured: `--acceptance`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.acceptance import Key, key, read_acceptance
from benchmarks.ceilings import Ceilings, captured_ms, measure_ceilings, timed_ms
from benchmarks.floors import round_floor_ms
from benchmarks.picture import draw_rounds
from benchmarks.shapes import SHAPES, random_pair
from benchmarks.tables import tables
from benchmarks.transformers_baseline import PEERS, peer_ms
from longspec.errors import UserError, reports_user_errors
from longspec.inference.capture import CapturedRound, warm_up
from longspec.inference.decoder import Decoder
from longspec.inference.drafting.glide import GlideDraft
from longspec.inference.engine import Engine
from longspec.inference.fused_runner import FusedRunner
from longspec.inference.methods import METHODS, make_drafter
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler


@dataclass
class Measured:
    """One method at one context. `round_ms` and `floor_ms` are device milliseconds per round."""

    shape: str
    context: int
    batch: int
    method: str
    temperature: float
    round_ms: float
    floor_ms: float
    busy: float
    """Device time of a round divided by its wall-clock time."""
    parts: dict[str, float] = field(default_factory=dict)
    """Milliseconds per part of a round; empty except for a greedy tree. They add up to `round_ms`."""
    acceptance_length: float | None = None
    """Tokens per round: 1 for vanilla, else measured on a real pair; None if no such figure was given."""

    @property
    def ratio(self) -> float:
        return self.round_ms / self.floor_ms

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens/s of the batch at the acceptance length; None without one."""
        if self.acceptance_length is None:
            return None
        return self.batch * self.acceptance_length / self.round_ms * 1e3


@reports_user_errors
def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        raise UserError("benchmarks.decoding: needs a CUDA device; none is available")
    acceptance = read_acceptance(options.acceptance)
    ceilings = measure_ceilings()
    measurements: list[Measured] = []
    peers: list[dict[str, Any]] = []
    print(ceilings)
    print(HEADER)
    for shape in options.shapes:
        model = random_pair(shape)
        if options.draft_vocabulary is not None:
            model.draft_model.set_vocabulary(random_vocabulary(options.draft_vocabulary, model.config.vocab_size))
        runner = FusedRunner(model, options.attention)
        for context in options.contexts:
            for method in options.methods:
                measurements.append(measure(shape, runner, [context], method, ceilings, options, acceptance))
        for batch in options.batches:
            lengths = torch.linspace(0.75, 1.0, batch).mul(options.batch_context).long().tolist()
            for method in ("vanilla", "tree"):
                measurements.append(measure(shape, runner, lengths, method, ceilings, options, acceptance))
        for context in options.contexts:
            for peer in options.peers:
                name = f"transformers, {peer} cache{', compiled' if peer == 'static' else ''}"
                peers.append({"shape": shape, "context": context, "name": name, "ms": peer_ms(peer, model, context)})
                print(f"{name}, {shape} at {context}: {peers[-1]['ms']} ms per token", flush=True)
        del model, runner
        torch.cuda.empty_cache()

    if options.picture:
        draw_rounds([row for row in measurements if row.parts], options.picture)
    rows = [asdict(row) | {"ratio": row.ratio, "tokens_per_s": row.tokens_per_s} for row in measurements]
    # Paths are the only options that JSON does not have.
    config = json.loads(json.dumps(vars(options), default=str))
    result = {"benchmark": "decoding", "rounds": rows, "peers": peers, "config": config} | ceilings.describe()
    print(tables(result))
    print(json.dumps(result))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--shapes", nargs="*", default=["llama3-8b", "qwq-32b"], choices=list(SHAPES))
    add("--contexts", type=int, nargs="*", default=[4096, 32768, 131072])
    add("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    add("--temperature", type=float, default=0.0)
    add("--tree_shape", type=int, nargs="+", default=[4, 16, 16, 16, 16])
    add("--tree_nodes", type=int, help="nodes of the tree to be verified, the root included; default: all")
    add("--lookup_branches", action="store_true", help="prompt lookup adds branches to the tree")
    add("--draft_vocabulary", type=int, help="number of tokens in the draft's vocabulary list; default: no list")
    add("--gamma", type=int, default=4)
    add("--batches", type=int, nargs="*", default=[], help="batch sizes of ragged batches, for vanilla and tree")
    add("--batch_context", type=int, default=32768, help="longest row of a batch; the shortest is 3/4 as long")
    add("--attention", default="auto")
    add("--acceptance", type=Path, nargs="*", default=[], help="summary.json of evaluations of one real pair")
    add("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="caches of transformers' own code to time")
    add("--picture", type=Path, help="PNG file with the parts of each tree round")
    return parser.parse_args()


@torch.no_grad()
def measure(
    shape: str,
    runner: FusedRunner,
    lengths: list[int],
    method: str,
    ceilings: Ceilings,
    options: argparse.Namespace,
    acceptance: Mapping[Key, float] | None = None,
) -> Measured:
    engine = filled_engine(runner, lengths, method, options)
    warm_up(engine)
    captured = CapturedRound(engine)
    decoder = Decoder(engine, 1 << 30, set(), None)
    active = torch.ones(len(lengths), dtype=torch.bool, device="cuda")

    def rewind() -> None:
        engine.cache.lengths.copy_(torch.tensor(lengths))

    rewind()
    round_ms = timed_ms(lambda: captured(active), runs=5, repeats=10)

    rewind()
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(30):
        decoder.note(captured(decoder.device_active))
    wall_ms = (perf_counter() - start) / 30 * 1e3

    rewind()
    widths = {"tree": tuple(options.tree_shape), "vanilla": ()}.get(method, (1,) * options.gamma)
    drafted_by = {"magicdec": "target", "lookup": "nothing"}.get(method, "glide")
    verified = engine.drafter.nodes
    draft = glide_draft(engine.drafter)
    columns = None if draft is None else draft.columns
    floor_ms = round_floor_ms(runner.config, ceilings, lengths, widths, drafted_by, verified, columns)
    measured = Measured(
        shape,
        max(lengths),
        len(lengths),
        method,
        options.temperature,
        round_ms,
        floor_ms,
        round_ms / wall_ms,
        parts_of_round(engine, round_ms) if method == "tree" and engine.sampler.greedy else {},
        1.0 if method == "vanilla" else (acceptance or {}).get(key(method, vars(options))),
    )
    print(line(measured), flush=True)
    return measured


def filled_engine(runner: Runner, lengths: list[int], method: str, options: argparse.Namespace) -> Engine:
    """An engine in its state after a prefill of `lengths` tokens per row, with random keys and values in all caches."""
    batch = len(lengths)
    sampler = Sampler(options.temperature, 0, 1.0, torch.Generator(runner.device).manual_seed(0))
    drafter: Any = make_drafter(
        method,
        runner,
        batch,
        sampler,
        options.tree_shape,
        options.gamma,
        "reject",
        options.tree_nodes,
        options.lookup_branches,
    )
    prompts = torch.randint(0, min(1000, runner.config.vocab_size), (batch, max(lengths)), device=runner.device)
    engine = Engine(runner, drafter, sampler, prompts, lengths, max_new_tokens=1024)
    stores = [engine.cache.keys, engine.cache.values]
    draft = glide_draft(drafter)
    if draft is not None:
        stores += [draft.cache.keys, draft.cache.values]
        if draft.head is not None:
            draft.head.start(prompts, torch.tensor(lengths, device=runner.device))
    for store in stores:
        store.normal_()
    engine.cache.lengths.copy_(torch.tensor(lengths))
    return engine


def random_vocabulary(size: int, vocab: int) -> Tensor:
    """`size` of the token ids below `vocab`, ascending. Raises UserError for an impossible size."""
    if not 0 < size < vocab:
        raise UserError(f"--draft_vocabulary: {size}; the target has {vocab} tokens, so use 1 to {vocab - 1}")
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:size].sort().values


def glide_draft(drafter: Any) -> GlideDraft | None:
    """The GLIDE draft of a tree or a chain; None for other drafters."""
    draft = getattr(drafter, "draft", getattr(drafter, "model", None))
    return draft if isinstance(draft, GlideDraft) else None


def parts_of_round(engine: Engine, round_ms: float) -> dict[str, float]:
    """Milliseconds per part of a tree round. Each part is captured and timed alone.

    "draft rest", "verify rest" and "residual" are differences. The residual is the round minus the sum of its parts;
    it is negative if they take less time within a round than alone.
    """
    runner, cache, drafter = engine.runner, engine.cache, engine.drafter
    draft: GlideDraft = drafter.draft  # type: ignore[attr-defined]
    proposal = drafter.propose(engine.root, cache)
    batch, nodes = proposal.tokens.shape
    config = runner.config
    scale = draft.scale

    def random(width: int, heads: int) -> Tensor:
        return torch.randn(
            batch, width, heads, cache.keys.shape[-1], dtype=runner.dtype, device=runner.device
        ).transpose(1, 2)

    # The draft runs once for the root and once for each level but the last.
    shape: tuple[int, ...] = drafter.shape  # type: ignore[attr-defined]
    levels = [(0, 1), *enumerate(shape[:-1], 1)]
    widths = {1, nodes, *shape}
    queries = {width: random(width, config.num_attention_heads) for width in widths}
    hidden = {width: random(width, config.hidden_size // queries[1].shape[-1]) for width in widths}
    hidden = {width: x.transpose(1, 2).flatten(2) for width, x in hidden.items()}

    def draft_attention() -> None:
        for level, width in levels:
            visible = drafter.tree.visible[:, :width]  # type: ignore[attr-defined]
            args = (draft.cache.keys, draft.cache.values, cache.lengths, level, visible, scale)
            runner.attention.window(queries[width], *args)
            runner.attention.prefix(queries[width], *cache.layer(-1), cache.lengths, scale)

    def verify_attention() -> None:
        attend = runner.attention.hybrid(cache.lengths, proposal.visible)
        for keys, values in zip(cache.keys, cache.values, strict=True):
            attend(queries[nodes], keys, values, scale)

    def draft_lm_head() -> None:
        for _, width in levels:
            if draft.head is None:
                runner.logits(hidden[width])
            else:
                draft.head.logits(hidden[width])

    active = torch.ones(batch, dtype=torch.bool, device=runner.device)
    static_hidden = engine.forward_tree(proposal, cache)
    static_logits = runner.logits(static_hidden)

    def accept_and_compact() -> None:
        with (
            patch.object(drafter, "propose", lambda *_: proposal),
            patch.object(engine, "forward_tree", lambda *_: static_hidden),
            patch.object(runner, "logits", lambda _: static_logits),
        ):
            engine.round(active)

    propose = captured_ms(lambda: drafter.propose(engine.root, cache))
    verify = captured_ms(lambda: engine.verify(proposal))
    draft_attention_ms = captured_ms(draft_attention)
    verify_attention_ms = captured_ms(verify_attention)
    draft_lm_head_ms = captured_ms(draft_lm_head)
    verify_lm_head_ms = captured_ms(lambda: runner.logits(hidden[nodes]))
    # Last, because it alone changes the lengths of the cached rows.
    accept_ms = captured_ms(accept_and_compact)
    return {
        "draft attention": draft_attention_ms,
        "draft rest": propose - draft_attention_ms - draft_lm_head_ms,
        "lm_head": draft_lm_head_ms + verify_lm_head_ms,
        "verify attention": verify_attention_ms,
        "verify rest": verify - verify_attention_ms - verify_lm_head_ms,
        "accept + compact": accept_ms,
        "residual": round_ms - propose - verify - accept_ms,
    }


HEADER = (
    f"{'shape':<11}{'context':>8}{'batch':>6} {'method':<9}{'ms':>8}{'floor':>8}{'ratio':>7}{'busy':>6}{'tokens/s':>9}"
)


def line(row: Measured) -> str:
    parts = "  ".join(f"{name} {value:.2f}" for name, value in row.parts.items())
    return (
        f"{row.shape:<11}{row.context:>8}{row.batch:>6} {row.method:<9}{row.round_ms:>8.2f}{row.floor_ms:>8.2f}"
        f"{row.ratio:>7.2f}{row.busy:>6.2f}{row.tokens_per_s or float('nan'):>9.0f}  {parts}"
    )


if __name__ == "__main__":
    main()
