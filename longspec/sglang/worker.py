"""SGLang's worker for GLIDE: drafts a tree, lets SGLang verify it, and keeps the draft's own keys up to date.

Verification, acceptance, sampling, grammars, the compaction of the target's keys and the relay between overlapped
rounds are those of SGLang's EAGLE worker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.distributed.parallel_state import get_tp_group, graph_capture
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner import get_batch_sizes_to_capture
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2, _get_plan_stream
from sglang.srt.speculative.frozen_kv_mtp_utils import select_last_extend_hidden
from torch import Tensor

from longspec.kernels.shared.device import upload
from longspec.kernels.triton.attention import TritonAttention
from longspec.sglang.checks import load_layer, suits_greedy_round
from longspec.sglang.draft_model import DraftModel
from longspec.sglang.drafter import Drafter, prefill_positions
from longspec.sglang.greedy_round import BatchGraphs, GreedyRound, build_tree
from longspec.sglang.large_batches import VerifySizes, verify_with


class GlideWorker(EAGLEWorkerV2):
    """Takes the place of the EAGLE worker in the scheduler. There is no draft model in SGLang's sense."""

    # EAGLE's are those of its draft model.
    war_fastpath_runner = BaseSpecWorker.war_fastpath_runner
    spec_v2_attn_backends = BaseSpecWorker.spec_v2_attn_backends

    def __init__(self, server_args: Any, target_worker: Any, **ranks: Any) -> None:  # EAGLE's loads a draft model
        self.server_args = server_args
        self.device = server_args.device
        self._target_worker, self.runner = target_worker, target_worker.model_runner
        self.topk = server_args.speculative_eagle_topk
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.adaptive_controller = None
        self.plan_stream, self.plan_stream_ctx = _get_plan_stream(self.device)
        # The scheduler asks for the pool of the draft's runner, and its metrics set a timer on it.
        self._draft_worker = SimpleNamespace(draft_runner=SimpleNamespace(token_to_kv_pool=None))

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        config, table = self.runner.model_config.hf_config, req_to_token_pool.req_to_token
        layer = load_layer(self.server_args.speculative_draft_model_path, config).to(table.device, self.runner.dtype)
        group = get_tp_group().device_group if self.server_args.tp_size > 1 else None
        weights = self.runner.model.get_embed_and_head()
        self.model = DraftModel(layer, config, weights, table.shape[1], len(table), group)
        self.sizes = VerifySizes(self.speculative_num_steps, self.speculative_num_draft_tokens, self.topk)
        self.attend = partial(TritonAttention().paged, capacity=self.runner.model_config.context_len)
        pool = token_to_kv_pool_allocator.get_kvcache()
        self.drafter = Drafter(self.model, self.sizes, pool, table, self.attend)

        # The functions that run as CUDA graphs. Their padding is SGLang's, request 0 and its slot 0.
        one = torch.ones(1, dtype=torch.long, device=self.device)
        place = {"roots": one, "requests": 0 * one, "lengths": one}
        drafted = one.repeat(1, self.speculative_num_steps)
        self.store = BatchGraphs(self.drafter.store_accepted, place | {"drafted": drafted, "accepted": 0 * one})
        if self.model.reads_hidden:
            place["hidden"] = torch.zeros(1, config.hidden_size, dtype=self.runner.dtype, device=self.device)
        self.propose = BatchGraphs(self.drafter.propose, place)
        self.rounds = BatchGraphs(GreedyRound(self.drafter, self.runner), place)

    def init_attention_backends(self) -> None:
        """The draft has none. That of the target has just been made."""
        self.has_our_attention = verify_with(self.runner.attn_backend, self.attend)

    @torch.no_grad()
    def init_cuda_graphs(self) -> None:
        sizes: list[int] = []
        if not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
            sizes, _ = get_batch_sizes_to_capture(self.runner)
            self.propose.capture([size for size in sizes if self.sizes.of(size)[0]], graph_capture)
            self.store.capture(sizes, graph_capture)
        self.sizes.build(self.runner, sizes, self.attend)
        # A captured target keeps its attention's metadata on the device, and its pass depends on tokens alone.
        if sizes and self.has_our_attention and not self.runner.server_args.enable_lora:
            with model_capture_mode():
                self.rounds.capture(sizes, graph_capture)

    @torch.no_grad()
    def forward_batch_generation(self, batch: Any, on_publish: Callable[[Tensor], None] | None = None) -> Any:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self.runner.attn_backend, self.runner.decode_cuda_graph_runner = self.sizes.states[self.sizes.nodes]
            batch.capture_hidden_mode = CaptureHiddenMode.FULL
            result = self.target_worker.forward_batch_generation(batch)
            result.new_seq_lens = batch.seq_lens
            finish = partial(self._after_prefill, batch, result)
        else:
            roots = batch.spec_info.bonus_tokens.long()
            if self.rounds.padded(len(roots)) in self.rounds.graphs and suits_greedy_round(batch):
                return self._greedy_round(batch, roots, on_publish)
            steps, nodes = self.sizes.of(self.store.padded(len(roots)))
            self.speculative_num_steps, self.speculative_num_draft_tokens = steps, nodes
            self.runner.attn_backend, self.runner.decode_cuda_graph_runner = self.sizes.states[nodes]
            batch.spec_info = self._draft_tree(batch, roots) if steps else self._build_trivial_verify_input(batch)
            result = self.verify(batch)
            finish = partial(self._after_verify, batch, result, roots)
        # SGLang prepares the next round from here on.
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        result.next_draft_input = finish()
        return result

    def _greedy_round(self, batch: Any, roots: Tensor, on_publish: Callable[[Tensor], None] | None) -> Any:
        tokens, accepted, newest, *hidden = self.rounds(**self._rows(batch, roots))
        lengths = batch.seq_lens + accepted
        if on_publish is not None:
            on_publish(lengths)
        # The next round, of this or another size, overwrites the graph's results.
        tokens, accepted, newest, *hidden = (x.clone() for x in (tokens, accepted, newest, *hidden))
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=tokens.flatten(),
            accept_lens=accepted,
            new_seq_lens=lengths,
            speculative_num_draft_tokens=tokens.shape[1],
            can_run_cuda_graph=True,
            next_draft_input=self._next_input(newest, *hidden),
        )

    def _rows(self, batch: Any, roots: Tensor) -> dict[str, Tensor]:
        """The arguments of a draft."""
        hidden = {"hidden": batch.spec_info.hidden_states} if self.model.reads_hidden else {}
        return {"roots": roots, "requests": batch.req_pool_indices, "lengths": batch.seq_lens, **hidden}

    def _draft_tree(self, batch: Any, roots: Tensor) -> EagleVerifyInput:
        tokens, parents, *_ = self.propose(**self._rows(batch, roots))
        # The mask covers prefixes and nodes; only its size depends on the host's knowledge of the lengths.
        mask, _ = self.runner.attn_backend.get_verify_buffers_to_fill_after_draft()
        total = len(roots) * self.drafter.table.shape[1] if batch.seq_lens_sum is None else batch.seq_lens_sum
        return build_tree(tokens, parents, batch.seq_lens, total, mask, self.speculative_num_steps, self.topk)

    def _after_prefill(self, batch: Any, result: Any) -> EagleDraftInput:
        positions = upload(prefill_positions(batch.prefix_lens, batch.extend_lens), torch.device(self.device))
        self.drafter.store(batch.input_ids.long(), positions, batch.out_cache_loc)
        for request in batch.reqs:
            self.model.note_prompt(request.req_pool_idx, [*request.origin_input_ids, *request.output_ids])
        states = result.logits_output.hidden_states
        hidden = select_last_extend_hidden(batch, states) if self.model.reads_hidden else None
        return self._next_input(result.next_token_ids, hidden)

    def _after_verify(self, batch: Any, result: Any, roots: Tensor) -> EagleDraftInput:
        """Store the draft's keys of the root and the accepted tokens. SGLang has moved these to the front of each
        request's nodes: node j predicted the token after j accepted ones, so token j + 1 of the path."""
        rows, nodes = len(roots), self.speculative_num_draft_tokens
        drafted = F.pad(result.next_token_ids.view(rows, nodes), (0, self.sizes.steps - nodes))  # or cuts it
        accepted = result.accept_lens
        requests, lengths = batch.req_pool_indices, batch.seq_lens
        self.store(roots=roots, drafted=drafted, requests=requests, lengths=lengths, accepted=accepted)
        newest = accepted + torch.arange(-1, rows * nodes - 1, nodes, device=accepted.device)
        hidden = result.logits_output.hidden_states[newest] if self.model.reads_hidden else None
        return self._next_input(result.next_draft_input.bonus_tokens, hidden)

    def _next_input(self, roots: Tensor, hidden: Tensor | None = None) -> EagleDraftInput:
        unused = roots.new_empty(len(roots), 0)  # SGLang filters and joins these fields by row
        return EagleDraftInput(bonus_tokens=roots, hidden_states=hidden, topk_p=unused, topk_index=unused)

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        self.model.read_head()
        return True, "Succeeded to update model weights."

    update_weights_from_ipc = update_weights_from_disk

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        outcome = self.target_worker.update_weights_from_tensor(recv_req)
        self.model.read_head()
        return outcome
