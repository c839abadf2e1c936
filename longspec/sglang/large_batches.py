"""Smaller trees in larger batches: a GPU reads about a hundred tokens in the time of one, and more take longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VERIFIED_TOKENS = 128
"""Number of tokens per verification, over all requests, up to which trees are whole."""
READ_TOKENS = 64
"""Number of nodes per level, over all requests, up to which the draft reads all of them."""
LEAST_NODES = 4
"""Smaller trees cost more than they accept; beyond that a round drafts nothing."""


def most_nodes(topk: int, steps: int) -> int:
    """Number of nodes of the whole tree, the root included."""
    return 1 + topk + topk * topk * (steps - 1)


class VerifySizes:
    """The tree of each batch size, and the target's CUDA graphs and attention backend for each number of nodes."""

    def __init__(self, steps: int, nodes: int, topk: int) -> None:
        self.steps, self.nodes, self.topk = steps, nodes, topk
        self.states: dict[int, tuple[Any, Any]] = {}
        """The target's attention backend and graphs by number of nodes."""

    def of(self, batch: int) -> tuple[int, int]:
        """(steps, nodes) of a round of `batch` requests: the whole tree, or its half, quarter … that fits; (0, 1) for
        rounds without a draft."""
        nodes = self.nodes
        while nodes >= LEAST_NODES and batch * nodes > VERIFIED_TOKENS:
            nodes //= 2
        if nodes == self.nodes:
            return self.steps, nodes
        if nodes < LEAST_NODES:
            return 0, 1
        if self.topk == 1:  # SGLang's chains have a node per step
            steps = min(self.steps, nodes - 1)
            return steps, steps + 1
        # A level takes as long as in a whole tree, and fewer nodes reach fewer levels.
        levels = range(nodes.bit_length() - 1, nodes)
        return min(self.steps, next(steps for steps in levels if most_nodes(self.topk, steps) >= nodes)), nodes

    def shape(self, batch: int) -> tuple[int, ...]:
        """Number of nodes in each level below the root: its `topk` best children, then the `topk` ** 2 best
        continuations of a level, or as many as the verified nodes can hold next to their ancestors."""
        steps, nodes = self.of(batch)
        return tuple(min(self.topk if level == 0 else self.topk**2, nodes - 1 - level) for level in range(steps))

    def most_read(self, batch: int) -> int:
        """Number of nodes of a level that the draft reads, the best ones, which alone get children."""
        return max(self.topk, min(self.topk**2, READ_TOKENS // batch))

    def build(self, runner: Any, batch_sizes: list[int], prepare: Callable[[Any], None]) -> None:
        """Make backend and graphs of the target for each number of nodes. runner: the target's. batch_sizes: those with
        graphs, empty without any. prepare: called on each new backend before its graphs are captured."""
        from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

        self.states[self.nodes] = (runner.attn_backend, runner.decode_cuda_graph_runner)
        # Backends and graphs read SGLang's options when they are made.
        args, decode = runner.server_args, runner.server_args.cuda_graph_config.decode
        all_sizes, workspace = decode.bs, runner.init_new_workspace
        most = runner.req_to_token_pool.size
        for steps, nodes in sorted({self.of(batch) for batch in range(1, most + 1)} - {(self.steps, self.nodes)}):
            sizes = [batch for batch in batch_sizes if self.of(batch) == (steps, nodes)]
            args.speculative_num_steps, args.speculative_num_draft_tokens = steps, nodes
            decode.bs = sizes or all_sizes
            backend = runner._get_attention_backend(init_new_workspace=True)
            prepare(backend)
            tree = {"speculative_num_steps": steps, "speculative_num_draft_tokens": nodes}
            graphs = DecodeCudaGraphRunner(runner, attn_backend=backend, **tree) if sizes else None
            self.states[nodes] = backend, graphs
        args.speculative_num_steps, args.speculative_num_draft_tokens = self.steps, self.nodes
        decode.bs, runner.init_new_workspace = all_sizes, workspace

    def activate(self, runner: Any, nodes: int) -> None:
        """Let the target verify `nodes` nodes per request."""
        runner.attn_backend, runner.decode_cuda_graph_runner = self.states[nodes]
