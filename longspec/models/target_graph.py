"""The frozen target's pass as a CUDA graph in training, where its kernels take longer to launch than to run."""

from collections import Counter
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from longspec.kernels.shared.device import upload
from longspec.kernels.training.segments import Segments
from longspec.models.target_attention import KeysValues

Passed = tuple[Tensor | None, list[KeysValues]]
"""Hidden states [B, T, hidden] of a whole pass; keys and values of the layers that the draft reads, the last one's
first."""
TargetPass = Callable[[Tensor, Tensor, Segments, bool], Passed]
"""Of input_ids, position_ids, both [B, T], segments, and whether the pass is to be whole."""
Kind = tuple[torch.Size, bool]
"""What of a pass a graph is made for: its shape [B, T], and whether it is whole."""
MOST_WORK = 10**11
"""Weights of a layer times tokens, above which a layer runs for longer than its launch takes: half a millisecond each,
by estimate."""
MOST_SEGMENTS = 255
MOST_GRAPHS = 2
RUNS_BEFORE = 2
"""Of a kind, before it is captured: kernels are compiled by then, and the kind is likely to come again."""


class TargetGraphs:
    """A target's pass, captured for the first kinds that come again; others run kernel by kernel.

    Its attention must be FlashAttention's (`varlen_flash.runs`), which reads borders on the device alone. What it
    returns is overwritten by the next pass of that kind.
    """

    def __init__(self, run: TargetPass, layer_weights: int) -> None:
        """layer_weights: how many weights a layer has."""
        self.run, self.layer_weights = run, layer_weights
        self.seen: Counter[Kind] = Counter()
        self.graphs: dict[Kind, _Graph] = {}
        self.begun: tuple[Tensor, bool] | None = None
        """The tokens of the pass that the next call may be for, and whether it is whole."""

    def __call__(self, input_ids: Tensor, position_ids: Tensor, segments: Segments, whole: bool) -> Passed:
        kind = input_ids.shape, whole
        segments.check(input_ids.numel())
        begun, self.begun = self.begun, None
        if begun is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            if begun[0] is input_ids and begun[1] == whole:
                return self.graphs[kind].result
        if self.layer_weights * input_ids.numel() > MOST_WORK or len(segments.lengths) > MOST_SEGMENTS:
            return self.run(input_ids, position_ids, segments, whole)
        self.seen[kind] += 1
        if kind not in self.graphs:
            if self.seen[kind] <= RUNS_BEFORE or len(self.graphs) == MOST_GRAPHS:
                return self.run(input_ids, position_ids, segments, whole)
            self.graphs[kind] = _Graph(self.run, input_ids, position_ids, segments, whole)
        return self.graphs[kind](input_ids, position_ids, segments)

    def begin(self, input_ids: Tensor, position_ids: Tensor, segments: Segments, whole: bool) -> None:
        """Begin a pass that is captured, beside what the current stream will be given, behind what it has been.

        The next call, if it is for this very pass, waits for it and returns its result. Until then the tokens must
        live.
        """
        graph = self.graphs.get((input_ids.shape, whole))
        if graph is None or len(segments.lengths) > MOST_SEGMENTS:
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph(input_ids, position_ids, segments)
        self.begun = input_ids, whole

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()


class _Graph:
    """The pass of one kind, which reads and writes the same tensors every time."""

    def __init__(
        self, run: TargetPass, input_ids: Tensor, position_ids: Tensor, segments: Segments, whole: bool
    ) -> None:
        self.input_ids, self.position_ids = input_ids.clone(), position_ids.clone()
        self.bounds = _padded_bounds(segments)
        borders = _FixedSegments(self.bounds, tokens=input_ids.numel(), longest=input_ids.shape[1])
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = run(self.input_ids, self.position_ids, borders, whole)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> Passed:
        self.input_ids.copy_(input_ids)
        self.position_ids.copy_(position_ids)
        self.bounds.copy_(_padded_bounds(segments))
        self.graph.replay()
        return self.result


class _FixedSegments(Segments):
    """Segments whose borders the device alone knows: no one segment is longer than `longest`."""

    def __init__(self, bounds: Tensor, tokens: int, longest: int) -> None:
        super().__init__([0, tokens], bounds.device)
        self.query_bounds, self.longest = bounds, longest  # type: ignore[misc]  # else computed from the host's


def _padded_bounds(segments: Segments) -> Tensor:
    """int32 [MOST_SEGMENTS + 1] on the device, empty segments behind the last one."""
    missing = MOST_SEGMENTS - len(segments.lengths)
    bounds = [*segments.bounds, *[segments.bounds[-1]] * missing]
    return upload(torch.tensor(bounds, dtype=torch.int32), segments.device)
