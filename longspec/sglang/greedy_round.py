"""A greedy round as one CUDA graph: the draft, the target's pass, acceptance, and the draft's keys of the new tokens.

SGLang's own round launches some 70 small kernels one by one around the target's graph, which takes the host longer than
the device takes for all of it. This one leaves a single launch to the host. Its steps are those of
`EAGLEWorkerV2.verify` (srt/speculative/eagle_worker_v2.py, line 1538) on the buffers of SGLang's Triton attention, none
of whose metadata are read on the host.
"""

from __future__ import annotations

import copy
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

from longspec.sglang.drafter import Drafter, DraftTree, candidates
from longspec.sglang.large_batches import VerifySizes, tree_shape


def can_capture(runner: Any) -> bool:
    """Whether the target's attention keeps its metadata on the device, and its pass depends on tokens alone."""
    return hasattr(runner.attn_backend, "extend_attention_fwd") and not runner.server_args.enable_lora


def build_tree(
    tree: DraftTree, lengths: Tensor, total: int, mask: Tensor | None, steps: int, topk: int
) -> EagleVerifyInput:
    """SGLang's form of a tree of `steps` levels. total: sum of the lengths, or a bound of it. mask: buffer of the
    tree's mask. topk: 1 for a chain, whose accepted keys SGLang does not move."""
    rows, nodes = tree.tokens.shape
    if mask is not None:  # SGLang fills all of it, and it has room for the largest batch
        mask = mask[: nodes * (total + nodes * rows)]
    mask, positions, *links, tokens = build_tree_kernel_efficient(
        *(tree.tokens[:, 0], *candidates(tree.parents, steps), tree.tokens[:, 1:], lengths, total),
        *(nodes, steps, nodes),
        tree_mask_buf=mask,
    )
    return verify_input(tokens, mask, positions, tuple(links), steps, topk, nodes)


def verify_input(
    tokens: Tensor, mask: Tensor, positions: Tensor, links: tuple[Tensor | None, ...], *sizes: int
) -> EagleVerifyInput:
    """SGLang's form of trees. links: three tensors of numbers of next nodes; None where nothing reads them. sizes:
    number of levels, SGLang's top k, number of nodes."""
    fields = (tokens, mask, positions, *links, None, *sizes, CaptureHiddenMode.FULL)
    return EagleVerifyInput(*fields, seq_lens_sum=None, seq_lens_cpu=None)


class GreedyRound:
    """The function of a batch that the graphs capture."""

    def __init__(self, drafter: Drafter, runner: Any, sizes: VerifySizes, pools: tuple[Any, Any]) -> None:
        """runner: the target's. pools: SGLang's request pool and its allocator of KV slots."""
        self.drafter, self.runner, self.sizes = drafter, runner, sizes
        self.requests_pool, self.allocator = pools
        self.batches: dict[int, tuple[Any, Any]] = {}
        """SGLang's batch with the buffers that a capture needs, and its attention backend, by batch size."""

    def __call__(
        self, roots: Tensor, requests: Tensor, lengths: Tensor, hidden: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Arguments as in `Drafter.propose`. Returns the new tokens, LongTensor [B, steps + 1], of which the first
        accepted[b] of row b are valid; accepted, int32 [B]; the last valid one, LongTensor [B]; and, if the draft reads
        them, the target's hidden states [B, hidden] at the position before it."""
        rows, device = len(roots), roots.device
        steps, nodes = self.sizes.of(rows)
        batch, backend = self._prepared(rows, nodes)
        table = self.requests_pool.req_to_token
        mask = backend.get_verify_buffers_to_fill_after_draft()[0]
        if steps:
            shape = tree_shape(self.sizes.topk, steps, nodes)
            tree = self.drafter.propose(shape, nodes, roots, requests, lengths, hidden)
            verified = build_tree(tree, lengths, rows * table.shape[1], mask, steps, self.sizes.topk)
        else:
            tree = DraftTree(roots[:, None], roots.new_full((rows, 1), -1))
            verified = verify_input(roots, mask, lengths, (None, None, None), 0, 1, 1)  # the mask is all ones
        slots = assign_extend_cache_locs_func(requests, table, lengths, lengths + nodes, rows, nodes, device)
        output = self._target(copy.copy(batch), backend, verified, requests, lengths, slots)
        best = output.next_token_logits.argmax(-1).view(rows, nodes)
        path, drafts, newest = self.drafter.model.backend.follow_choices(*tree, best, steps)
        tokens, accepted = best.gather(1, path), (drafts + 1).int()
        numbers = path + torch.arange(0, rows * nodes, nodes, device=device)[:, None]
        if self.sizes.topk > 1 and steps:
            accepts = torch.arange(steps + 1, device=device) < accepted[:, None]
            view = SimpleNamespace(seq_lens=lengths, req_pool_indices=requests, out_cache_loc=slots)
            view.req_to_token_pool = self.requests_pool
            move_accept_tokens_to_target_kvcache(view, numbers.where(accepts, -1).int(), accepted - 1, self.allocator)

        own = torch.cat([roots[:, None], tokens[:, :-1]], 1)
        self.drafter.store_accepted(own, requests, lengths, accepted)
        results = tokens, accepted, newest
        if self.drafter.model.reads_hidden:
            return *results, output.hidden_states[numbers[:, -1]]  # a path repeats its last node
        return results

    def _prepared(self, rows: int, nodes: int) -> tuple[Any, Any]:
        """SGLang's batch of `rows` requests. It reads from the device to make one, so not during a capture."""
        if rows not in self.batches:
            batch, backend, _ = self.sizes.states[nodes][1].capture_prepare(rows)
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
        batch.spec_info = copy.copy(tree)
        batch.spec_info.custom_mask = tree.custom_mask[:0]
        with forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            return self.runner.model.forward(batch.input_ids, batch.positions, batch)
