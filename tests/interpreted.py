"""A backend for a CPU whose layers run in Triton's interpreter."""

from longspec.kernels.torch.backend import TorchBackend
from longspec.kernels.triton.backend import TritonBackend


class InterpretedBackend(TorchBackend):
    """The layers of `TritonBackend`, and torch for all else, because the interpreter is slow."""

    name = "interpreted"

    embed = staticmethod(TritonBackend.embed)
    linear = staticmethod(TritonBackend.linear)
    stream = staticmethod(TritonBackend.stream)
