"""The backend of an NVIDIA GPU. Without one, its kernels run in Triton's interpreter."""

from longspec.kernels.backend import Backend
from longspec.kernels.triton import (
    compaction,
    compile_ahead,
    descent,
    divergence,
    elementwise,
    layers,
    logit_statistics,
    lookup_branches,
    node_selection,
    rejection,
    row_argmax,
    row_noise,
    tree_growth,
)


class TritonBackend(Backend):
    """Triton kernels, for any dtype but fp64."""

    name = "triton"
    capturable = True

    compiling_only = staticmethod(compile_ahead.compiling_only)
    embed = staticmethod(elementwise.embed)
    linear = staticmethod(layers.linear)
    stream = staticmethod(layers.TritonStream)
    softmax = staticmethod(logit_statistics.softmax)
    log_sum_exp = staticmethod(logit_statistics.log_sum_exp)
    argmax = staticmethod(row_argmax.argmax)
    first_arrival = staticmethod(row_argmax.first_arrival)
    row_noise = staticmethod(row_noise.row_noise)
    terms_and_gradient = staticmethod(divergence.terms_and_gradient)
    grow_level = staticmethod(tree_growth.grow_level)
    select_nodes = staticmethod(node_selection.select_nodes)
    extend_branches = staticmethod(lookup_branches.extend_branches)
    follow_choices = staticmethod(descent.follow_choices)
    reject_children = staticmethod(rejection.reject_children)
    compact = staticmethod(compaction.compact)
