"""CUDA graphs of the frozen target's pass in training, for passes whose kernels take longer to launch than to run."""

from collections import Counter
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from longspec.kernels.shared.device import upload
from longspec.kernels.training.segments import Segments
from longspec.models.draft import TargetStates

TargetPass = Callable[[Tensor, Tensor, Segments], TargetStates]
"""(input_ids, position_ids [B, T], segments) -> result"""
MOST_WORK = 10**11
"""Largest product (weights per layer) · (tokens) of a captured pass. Beyond it a layer runs for longer than its launch
takes (0.5 ms by estimate), so a graph saves nothing."""
MOST_SEGMENTS = 255
"""Maximum number of segments of a captured pass."""
MOST_GRAPHS = 2
RUNS_BEFORE = 2
"""Number of uncaptured passes of a shape. After them its kernels are compiled, and the shape is likely to recur."""


class TargetGraphs:
    """A target's pass, captured for the first MOST_GRAPHS shapes [B, T] that repeat. Other passes run kernel by kernel.

    The attention must be FlashAttention's (`varlen_flash.runs`), which reads segment borders only on the device. A
    result is overwritten by the next pass of the same shape.
    """

    def __init__(self, run: TargetPass, layer_weights: int) -> None:
        """layer_weights: number of weights per layer."""
        self.run, self.layer_weights = run, layer_weights
        self.seen: Counter[torch.Size] = Counter()
        self.graphs: dict[torch.Size, _Graph] = {}
        self.begun: Tensor | None = None
        """Input ids of a pass that `begin` started."""

    def __call__(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> TargetStates:
        shape = input_ids.shape
        segments.check(input_ids.numel())

        begun, self.begun = self.begun, None
        if begun is not None:
            # `begin` ran on another stream; its result must not be read early.
            torch.cuda.current_stream().wait_stream(self.stream)
            if begun is input_ids:
                return self.graphs[shape].result

        if self.layer_weights * input_ids.numel() > MOST_WORK or len(segments.lengths) > MOST_SEGMENTS:
            return self.run(input_ids, position_ids, segments)
        self.seen[shape] += 1
        if shape not in self.graphs:
            if self.seen[shape] <= RUNS_BEFORE or len(self.graphs) == MOST_GRAPHS:
                return self.run(input_ids, position_ids, segments)
            # Capture does not run the pass; the call below does.
            self.graphs[shape] = _Graph(self.run, input_ids, position_ids, segments)
        return self.graphs[shape](input_ids, position_ids, segments)

    def begin(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> None:
        """Start a captured pass on a stream of its own, after the work that is queued on the current stream. If the
        next call has the same `input_ids`, it waits for this pass and returns its result. The caller keeps the inputs
        alive until then."""
        # A pass is captured in `__call__` only, so the first steps of a shape start nothing early.
        if (graph := self.graphs.get(input_ids.shape)) is None or len(segments.lengths) > MOST_SEGMENTS:
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph(input_ids, position_ids, segments)
        self.begun = input_ids

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()


class _Graph:
    """The captured pass of one shape, with fixed input and output tensors."""

    def __init__(self, run: TargetPass, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> None:
        # A graph replays fixed addresses: each call copies its inputs here.
        self.input_ids = input_ids.clone()
        self.position_ids = position_ids.clone()
        self.bounds = _padded_bounds(segments)
        borders = _FixedSegments(self.bounds, tokens=input_ids.numel(), longest=input_ids.shape[1])
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = run(self.input_ids, self.position_ids, borders)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> TargetStates:
        self.input_ids.copy_(input_ids)
        self.position_ids.copy_(position_ids)
        self.bounds.copy_(_padded_bounds(segments))
        self.graph.replay()
        return self.result


class _FixedSegments(Segments):
    """Segments whose borders are known only on the device. longest: upper bound of their lengths."""

    def __init__(self, bounds: Tensor, tokens: int, longest: int) -> None:
        super().__init__([0, tokens], bounds.device)
        self.query_bounds, self.longest = bounds, longest  # type: ignore[misc]  # computed from borders on the host otherwise


def _padded_bounds(segments: Segments) -> Tensor:
    """Borders as int32 [MOST_SEGMENTS + 1] on the device, filled up with empty segments."""
    # The number of segments is part of a graph, so it is always the largest.
    missing = MOST_SEGMENTS - len(segments.lengths)
    bounds = [*segments.bounds, *[segments.bounds[-1]] * missing]
    return upload(torch.tensor(bounds, dtype=torch.int32), segments.device)
