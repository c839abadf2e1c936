"""Registration of GLIDE with SGLang 0.5.15, whose file and function is named wherever it is replaced."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.arg_groups.speculative_hook import _handle_eagle_family
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from longspec.errors import UserError
from longspec.sglang.checks import check_server, set_default_tree

NAME = "GLIDE"


class GlideAlgorithm(CustomSpecAlgo):
    """To SGLang, GLIDE is an EAGLE whose draft has no keys in the target's pool."""

    def is_eagle(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    # SGLang calls the next three on every algorithm, but CustomSpecAlgo lacks them.
    create_future_map = SpeculativeAlgorithm.create_future_map
    need_topk = carries_draft_hidden_states = has_draft_kv

    def handle_server_args(self, server_args: Any) -> None:
        """Complete and check the options. A wrong one ends the process with one line."""
        try:
            set_default_tree(server_args)
            _handle_eagle_family(server_args)
            check_server(server_args, server_args.get_model_config().hf_config)
        except UserError as error:
            raise SystemExit(f"error: {error}") from None


def keep_algorithm(original: Callable[..., Any], algorithm: str | None, *args: Any, **kwargs: Any) -> Any:
    """Around `_resolve_speculative_algorithm_alias` (srt/arg_groups/speculative_hook.py), which would read a model's
    config from the draft; a draft may be a single file."""
    return algorithm if algorithm == NAME else original(algorithm, *args, **kwargs)


def one_draft_layer(original: Callable[..., Any], runner: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ModelRunner._build_model_config` (srt/model_executor/model_runner.py). Of the draft's config it needs the
    number of layers, by which the memory of the KV pool is divided."""
    if server_args.speculative_algorithm == NAME and kwargs.get("is_draft_model"):
        return SimpleNamespace(num_nextn_predict_layers=1)
    return original(runner, server_args, *args, **kwargs)


def triton_attention(original: Callable[..., str], server_args: Any, *args: Any, **kwargs: Any) -> str:
    """Around `ServerArgs._get_default_attn_backend` (srt/server_args.py): Triton's attention verifies trees with our
    kernel, and a greedy round with it is one CUDA graph."""
    is_glide = (server_args.speculative_algorithm or "").upper() == NAME  # SGLang has not completed the options yet
    return "triton" if is_glide else original(server_args, *args, **kwargs)


def register_glide() -> None:
    """Register the algorithm, the two functions that must not read the draft as a model, and the default attention."""

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=GlideAlgorithm)
    def worker_class(server_args: Any) -> type:
        from longspec.sglang.worker import GlideWorker  # where a GPU is used

        return GlideWorker

    hooks = {
        "sglang.srt.arg_groups.speculative_hook._resolve_speculative_algorithm_alias": keep_algorithm,
        "sglang.srt.model_executor.model_runner.ModelRunner._build_model_config": one_draft_layer,
        "sglang.srt.server_args.ServerArgs._get_default_attn_backend": triton_attention,
    }
    for function, hook in hooks.items():
        HookRegistry.register(function, hook, HookType.AROUND)
