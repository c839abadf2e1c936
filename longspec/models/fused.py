"""Decoder layers for decoding on CUDA: the modules' own parameters, few and large matrix products, one kernel between.

Per layer one product makes queries, keys and values, one makes gate and up, and what ends a branch is added to the
residual stream without a launch of its own (see `models.residual`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from longspec.kernels.elementwise import rotate_and_store, rotate_queries
from longspec.models.draft_layer import GlideDecoderLayer
from longspec.models.residual import ResidualStream

RopeTable = tuple[Tensor, Tensor]
"""The target's rotary table at positions 0 … P - 1: cos, sin, each [P, D]."""
Attend = Callable[[Tensor], Tensor]
"""q [B, Hq, N, D] -> [B, Hq, N, D], over keys and values that are already stored"""


class Place(NamedTuple):
    """Where a pass's tokens stand in the sequence, and where a layer's keys and values of them go."""

    positions: Tensor
    """int [B, N]"""
    rope: RopeTable
    keys: Tensor
    """[B, Hkv, S, D], as `values`"""
    values: Tensor
    slots: Tensor
    """int [B, N]; a token with a negative one is not stored."""

    def take(self, qkv: Tensor) -> Tensor:
        """Store the keys and values of a merged projection [B, N, …]; its rotated queries [B, Hq, N, D]."""
        return rotate_and_store(qkv, self.positions, self.rope, self.keys, self.values, self.slots)


def can_fuse(layer: Any) -> bool:
    """Whether a target's layer has the Llama shape: biases on q, k and v at most, a gated SiLU MLP, rotary halves."""
    try:
        attention, mlp = layer.self_attn, layer.mlp
        unbiased = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        known = {"q_proj", "k_proj", "v_proj", "o_proj"} == {name for name, _ in attention.named_children()}
        gated_silu = isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)
        return known and gated_silu and all(linear.bias is None for linear in unbiased)
    except AttributeError:
        return False


def rope_table(rotary_embedding: nn.Module, like: Tensor, positions: int) -> RopeTable:
    """The table of `positions` positions in the dtype and on the device of `like`."""
    cos, sin = rotary_embedding(like, torch.arange(positions, device=like.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()


class MergedLinear:
    """Several linears of one input as one: weight [sum of outs, in], bias [sum of outs] or None.

    Their own weights become views of it, so that the modules stay as they were and no byte is held twice.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.weight = _merged([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else _merged([linear.bias for linear in linears])


@torch.no_grad()
def _merged(parts: Sequence[Tensor]) -> Tensor:
    """The parts below one another in one tensor [rows, …], which they are made views of unless they are already."""
    first = parts[0]
    rows, end = 0, first.data_ptr()
    adjacent = True
    for part in parts:
        adjacent &= part.is_contiguous() and part.data_ptr() == end
        adjacent &= part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        end += part.nbytes
        rows += part.shape[0]
    if adjacent:
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    start = 0
    for part in parts:
        part.data = whole[start : start + part.shape[0]]
        start += part.shape[0]
    return whole


def _heads_last(heads: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, N, H·D]"""
    return heads.transpose(1, 2).flatten(2)


class _FusedMLP:
    def __init__(self, norm: Any, mlp: Any) -> None:
        self.norm, self.down = norm.weight, mlp.down_proj.weight
        self.gate_up = MergedLinear([mlp.gate_proj, mlp.up_proj])

    def add_to(self, stream: ResidualStream, last: bool = False) -> None:
        stream.add_product(stream.project_gated(self.norm, self.gate_up.weight), self.down, last)


class _FusedSelfAttention:
    def __init__(self, norm: Any, attention: Any) -> None:
        self.norm, self.output = norm.weight, attention.o_proj.weight
        self.qkv = MergedLinear([attention.q_proj, attention.k_proj, attention.v_proj])

    def add_to(self, stream: ResidualStream, place: Place, attend: Attend) -> None:
        q = place.take(stream.project(self.norm, self.qkv.weight, self.qkv.bias))
        stream.add_product(_heads_last(attend(q)), self.output)


class FusedTargetLayer:
    """One layer of a target that `can_fuse`."""

    def __init__(self, layer: Any) -> None:
        self.attention = _FusedSelfAttention(layer.input_layernorm, layer.self_attn)
        self.mlp = _FusedMLP(layer.post_attention_layernorm, layer.mlp)

    def add_to(self, stream: ResidualStream, place: Place, attend: Attend) -> None:
        """Add the layer's two branches; its keys and values are in place before `attend` runs."""
        self.attention.add_to(stream, place, attend)
        self.mlp.add_to(stream)


class FusedDraftLayer:
    """The GLIDE layer (see `models.draft_layer`)."""

    def __init__(self, layer: GlideDecoderLayer) -> None:
        self.self_attention = _FusedSelfAttention(layer.input_layernorm, layer.self_attn)
        self.cross_norm: Any = None
        self.cross_norm, self.cross = layer.post_self_attention_layernorm, layer.cross_attn
        self.mlp = _FusedMLP(layer.post_cross_attention_layernorm, layer.mlp)
        queries = layer.self_attn.q_proj.out_features
        merged = self.self_attention.qkv
        assert merged.bias is not None
        self.kv_weight, self.kv_bias = merged.weight[queries:], merged.bias[queries:]

    def store_keys_values(self, stream: ResidualStream, place: Place) -> None:
        """Put the self-attention keys and values of tokens in place: all that prefill needs."""
        place.take(stream.project(self.self_attention.norm, self.kv_weight, self.kv_bias))

    def add_to(self, stream: ResidualStream, place: Place, self_attend: Attend, cross_attend: Attend) -> None:
        """Add the layer's three branches to the tokens' embeddings."""
        self.self_attention.add_to(stream, place, self_attend)
        q = stream.project(self.cross_norm.weight, self.cross.q_proj.weight, self.cross.q_proj.bias)
        q = rotate_queries(q, place.positions, place.rope, self.cross.head_dim)
        stream.add_product(_heads_last(cross_attend(q)), self.cross.o_proj.weight)
        self.mlp.add_to(stream, last=True)
