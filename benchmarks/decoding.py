"""Time of a decoding step and of a speculation round at published shapes, compared with the floor of the device.

`python -m benchmarks.decoding` prints tables and, last, one JSON line, from which `benchmarks.tables` makes them again.
`--picture` also draws the parts of a tree round. Weights and caches are random, because the time of a round depends on
shapes alone. Tokens/s need acceptance lengths that `longspec draft` measured for a real pair: `--acceptance`.
`torchrun --nproc_per_node N -m benchmarks.decoding --tp_size N` times a target that N GPUs share. Rank 0 prints, and
the floor is that of its part, without communication.
"""

import argparse
import gc
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.acceptance import Key, key, read_acceptance
from benchmarks.ceilings import Ceilings, measure_ceilings, timed_ms
from benchmarks.floors import round_floor_ms
from benchmarks.parts import glide_draft, parts_of_round, sums_ms
from benchmarks.picture import draw_rounds
from benchmarks.shapes import SHAPES, random_pair
from benchmarks.tables import print_result, tables
from benchmarks.transformers_baseline import PEERS, peer_ms
from longspec.errors import UserError, reports_user_errors
from longspec.inference.engine.batch import Batch
from longspec.inference.engine.rounds import Mode
from longspec.inference.engine_pool import Pooled
from longspec.inference.fused_runner import FusedRunner
from longspec.inference.memory import slots_for
from longspec.inference.methods import GLIDE_METHODS, METHODS, Drafting, make_drafter
from longspec.inference.process_group import check_launch, connect, disconnect
from longspec.inference.request import Sampling
from longspec.inference.runner import Runner, model_backend
from longspec.inference.sampling import GREEDY, sampling_kind
from longspec.models.glide import GlideMixin
from longspec.models.parallel import model_parallel_rank_and_size, share_target, split_draft
from longspec.models.target_split import check_divisible
from longspec.ranks.agreement import launched_ranks


@reports_user_errors
def main() -> None:
    options = parse_options()
    acceptance = read_acceptance(options.acceptance)
    # Each capture collects garbage, for which the objects of the imported modules need not be searched.
    gc.freeze()
    with equal_ranks(options.tp_size):
        if model_parallel_rank_and_size()[0] > 0:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        run(options, acceptance)


@contextmanager
def equal_ranks(tp_size: int) -> Iterator[None]:
    """Context in which the `tp_size` ranks of this launch run the benchmark alike, on GPUs, and share the target. 1
    changes nothing. Raises UserError for a launch that does not fit. No captured round may outlive the context."""
    if tp_size == 1:
        yield
        return
    connect(check_launch(tp_size, launched_ranks()[1], "cuda"))
    share_target(dist.group.WORLD)
    yield
    share_target(None)
    disconnect()


def run(options: Namespace, acceptance: Mapping[Key, float]) -> None:
    ceilings = measure_ceilings()
    rows: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []
    print(ceilings)
    for shape in options.shapes:
        model = decoding_pair(shape)
        runner = FusedRunner(model, model_backend(model, options.attention))
        for lengths, setting in settings(options, model):
            row = measure(runner, lengths, setting.method, ceilings, setting)
            length = 1.0 if setting.method == "vanilla" else acceptance.get(key(setting.method, vars(setting)))
            speed = length and row["batch"] * length / row["round_ms"] * 1e3
            rows.append({"shape": shape, **row, "acceptance_length": length, "tokens_per_s": speed})
            print(json.dumps(rows[-1]), flush=True)
        for context in options.contexts:
            for peer in options.peers if options.tp_size == 1 else []:
                name = f"transformers, {peer} cache{', compiled' if peer == 'static' else ''}"
                peers.append({"shape": shape, "context": context, "name": name, "ms": peer_ms(peer, model, context)})
                print(f"{name}, {shape} at {context}: {peers[-1]['ms']} ms per token", flush=True)
        del model, runner
        torch.cuda.empty_cache()

    if options.picture and model_parallel_rank_and_size()[0] == 0:
        draw_rounds([row for row in rows if row["parts"]], options.picture)
    result = {"rounds": rows, "peers": peers} | ceilings.describe()
    print(tables(result))
    print_result("decoding", options, **result)


def decoding_pair(shape: str) -> GlideMixin:
    """The random pair of a shape, or this rank's part of it. Raises UserError if the ranks cannot share it."""
    ranks = model_parallel_rank_and_size()[1]
    if ranks > 1:
        check_divisible(SHAPES[shape], ranks, shape)
        torch.manual_seed(0)  # the ranks' drafts are parts of one
    pair = random_pair(shape)
    if ranks > 1:
        split_draft(pair)
    return pair.eval()


def settings(options: Namespace, model: GlideMixin) -> Iterator[tuple[list[int], Namespace]]:
    """The rows' lengths and the options of each measurement. The model's draft then has that measurement's list.

    Options with several values are combined. Methods to which an option does not apply are measured once.
    """
    cases = [([context], options.methods) for context in options.contexts]
    for batch in options.batches:
        lengths = torch.linspace(0.75, 1.0, batch).mul(options.batch_context).long().tolist()
        cases.append((lengths, ["vanilla", "tree"]))
    for number, size in enumerate(options.draft_vocabulary):
        tokens = random_vocabulary(size, model.config.vocab_size) if size else None
        model.draft_model.set_vocabulary(tokens)
        for lengths, methods in cases:
            for method, temperature in product(methods, options.temperature):
                if number and method not in GLIDE_METHODS:
                    continue
                for nodes in options.tree_nodes if method == "tree" else [0]:
                    own = {"method": method, "temperature": temperature, "tree_nodes": nodes or None}
                    yield lengths, Namespace(**vars(options) | own)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--shapes", nargs="*", default=["llama3-8b", "qwq-32b"], choices=list(SHAPES))
    add("--contexts", type=int, nargs="*", default=[4096, 32768, 131072])
    add("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    add("--temperature", type=float, nargs="+", default=[0.0])
    add("--tree_shape", type=int, nargs="+", default=[4, 16, 16, 16, 16])
    add("--tree_nodes", type=int, nargs="+", default=[0], help="nodes to be verified, the root included; 0: all")
    add("--lookup_branches", action="store_true", help="prompt lookup adds branches to the tree")
    add("--draft_vocabulary", type=int, nargs="+", default=[0], help="tokens in the draft's list; 0: no list")
    add("--gamma", type=int, default=4)
    add("--batches", type=int, nargs="*", default=[], help="batch sizes of ragged batches, for vanilla and tree")
    add("--batch_context", type=int, default=32768, help="longest row of a batch; the shortest is 3/4 as long")
    add("--attention", default="auto")
    add("--tp_size", type=int, default=1, help="number of ranks, all of this launch, that share the target")
    add("--acceptance", type=Path, help="summary.json of `longspec draft` for a real pair")
    add("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="caches of transformers' own code to time")
    add("--picture", type=Path, help="PNG file with the parts of each tree round")
    return parser.parse_args()


@torch.no_grad()
def measure(
    runner: FusedRunner, lengths: list[int], method: str, ceilings: Ceilings, options: argparse.Namespace
) -> dict[str, Any]:
    """One method at one context.

    nodes: those that the target reads, the root included. columns: rows of the head of a draft with a vocabulary list;
    None without a list. round_ms, floor_ms: device milliseconds per round. parts: milliseconds per part of a round,
    which add up to `round_ms`; empty except for a greedy tree. sums_ms: milliseconds of a verification's sums over the
    ranks that share the target; None without others.
    """
    # The engine before this one is freed, and blocks that a capture could not free itself.
    gc.collect()
    torch.cuda.empty_cache()
    batch, mode = filled_batch(runner, lengths, method, options)
    engine = batch.state(mode, slice(0, len(lengths)))
    batch.rounds(mode, len(lengths))  # captures them

    def rewind() -> None:
        engine.cache.lengths.copy_(torch.tensor(lengths))

    rewind()
    round_ms = timed_ms(lambda: batch.play(mode, len(lengths)), runs=5, repeats=10)

    rewind()
    widths = {"tree": tuple(options.tree_shape), "vanilla": ()}.get(method, (1,) * options.gamma)
    drafted_by = {"magicdec": "target", "lookup": "nothing"}.get(method, "glide")
    verified = engine.drafter.nodes
    draft = glide_draft(engine.drafter)
    columns = None if draft is None or draft.head is None else draft.columns
    ranks = model_parallel_rank_and_size()[1]
    floor_ms = round_floor_ms(runner.config, ceilings, lengths, widths, drafted_by, verified, columns, ranks)
    return {
        **{"context": max(lengths), "batch": len(lengths), "method": method, "temperature": options.temperature},
        **{"nodes": verified, "columns": columns},
        **{"round_ms": round_ms, "floor_ms": floor_ms, "ratio": round_ms / floor_ms},
        "parts": parts_of_round(engine, round_ms) if method == "tree" and engine.sampler.greedy else {},
        "sums_ms": sums_ms(engine),
    }


def filled_batch(runner: Runner, lengths: list[int], method: str, options: argparse.Namespace) -> tuple[Batch, Mode]:
    """The batch of a generation after a prefill of `lengths` tokens per row, with random keys and values in all caches,
    and the mode of its rounds."""
    rows, sampling = len(lengths), Sampling(options.temperature)
    shape, nodes, branches = options.tree_shape, options.tree_nodes, options.lookup_branches
    drafting = Drafting(method, shape, options.gamma, "reject", nodes, branches)
    single = make_drafter(drafting, runner, 1, GREEDY)
    capacity = slots_for(max(lengths) + 1024, single.depth, single.nodes)
    kind = sampling_kind([sampling])
    batch = Batch(runner, drafting, rows, capacity, 1, kind, Pooled(None, capacity, 0, True))
    batch.assign(range(rows), lengths, [sampling] * rows, range(rows), [True] * rows)
    batch.active.fill_(True)
    # The same on all ranks, because the draft's head depends on them.
    generator = torch.Generator(runner.device).manual_seed(0)
    like: dict[str, Any] = {"device": runner.device, "generator": generator}
    prompts = torch.randint(0, min(1000, runner.config.vocab_size), (rows, max(lengths)), **like)
    batch.root.copy_(prompts[:, 0])
    stores = [batch.cache.keys, batch.cache.values]
    draft = glide_draft(batch.drafter)
    if draft is not None:
        stores += [draft.cache.keys, draft.cache.values]
        if draft.head is not None:
            draft.head.start(prompts, torch.tensor(lengths, device=runner.device))
    for store in stores:
        store.normal_()
    return batch, Mode(batch.depth > 0, kind, details=False)


def random_vocabulary(size: int, vocab: int) -> Tensor:
    """`size` of the token ids below `vocab`, ascending. Raises UserError for an impossible size."""
    if not 0 < size < vocab:
        raise UserError(f"--draft_vocabulary: {size}; the target has {vocab} tokens, so use 1 to {vocab - 1}")
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:size].sort().values


if __name__ == "__main__":
    main()
