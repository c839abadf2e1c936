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
from sglang.srt.speculative.eagle_utils import build_tree_kernel_efficient, verify_tree_greedy_func
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache
from sglang.srt.speculative.triton_ops.cache_locs import assign_extend_cache_locs_func
from torch import Tensor

from longspec.sglang.drafter import Drafter
from longspec.sglang.large_batches import VerifySizes
from longspec.sglang.tree import Candidates


def suits(batch: Any) -> bool:
    """Whether a batch of SGLang needs nothing from a round but greedy tokens."""
    sampling = batch.sampling_info
    return bool(
        sampling.is_all_greedy
        and not (batch.has_grammar or batch.return_logprob or batch.return_hidden_states)
        and sampling.acc_additive_penalties is None
        and sampling.acc_scaling_penalties is None
        and sampling.logit_bias is None
    )


def can_capture(runner: Any) -> bool:
    """Whether the target's attention keeps its metadata on the device, and its pass depends on tokens alone."""
    return hasattr(runner.attn_backend, "extend_attention_fwd") and not runner.server_args.enable_lora


def build_tree(
    candidates: Candidates, roots: Tensor, lengths: Tensor, total: int, mask: Tensor | None, tree: tuple[int, int, int]
) -> EagleVerifyInput:
    """SGLang's form of a tree. total: sum of the lengths, or a bound of it. mask: buffer of the tree's mask. tree:
    numbers of levels, of nodes, and of children per node."""
    steps, nodes, topk = tree
    if mask is not None:  # SGLang fills all of it, and it has room for the largest batch
        mask = mask[: nodes * (total + nodes * len(roots))]
    mask, positions, index, next_token, next_sibling, tokens = build_tree_kernel_efficient(
        *(roots, candidates.parents, candidates.chosen, candidates.tokens, lengths, total, topk, steps, nodes),
        tree_mask_buf=mask,
    )
    return EagleVerifyInput(
        draft_token=tokens,
        custom_mask=mask,
        positions=positions,
        retrieve_index=index,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        retrieve_cum_len=None,
        spec_steps=steps,
        topk=topk,
        draft_token_num=nodes,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def build_root(roots: Tensor, lengths: Tensor, mask: Tensor) -> EagleVerifyInput:
    """The form of a round that drafts nothing: a node per request. mask: a buffer that holds ones."""
    return EagleVerifyInput(
        *(roots, mask, lengths, None, None, None, None),
        **{"spec_steps": 0, "topk": 1, "draft_token_num": 1, "capture_hidden_mode": CaptureHiddenMode.FULL},
        **{"seq_lens_sum": None, "seq_lens_cpu": None},
    )


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
        rows = len(roots)
        steps, nodes = self.sizes.of(rows)
        batch, backend = self._prepared(rows, nodes)
        table = self.requests_pool.req_to_token
        mask = backend.get_verify_buffers_to_fill_after_draft()[0]
        if steps:
            candidates = self.drafter.propose(steps, nodes, roots, requests, lengths, hidden)
            shape = steps, nodes, self.drafter.topk
            tree = build_tree(candidates, roots, lengths, rows * table.shape[1], mask, shape)
        else:
            tree = build_root(roots, lengths, mask)
        slots = assign_extend_cache_locs_func(requests, table, lengths, lengths + nodes, rows, nodes, roots.device)
        output = self._target(copy.copy(batch), backend, tree, requests, lengths, slots)
        best = output.next_token_logits.argmax(-1).view(rows, nodes)
        path, drafts = accept(tree, best) if steps else accept_root(best)
        if steps and self.drafter.topk > 1:
            view = SimpleNamespace(seq_lens=lengths, req_pool_indices=requests, out_cache_loc=slots)
            view.req_to_token_pool = self.requests_pool
            move_accept_tokens_to_target_kvcache(view, path, drafts, self.allocator)

        path = path.clamp(min=0).long()
        tokens, accepted = best.flatten()[path], drafts + 1
        own = torch.cat([roots[:, None], tokens[:, :-1]], 1)
        self.drafter.store_accepted(own, requests, lengths, accepted)
        last = drafts[:, None].long()
        results = tokens, accepted, tokens.gather(1, last)[:, 0]
        if self.drafter.model.reads_hidden:
            return *results, output.hidden_states[path.gather(1, last)[:, 0]]
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


def accept(tree: EagleVerifyInput, best: Tensor) -> tuple[Tensor, Tensor]:
    """best: LongTensor [B, N], the target's token after each node. Returns the accepted path, int32 [B, steps + 1],
    as numbers among the nodes of all requests, -1 after its end, and the number of its draft tokens, int32 [B]."""
    rows, nodes = best.shape
    path = best.new_full((rows, tree.spec_steps + 1), -1, dtype=torch.int32)
    drafts = best.new_empty(rows, dtype=torch.int32)
    verify_tree_greedy_func(
        predicts=best.new_zeros(rows * nodes, dtype=torch.int32),
        accept_index=path,
        accept_token_num=drafts,
        candidates=tree.draft_token.view(rows, nodes),
        retrieve_index=tree.retrieve_index,
        retrieve_next_token=tree.retrieve_next_token,
        retrieve_next_sibling=tree.retrieve_next_sibling,
        target_predict=best,
        topk=tree.topk,
    )
    return path, drafts


def accept_root(best: Tensor) -> tuple[Tensor, Tensor]:
    """`accept` of trees that have only a root."""
    numbers = torch.arange(len(best), dtype=torch.int32, device=best.device)
    return numbers[:, None], torch.zeros_like(numbers)
