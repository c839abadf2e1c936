"""The backend of a runner: the operations of decoding and training on one kind of device.

`Backend` itself runs on torch's own operations, for any device and dtype; the docstrings of its functions are those of
the interface. `triton.backend` (NVIDIA GPUs) and `native.backend` (CPUs with gcc, in float32) replace operations, and
`kernels.choice` selects one of the three. Triton's never waits for the device. Shape letters are those of
CONTRIBUTING.md; n is the number of nodes of one level.
"""

from contextlib import AbstractContextManager, nullcontext

from longspec.kernels.torch import acceptance, layers, lookup, row_noise, trees, vocabulary
from longspec.kernels.torch.attention import DecodingAttention


class Backend:
    """All operations but attention are functions of their arguments alone."""

    name = "torch"
    """"torch", "triton" or "native"."""
    capturable = False
    """Whether a CUDA graph may capture the operations."""

    def __init__(self, attention: DecodingAttention) -> None:
        self.attention = attention

    @staticmethod
    def compiling_only() -> AbstractContextManager[None]:
        """While this is open, calls compile the kernels that they need, many at a time, and launch none. Results are
        undefined, but valid as indices. A backend without such kernels computes as usual."""
        return nullcontext()

    embed = staticmethod(layers.embed)
    linear = staticmethod(layers.linear)
    stream = staticmethod(layers.ResidualStream)
    softmax = staticmethod(vocabulary.softmax)
    log_sum_exp = staticmethod(vocabulary.log_sum_exp)
    argmax = staticmethod(vocabulary.argmax)
    first_arrival = staticmethod(vocabulary.first_arrival)
    row_noise = staticmethod(row_noise.row_noise)
    terms_and_gradient = staticmethod(vocabulary.terms_and_gradient)
    grow_level = staticmethod(trees.grow_level)
    select_nodes = staticmethod(trees.select_nodes)
    extend_branches = staticmethod(lookup.extend_branches)
    follow_choices = staticmethod(acceptance.follow_choices)
    reject_children = staticmethod(acceptance.reject_children)
    compact = staticmethod(trees.compact)
