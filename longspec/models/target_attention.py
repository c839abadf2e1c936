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
from longspec.models.draft import KeysValues

ATTENTION_NAME = "longspec"


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
        """The input [B, T, hidden] of each of them, which nothing else may change later."""

    @contextmanager
    def recorded(self, layers: Any) -> Iterator[None]:
        """Context in which the modules `layers` of a target show their inputs in passes of this thread."""
        thread = get_ident()  # other threads may run the same modules

        def keep(number: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if get_ident() == thread:
                self.kept[number] = inputs[0].clone()

        hooks = [layers[number].register_forward_pre_hook(partial(keep, number)) for number in self.layers]
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
