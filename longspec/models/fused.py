"""Decoder layers for decoding: few large products on the modules' own parameters, few operations between products.

Each layer computes queries, keys and values in one product, and gate and up in another. The operations are those of the
backend's residual stream (`layers` in `kernels.triton`, `kernels.native` and `kernels.torch`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from longspec.kernels.shared.residual import HeadNorms, RopeTable, TokenSlots
from longspec.kernels.torch.layers import ResidualStream
from longspec.models.draft_layer import DraftCrossAttention, GlideDecoderLayer, QueryAttend
from longspec.models.glide import GlideMixin
from longspec.models.parallel import (
    VocabularyEmbedding,
    VocabularyHead,
    model_parallel_rank_and_size,
    sum_output,
    sum_over_ranks,
)

LEAVES = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, SiLUActivation, VocabularyEmbedding, VocabularyHead)
"""Classes of the modules without children that can be fused, next to the family's norm and rotary embedding."""
ProjectionAttend = Callable[[Tensor, TokenSlots, HeadNorms | None], Tensor]
"""The method `project` of an `Attend`, at a layer's scale."""


def can_fuse(model: Any) -> bool:
    """Whether the classes below compute every layer of a pair exactly, apart from drafts of other architectures.

    They need contiguous parameters of one dtype, biases on q, k and v only, and weights that own their memory, so that
    they can become views of merged weights. No module may have a hook but the sum over the ranks that share a target.
    An adapter, a quantized linear, another lm_head or a subclass with its own code rules a pair out.
    """
    backbone, head, norm_class = model.model, model.lm_head, model.draft_layer_class.norm_class
    drafts = [model.draft_model] if isinstance(model.draft_model, GlideDecoderLayer) else []
    named = [("lm_head", head), *(item for part in (backbone, *drafts) for item in part.named_modules())]
    return (
        _keeps(model, GlideMixin, "embed")
        and not any(_has_hook(module) for _, module in (("", model), *named))
        and all(_is_known(name, module, norm_class) for name, module in named)
        and all(_can_merge(linears) for layer in (*backbone.layers, *drafts) for linears in _merged_linears(layer))
        and all(x.dtype == head.weight.dtype and x.is_contiguous() for x in model.parameters())
    )


def _is_known(name: str, module: nn.Module, norm_class: type) -> bool:
    """Whether a module computes what the fused layers do, apart from its children."""
    if "forward" in vars(module):
        return False
    if isinstance(module, GlideDecoderLayer):  # subclasses may have other weights or another initialization
        return _keeps(module, GlideDecoderLayer, "forward", "keys_values", "feature")
    if isinstance(module, nn.Linear) and module.bias is not None:
        return type(module) is nn.Linear and name.endswith(("q_proj", "k_proj", "v_proj"))
    if any(module.children()) or name == "rotary_emb":
        own_code = ("transformers.", "longspec.models.")
        return type(module) is nn.ModuleList or type(module).__module__.startswith(own_code)
    # Exact classes: a subclass, such as an adapter or a quantized linear, computes something else.
    return type(module) in (norm_class, *LEAVES)


def _keeps(module: nn.Module, base: type, *methods: str) -> bool:
    """Whether the class of a module has inherited these methods of `base`."""
    return all(getattr(type(module), name) is getattr(base, name) for name in methods)


def _has_hook(module: nn.Module) -> bool:
    """Whether a hook may change what the module computes. transformers' own hooks record outputs or gradients."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(
        hook is not sum_output and not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks
    )


def _merged_linears(layer: Any) -> list[list[nn.Linear]]:
    attention = layer.self_attn
    mlp = layer.mlp
    merged = [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]
    if isinstance(layer, GlideDecoderLayer):
        merged.append([cross.q_proj for cross in layer.cross_attentions])
    return merged


def _can_merge(linears: Sequence[nn.Linear]) -> bool:
    """Whether all or none have biases, and each tensor either owns its memory or is followed by the next one. A view of
    a trainer's flat buffer does neither, and must remain a view of that buffer."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return len(biases) in (0, len(linears)) and all(
        not parts or _adjacent(parts) or all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
        for parts in ([linear.weight for linear in linears], biases)
    )


def _adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether each part starts in the same storage where the previous part ends."""
    end = parts[0].data_ptr()
    for part in parts:
        same_storage = part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
        if not (same_storage and part.is_contiguous() and part.data_ptr() == end):
            return False
        end += part.nbytes
    return True


def rope_table(rotary_embedding: nn.Module, like: Tensor, positions: int) -> RopeTable:
    """The rotary table of positions 0 … `positions` - 1, in the dtype and on the device of `like`."""
    cos, sin = rotary_embedding(like, torch.arange(positions, device=like.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()


class MergedLinear:
    """Several linears with the same input as one: weight [sum of outs, in], bias [sum of outs] or None.

    The linears' own weights become views of the merged one, so the modules still work and nothing is stored twice.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.weight = _merged([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else _merged([linear.bias for linear in linears])


@torch.inference_mode(False)  # parameters that become inference tensors could not be trained any more
@torch.no_grad()
def _merged(parts: Sequence[Tensor]) -> Tensor:
    """The parts concatenated along the first dimension. They become views of the result unless they already are."""
    if _adjacent(parts):
        rows = sum(len(part) for part in parts)
        return parts[0].detach().as_strided((rows, *parts[0].shape[1:]), parts[0].stride())

    whole = torch.cat([part.detach() for part in parts])
    start = 0
    for part in parts:
        part.data = whole[start : start + part.shape[0]]
        start += part.shape[0]
    return whole


def _heads_last(heads: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, N, H·D]"""
    return heads.transpose(1, 2).flatten(2)


def _add_product(stream: ResidualStream, x: Tensor, weight: Tensor, last: bool = False) -> None:
    """`ResidualStream.add_product`, summed over the ranks that share the target."""
    if model_parallel_rank_and_size()[1] > 1:
        stream.add(sum_over_ranks(stream.linear(x, weight)))
    else:
        stream.add_product(x, weight, last)


class _FusedMLP:
    def __init__(self, norm: Any, mlp: Any) -> None:
        self.norm = norm.weight
        self.down = mlp.down_proj.weight
        self.gate_up = MergedLinear([mlp.gate_proj, mlp.up_proj])

    def add_to(self, stream: ResidualStream, last: bool = False) -> None:
        _add_product(stream, stream.project_gated(self.norm, self.gate_up.weight), self.down, last)


class _FusedSelfAttention:
    def __init__(self, norm: Any, attention: Any) -> None:
        self.norm = norm.weight
        self.output = attention.o_proj.weight
        self.qkv = MergedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.head_norms: HeadNorms | None = None
        """None for a family without norms of queries and keys, and for a draft."""
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = attention.q_norm, attention.k_norm
            self.head_norms = HeadNorms(q_norm.weight, k_norm.weight, q_norm.variance_epsilon)

    def add_to(
        self, stream: ResidualStream, slots: TokenSlots, attend: QueryAttend, project: ProjectionAttend | None = None
    ) -> None:
        # One product for queries, keys and values, which are then rotated and stored together.
        qkv = stream.project(self.norm, self.qkv.weight, self.qkv.bias)
        if project is not None:
            heads = project(qkv, slots, self.head_norms)
        else:
            heads = _heads_last(attend(stream.rotate_and_store(qkv, slots, self.head_norms)))
        _add_product(stream, heads, self.output)


class FusedTargetLayer:
    """One layer of a target that `can_fuse`."""

    def __init__(self, layer: Any) -> None:
        self.attention = _FusedSelfAttention(layer.input_layernorm, layer.self_attn)
        self.mlp = _FusedMLP(layer.post_attention_layernorm, layer.mlp)

    def add_to(
        self, stream: ResidualStream, slots: TokenSlots, attend: QueryAttend, project: ProjectionAttend | None = None
    ) -> None:
        """Add the layer's two branches. Its keys and values are stored before `attend` runs, or by `project`."""
        self.attention.add_to(stream, slots, attend, project)
        self.mlp.add_to(stream)


class _FusedCrossAttentions:
    """All cross-attentions of a draft: one product for their queries, one for their outputs."""

    def __init__(self, norm: Any, attentions: Sequence[DraftCrossAttention]) -> None:
        self.norm = norm.weight
        self.queries = MergedLinear([attention.q_proj for attention in attentions])
        outputs = [attention.o_proj.weight for attention in attentions]
        # Parts of columns cannot be views of a contiguous tensor, so several outputs are copied.
        self.merged_output = None if len(outputs) == 1 else torch.cat([weight.detach() for weight in outputs], 1)
        self.output = outputs[0] if self.merged_output is None else self.merged_output

    def add_to(self, stream: ResidualStream, slots: TokenSlots, attends: Sequence[QueryAttend]) -> None:
        q = stream.project(self.norm, self.queries.weight, self.queries.bias)
        q = stream.rotate(q, slots)
        heads = [_heads_last(attend(own)) for attend, own in zip(attends, q.chunk(len(attends), 1), strict=True)]
        _add_product(stream, heads[0] if len(heads) == 1 else torch.cat(heads, -1), self.output)


class FusedDraftLayer:
    """The GLIDE layer (see `models.draft_layer`)."""

    def __init__(self, layer: GlideDecoderLayer) -> None:
        self.layer = layer
        self.self_attention = _FusedSelfAttention(layer.input_layernorm, layer.self_attn)
        self.cross = _FusedCrossAttentions(layer.post_self_attention_layernorm, layer.cross_attentions)
        self.mlp = _FusedMLP(layer.post_cross_attention_layernorm, layer.mlp)

        # Prefill stores keys and values only, so it skips the rows of the queries.
        queries = layer.self_attn.q_proj.out_features
        merged = self.self_attention.qkv
        assert merged.bias is not None
        self.kv_weight = merged.weight[queries:]
        self.kv_bias = merged.bias[queries:]

    def store_keys_values(self, stream: ResidualStream, slots: TokenSlots) -> None:
        """Store the self-attention keys and values of tokens, which is all that prefill needs."""
        stream.rotate_and_store(stream.project(self.self_attention.norm, self.kv_weight, self.kv_bias), slots)

    def feature(self, target_hidden: ResidualStream) -> Tensor:
        """`GlideDecoderLayer.feature` of contiguous [B, 1, hidden]."""
        norm: Any = self.layer.feature_layernorm
        return target_hidden.project(norm.weight, self.layer.feature_proj.weight, None)

    def add_to(
        self,
        stream: ResidualStream,
        slots: TokenSlots,
        self_attend: QueryAttend,
        cross_attends: Sequence[QueryAttend],
        feature: Tensor | None = None,
    ) -> None:
        """Add the layer's branches to the tokens' embeddings; arguments as in `GlideDecoderLayer.forward`."""
        self.self_attention.add_to(stream, slots, self_attend)
        if feature is not None:
            stream.add(feature)
        self.cross.add_to(stream, slots, cross_attends)
        self.mlp.add_to(stream, last=True)
