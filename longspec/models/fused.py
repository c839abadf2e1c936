"""Decoder layers for decoding on CUDA: the modules' own parameters, few and large matrix products, one kernel between.

Per layer one product makes queries, keys and values, one makes gate and up, and the products that end a branch add
to the residual stream themselves. The residual stream [B, N, hidden] is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from longspec.kernels.elementwise import rms_norm, rotate_and_store, rotate_queries, swiglu
from longspec.models.draft_layer import GlideDecoderLayer

RopeTable = tuple[Tensor, Tensor]
"""The target's rotary table at positions 0 … P - 1: cos, sin, each [P, D]."""
Attend = Callable[[Tensor], Tensor]
"""q [B, Hq, N, D] -> [B, Hq, N, D], over keys and values that are already stored"""


def can_fuse(layer: nn.Module) -> bool:
    """Whether a target's layer has the Llama shape: biases on q, k and v at most, a gated SiLU MLP, rotary halves."""
    try:
        attention, mlp = layer.self_attn, layer.mlp
        unbiased = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        known = {"q_proj", "k_proj", "v_proj", "o_proj"} == {name for name, _ in attention.named_children()}
        return known and isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation)) and all(linear.bias is None for linear in unbiased)
    except AttributeError:
        return False


def rope_table(rotary_embedding: nn.Module, like: Tensor, positions: int) -> RopeTable:
    """The table of `positions` positions in the dtype and on the device of `like`."""
    cos, sin = rotary_embedding(like, torch.arange(positions, device=like.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()


class MergedLinear:
    """Several linears of one input as one product [..., in] -> [..., sum of outs].

    Their weights become views of one weight, so that the modules stay as they were and no byte is held twice.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.weight = _merged([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else _merged([linear.bias for linear in linears])

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@torch.no_grad()
def _merged(parts: Sequence[nn.Parameter]) -> Tensor:
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


def _add_product(residual: Tensor, x: Tensor, linear: nn.Linear) -> None:
    """residual += linear(x), in the product's own epilogue; residual [B, N, hidden], x [B, N, in]."""
    residual.flatten(0, 1).addmm_(x.flatten(0, 1), linear.weight.t())


def _heads_last(heads: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, N, H·D]"""
    return heads.transpose(1, 2).flatten(2)


class _FusedMLP:
    def __init__(self, norm: Any, mlp: Any) -> None:
        self.norm, self.down = norm, mlp.down_proj
        self.gate_up = MergedLinear([mlp.gate_proj, mlp.up_proj])

    def add_to(self, residual: Tensor, eps: float) -> None:
        _add_product(residual, swiglu(self.gate_up(rms_norm(residual, self.norm.weight, eps))), self.down)


class _FusedSelfAttention:
    def __init__(self, norm: Any, attention: Any) -> None:
        self.norm, self.output = norm, attention.o_proj
        self.qkv = MergedLinear([attention.q_proj, attention.k_proj, attention.v_proj])

    def add_to(
        self,
        residual: Tensor,
        eps: float,
        positions: Tensor,
        rope: RopeTable,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        attend: Attend,
    ) -> None:
        projected = self.qkv(rms_norm(residual, self.norm.weight, eps))
        q = rotate_and_store(projected, positions, rope, keys, values, slots)
        _add_product(residual, _heads_last(attend(q)), self.output)


class FusedTargetLayer:
    """One layer of a target that `can_fuse`."""

    def __init__(self, layer: Any, eps: float) -> None:
        self.eps = eps
        self.attention = _FusedSelfAttention(layer.input_layernorm, layer.self_attn)
        self.mlp = _FusedMLP(layer.post_attention_layernorm, layer.mlp)

    def add_to(
        self,
        residual: Tensor,
        positions: Tensor,
        rope: RopeTable,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        attend: Attend,
    ) -> None:
        """Add the layer's two branches to residual [B, N, hidden]; keys, values [B, Hkv, S, D] get the new entries at
        slots int [B, N], before `attend` runs."""
        self.attention.add_to(residual, self.eps, positions, rope, keys, values, slots, attend)
        self.mlp.add_to(residual, self.eps)


class FusedDraftLayer:
    """The GLIDE layer (see `models.draft_layer`)."""

    def __init__(self, layer: GlideDecoderLayer, eps: float) -> None:
        self.eps = eps
        self.self_attention = _FusedSelfAttention(layer.input_layernorm, layer.self_attn)
        self.cross_norm, self.cross = layer.post_self_attention_layernorm, layer.cross_attn
        self.mlp = _FusedMLP(layer.post_cross_attention_layernorm, layer.mlp)
        queries = layer.self_attn.q_proj.out_features
        merged = self.self_attention.qkv
        assert merged.bias is not None
        self.kv_weight, self.kv_bias = merged.weight[queries:], merged.bias[queries:]

    def store_keys_values(
        self, embeddings: Tensor, positions: Tensor, rope: RopeTable, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Put the self-attention keys and values of tokens [B, T, hidden] at slots int [B, T]; negative ones not."""
        normed = rms_norm(embeddings, self.self_attention.norm.weight, self.eps)
        rotate_and_store(F.linear(normed, self.kv_weight, self.kv_bias), positions, rope, keys, values, slots)

    def add_to(
        self,
        residual: Tensor,
        positions: Tensor,
        rope: RopeTable,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        self_attend: Attend,
        cross_attend: Attend,
    ) -> None:
        """Add the layer's three branches to residual [B, N, hidden], the tokens' embeddings."""
        self.self_attention.add_to(residual, self.eps, positions, rope, keys, values, slots, self_attend)
        q = self.cross.q_proj(rms_norm(residual, self.cross_norm.weight, self.eps))
        q = rotate_queries(q, positions, rope, self.cross.head_dim)
        _add_product(residual, _heads_last(cross_attend(q)), self.cross.o_proj)
        self.mlp.add_to(residual, self.eps)
