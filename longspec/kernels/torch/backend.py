"""The backend for any device and dtype."""

from longspec.kernels.backend import Backend
from longspec.kernels.torch import acceptance, layers, lookup, row_noise, trees, vocabulary


class TorchBackend(Backend):
    """torch's own operations."""

    name = "torch"
    capturable = False

    embed = staticmethod(layers.embed)
    linear = staticmethod(layers.linear)
    stream = staticmethod(layers.stream)
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
