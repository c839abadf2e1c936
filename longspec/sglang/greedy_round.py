"""CUDA graphs by batch size, and a greedy round as one: draft, target, acceptance, the draft's keys of the new tokens.

SGLang's own round launches some 70 small kernels one by one around the target's graph, which takes the host longer than
the device takes for all of it. The steps are those of `EAGLEWorkerV2.verify` (srt/speculative/eagle_worker_v2.py, line
1538) on the buffers of SGLang's Triton attention, none of whose metadata are read on the host.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import build_tree_kernel_efficient
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache
from sglang.srt.speculative.triton_ops.cache_locs import assign_extend_cache_locs_func
from torch import Tensor

from longspec.sglang.drafter import Drafter, candidates


class BatchGraphs:
    """Calls `function` by replaying a CUDA graph of the next captured batch size, or directly if there is none. All
    arguments are tensors of B rows; so are the results."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], padding: dict[str, Tensor]) -> None:
        """padding: a row [1, ...] of every argument by its name, for the rows that a batch lacks."""
        self.function, self.padding = function, padding
        self.sizes: list[int] = []
        self.inputs: dict[str, Tensor] = {}
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}

    def capture(self, sizes: Iterable[int], context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Capture a graph for each batch size. context: opens a capture and gives an object with its `stream`."""
        self.sizes = sorted(sizes)
        if not self.sizes:
            return
        self.inputs = {name: row.repeat_interleave(self.sizes[-1], 0) for name, row in self.padding.items()}
        pool = torch.cuda.graph_pool_handle()
        with context() as capture:
            for size in reversed(self.sizes):  # the largest first, whose memory the others reuse
                inputs = {name: rows[:size] for name, rows in self.inputs.items()}
                self.function(**inputs)  # compiles kernels
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=capture.stream):
                    outputs = self.function(**inputs)
                self.graphs[size] = graph, outputs

    def padded(self, batch: int) -> int:
        """The batch size at which a batch runs: the next captured one, or its own."""
        return next((size for size in self.sizes if size >= batch), batch)

    def __call__(self, **arguments: Tensor) -> tuple[Tensor, ...]:
        batch = len(next(iter(arguments.values())))
        if (size := self.padded(batch)) not in self.graphs:
            return self.function(**arguments)
        torch._foreach_copy_([self.inputs[name][:batch] for name in arguments], list(arguments.values()))
        if batch < size:
            for name in arguments:
                self.inputs[name][batch:size] = self.padding[name]
        graph, outputs = self.graphs[size]
        graph.replay()
        return outputs if batch == size else tuple(rows[:batch] for rows in outputs)


def build_tree(
    tokens: Tensor, parents: Tensor, lengths: Tensor, total: int, mask: Tensor | None, steps: int, topk: int
) -> EagleVerifyInput:
    """SGLang's form of a tree of `steps` levels. total: sum of the lengths, or a bound of it. mask: buffer of the
    tree's mask; all ones for roots alone. topk: 1 for a chain, whose accepted keys SGLang does not move."""
    rows, nodes = tokens.shape
    if steps:
        if mask is not None:  # SGLang fills all of it, and it has room for the largest batch
            mask = mask[: nodes * (total + nodes * rows)]
        mask, positions, *links, tokens = build_tree_kernel_efficient(
            *(tokens[:, 0], *candidates(parents, steps), tokens[:, 1:], lengths, total),
            *(nodes, steps, nodes),
            tree_mask_buf=mask,
        )
    else:
        tokens, positions, links = tokens.flatten(), lengths, [None] * 3
    fields = (tokens, mask, positions, *links, None, steps, topk, nodes, CaptureHiddenMode.FULL)
    return EagleVerifyInput(*fields, seq_lens_sum=None, seq_lens_cpu=None)


class GreedyRound:
    """The function of a batch that the graphs capture."""

    def __init__(self, drafter: Drafter, runner: Any) -> None:
        """runner: the target's."""
        self.drafter, self.runner = drafter, runner
        self.batches: dict[int, tuple[Any, Any]] = {}
        """SGLang's batch with the buffers that a capture needs, and its attention backend, by batch size."""

    def __call__(
        self, roots: Tensor, requests: Tensor, lengths: Tensor, hidden: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Arguments as in `Drafter.propose`. Returns the new tokens, LongTensor [B, steps + 1], of which the first
        accepted[b] of row b are valid; accepted, int32 [B]; the last valid one, LongTensor [B]; and, if the draft reads
        them, the target's hidden states [B, hidden] at the position before it."""
        drafter, rows, device = self.drafter, len(roots), roots.device
        (steps, nodes), topk = drafter.sizes.of(rows), drafter.sizes.topk
        batch, backend = self._prepared(rows, nodes)
        if steps:
            drafted, parents, *_ = drafter.propose(roots, requests, lengths, hidden)
        else:
            drafted, parents = roots[:, None], roots.new_full((rows, 1), -1)
        mask, table = backend.get_verify_buffers_to_fill_after_draft()[0], drafter.table
        verified = build_tree(drafted, parents, lengths, rows * table.shape[1], mask, steps, topk)
        slots = assign_extend_cache_locs_func(requests, table, lengths, lengths + nodes, rows, nodes, device)
        output = self._target(copy.copy(batch), backend, verified, requests, lengths, slots)
        best = output.next_token_logits.argmax(-1).view(rows, nodes)
        path, drafts, newest = drafter.model.backend.follow_choices(drafted, parents, best, steps)
        tokens, accepted = best.gather(1, path), (drafts + 1).int()
        numbers = path + torch.arange(0, rows * nodes, nodes, device=device)[:, None]
        if topk > 1 and steps:
            accepts = torch.arange(steps + 1, device=device) < accepted[:, None]
            view = SimpleNamespace(seq_lens=lengths, req_pool_indices=requests, out_cache_loc=slots)
            view.req_to_token_pool, allocator = self.runner.req_to_token_pool, self.runner.token_to_kv_pool_allocator
            move_accept_tokens_to_target_kvcache(view, numbers.where(accepts, -1).int(), accepted - 1, allocator)
        drafter.store_accepted(roots, tokens[:, :-1], requests, lengths, accepted)
        hidden_states = [output.hidden_states[numbers[:, -1]]] if drafter.model.reads_hidden else []
        return tokens, accepted, newest, *hidden_states  # a path repeats its last node

    def _prepared(self, rows: int, nodes: int) -> tuple[Any, Any]:
        """SGLang's batch of `rows` requests. It reads from the device to make one, so not during a capture."""
        if rows not in self.batches:
            batch, backend, _ = self.drafter.sizes.states[nodes][1].capture_prepare(rows)
            if nodes == 1:
                backend.get_verify_buffers_to_fill_after_draft()[0].fill_(1)
            self.batches[rows] = batch, backend
        return self.batches[rows]

    def _target(
        self, batch: Any, backend: Any, tree: EagleVerifyInput, requests: Tensor, lengths: Tensor, slots: Tensor
    ) -> Any:
        """The target's pass over a tree, with logits and hidden states of all nodes."""
        batch.input_ids, batch.positions, batch.out_cache_loc = tree.draft_token, tree.positions, slots
        batch.req_pool_indices, batch.seq_lens, batch.orig_seq_lens = requests, lengths, lengths
        reads_hidden = self.drafter.model.reads_hidden
        batch.capture_hidden_mode = CaptureHiddenMode.FULL if reads_hidden else CaptureHiddenMode.NULL
        # The backend would copy the mask to where it already is.
        tree.custom_mask = tree.custom_mask[:0]
        batch.spec_info = tree
        with forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            return self.runner.model.forward(batch.input_ids, batch.positions, batch)
