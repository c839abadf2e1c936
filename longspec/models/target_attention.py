"""Runs transformers' own modules with an attention function of the caller.

`attn_implementation="longspec"` names a function in transformers' attention registry. A call that passes `attend=`
runs that callable on the rotated queries, keys and values. Without it the module behaves as under SDPA, so the target
remains an ordinary transformers model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from longspec.kernels.shared.attention import Attend
from longspec.models.draft import KeysValues, Rope
from longspec.models.draft_layer import rotate

ATTENTION_NAME = "longspec"

ROTATION = "rotated"
"""Attribute of an attention module that rotates with another function than `rotated`, of the same signature."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    attend: Attend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if attend is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # transformers expects [B, T, H, D].
    return attend(query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


class ChosenKV(Cache):
    """A cache that keeps only the keys and values of chosen layers."""

    def __init__(self, chosen: Sequence[int]) -> None:
        super().__init__(layers=[])
        self.kept: dict[int, KeysValues] = dict.fromkeys(chosen, (torch.empty(0), torch.empty(0)))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self.kept:
            self.kept[layer_idx] = key_states, value_states
        return key_states, value_states


class LayerInputs:
    """The inputs of chosen layers in one pass of the target."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.kept: dict[int, Tensor] = {}

    def see(self, layer: int, hidden: Tensor) -> None:
        """Keep the input [B, T, hidden] of a layer, if it is chosen; nothing else may change it later."""
        if layer in self.layers:
            self.kept[layer] = hidden

    @contextmanager
    def recorded(self, layers: Any) -> Iterator[None]:
        """Context in which the modules `layers` of a target show their inputs in passes of this thread."""
        thread = get_ident()  # other threads may run the same modules

        def see(number: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if get_ident() == thread:
                self.see(number, inputs[0].clone())

        hooks = [layers[number].register_forward_pre_hook(partial(see, number)) for number in self.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def joined(self) -> Tensor | None:
        """The inputs of the n chosen layers next to each other, [B, T, n · hidden]; None for n = 0."""
        return torch.cat([self.kept[layer] for layer in self.layers], -1) if self.layers else None


def run_backbone(backbone: nn.Module, input_ids: Tensor, positions: Tensor, cache: Cache, attend: Attend) -> Tensor:
    """Hidden states [B, T, hidden] (after the final norm) of the target with attention `attend`.

    input_ids, positions: LongTensor [B, T]; `cache.update` sees every layer's rotated keys and values.
    """
    # A mask that is already 4-D is passed through untouched, so transformers builds none; `attend` ignores it.
    no_mask = torch.empty(0, 0, 0, 0, device=input_ids.device)
    output = backbone(
        input_ids=input_ids,
        position_ids=positions,
        attention_mask=no_mask,
        past_key_values=cache,
        use_cache=True,
        attend=attend,
    )
    return output.last_hidden_state


def last_keys_values(
    backbone: nn.Module, embeddings: Tensor, rope: Rope, positions: Tensor, attend: Attend, others: Sequence[int] = ()
) -> list[KeysValues]:
    """Keys and values of the last layer, then those of the layers `others`. The pass stops before the last attention.
    embeddings [B, T, hidden] of the tokens, their rotary table and positions [B, T]. The results are bitwise equal to
    those that `run_backbone` writes to a cache."""
    # The draft reads K and V of the last layer, which depend on the layers before it only.
    *before, last = backbone.layers  # type: ignore[misc, union-attr]
    kept = ChosenKV(others)
    hidden = embeddings
    for layer in before:
        hidden = layer(hidden, position_ids=positions, position_embeddings=rope, past_key_values=kept, attend=attend)

    # The draft reads only keys and values of the last layer, so its attention and MLP are skipped.
    attention = last.self_attn
    hidden = last.input_layernorm(hidden)
    keys = projected_heads(attention, "k", hidden)
    values = projected_heads(attention, "v", hidden).transpose(1, 2)
    keys = getattr(attention, ROTATION, rotated)(keys, rope)
    return [(keys, values), *kept.kept.values()]


def projected_heads(attention: Any, name: str, hidden: Tensor) -> Tensor:
    """Heads [B, T, H, D] of the queries, keys or values (`name`: q, k, v) of hidden states [B, T, hidden]. Each head is
    normalized where the family does so. Modules are called, so that hooks on them run."""
    heads = getattr(attention, f"{name}_proj")(hidden).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    return heads if norm is None else norm(heads)


def rotated(heads: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of heads [B, T, H, D], as transformers computes it: [B, H, T, D]."""
    return rotate(heads.transpose(1, 2), rope)
