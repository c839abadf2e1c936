"""A backend for a CPU whose layers run in Triton's interpreter."""

from longspec.kernels.backend import Backend
from longspec.kernels.triton.backend import TritonBackend


class InterpretedBackend(Backend):
    """The layers of `TritonBackend`, and torch for all else, because the interpreter is slow."""

    name = "interpreted"

    embed = staticmethod(TritonBackend.embed)
    linear = staticmethod(TritonBackend.linear)
    stream = staticmethod(TritonBackend.stream)
