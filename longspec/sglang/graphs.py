"""CUDA graphs of a function of a batch, one per batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class BatchGraphs:
    """Calls `function` by replaying a CUDA graph of the next captured batch size, or directly if there is none.

    All arguments are tensors of B rows; so are the results.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], padding: dict[str, Tensor]) -> None:
        """padding: a row [1, ...] of every argument by its name, for the rows that a batch lacks."""
        self.function = function
        self.padding = padding
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
        size = self.padded(batch)
        if size not in self.graphs:
            return self.function(**arguments)
        torch._foreach_copy_([self.inputs[name][:batch] for name in arguments], list(arguments.values()))
        if batch < size:
            for name in arguments:
                self.inputs[name][batch:size] = self.padding[name]
        graph, outputs = self.graphs[size]
        graph.replay()
        return tuple(rows[:batch] for rows in outputs)
