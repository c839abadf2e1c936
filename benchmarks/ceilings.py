"""Measured limits of the device, and the timers that the other benchmarks use."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch

from longspec.errors import UserError
from longspec.inference.engine.capture import CAPTURE_MODE


@dataclass(frozen=True)
class Ceilings:
    """Bandwidths and matrix-product rate of this device, measured in this run."""

    read_bytes_per_s: float
    """Rate of a kernel that only reads (see `read_bandwidth`), as a decoding step reads weights, keys and values."""
    matmul_flops_per_s: float
    """Rate of an 8192³ bf16 product of random matrices, sustained over half a second rather than in a first burst."""

    def __str__(self) -> str:
        return f"read {self.read_bytes_per_s / 1e12:.2f} TB/s, product {self.matmul_flops_per_s / 1e12:.0f} TFLOP/s"

    def floor_ms(self, read_bytes: float, flops: float) -> float:
        """Milliseconds that reading the bytes or doing the arithmetic takes, whichever is longer."""
        return 1e3 * max(read_bytes / self.read_bytes_per_s, flops / self.matmul_flops_per_s)

    def describe(self) -> dict[str, float | str]:
        return {"device": torch.cuda.get_device_name(), "torch": torch.__version__} | asdict(self)


def measure_ceilings() -> Ceilings:
    """Raises UserError without a CUDA device."""
    if not torch.cuda.is_available():
        raise UserError("this benchmark needs a CUDA device; none is available")
    from benchmarks.read_bandwidth import measure_read_bandwidth  # needs Triton

    read_bytes_per_s = measure_read_bandwidth()
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    product_ms = timed_ms(partial(torch.mm, a, b, out=out), runs=9, repeats=40)
    torch.cuda.empty_cache()
    return Ceilings(read_bytes_per_s, 2 * 8192**3 / product_ms * 1e3)


def captured_ms(work: Callable[[], object]) -> float:
    """Milliseconds that `work` takes as a CUDA graph: the median of 5 means of 5 replays."""
    return timed_ms(capture(work).replay, runs=5, repeats=5)


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `work`. `work` runs once before the capture to compile kernels; the graph is replayed once.

    Other threads may call the device meanwhile, as NCCL's do.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=CAPTURE_MODE):
        work()
    graph.replay()
    return graph


def timed_ms(work: Callable[[], object], runs: int, repeats: int) -> float:
    """Device milliseconds per call of `work`: the median over `runs` of the mean of `repeats` calls."""
    times = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return median(times)
