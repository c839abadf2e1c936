"""The frozen target's layers in training: one kernel per operation between two matrix products.

transformers computes RMSNorm, rotary embedding and SwiGLU of a layer in about twenty passes over the tokens, these
kernels in six. The modules, their parameters and their hooks stay in use, so sharded targets (ZeRO-3) and split ones
(tp_size) work too. Inputs that need a gradient and calls without `attend` take transformers' own forward.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from longspec.kernels.triton.elementwise import rms_norm, rotate_queries, swiglu
from longspec.models.draft import Rope
from longspec.models.draft_layer import GlideDecoderLayer


def use_kernels(backbone: Any, family: type[GlideDecoderLayer]) -> None:
    """Make a target's layers and final norm run on the kernels from now on; `family` names its norm and MLP classes."""
    for module in backbone.modules():
        if type(module) is family.norm_class:
            module.forward = MethodType(_norm, module)
    for layer in backbone.layers:
        layer.self_attn.forward = MethodType(_attention, layer.self_attn)
        if type(layer.mlp) is family.mlp_class and isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation):
            layer.mlp.forward = MethodType(_mlp, layer.mlp)


def _learns(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    if _learns(hidden_states):
        return type(module).forward(module, hidden_states)
    return rms_norm(hidden_states.contiguous(), module.weight, module.variance_epsilon)


def _mlp(module: Any, x: Tensor) -> Tensor:
    if _learns(x):
        return type(module).forward(module, x)
    return module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))


def _attention(
    module: Any, hidden_states: Tensor, position_embeddings: Rope, past_key_values: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    attend = kwargs.get("attend")
    # transformers' own call, as in `generate` or an evaluation of the target alone.
    if attend is None or _learns(hidden_states):
        return type(module).forward(
            module, hidden_states, position_embeddings=position_embeddings, past_key_values=past_key_values, **kwargs
        )
    queries = _rotated(_projected_heads(module, "q", hidden_states), position_embeddings)
    keys = _rotated(_projected_heads(module, "k", hidden_states), position_embeddings)
    values = _projected_heads(module, "v", hidden_states).transpose(1, 2)
    if past_key_values is not None:
        keys, values = past_key_values.update(keys, values, module.layer_idx)
    heads = attend(queries, keys, values, module.scaling)
    return module.o_proj(heads.transpose(1, 2).flatten(2)), None


def _projected_heads(attention: Any, name: str, hidden: Tensor) -> Tensor:
    """Heads [B, T, H, D] of the queries, keys or values (`name`: q, k, v) of hidden states [B, T, hidden]. Each head is
    normalized where the family does so. Modules are called, so that hooks on them run."""
    heads = getattr(attention, f"{name}_proj")(hidden).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    return heads if norm is None else norm(heads)


def _rotated(heads: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of heads [B, T, H, D]: [B, H, T, D]."""
    cos, sin = (table.expand(*heads.shape[:2], -1).flatten(0, 1).contiguous() for table in rope)
    rows = torch.arange(len(cos), device=heads.device).view(heads.shape[:2])
    return rotate_queries(heads.flatten(2).contiguous(), rows, (cos, sin), heads.shape[-1])
