"""A plugin for SGLang in tests: float32 on a GPU. Its own kernels of these layers take half precision alone."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

LAYERS = {
    "sglang.srt.layers.layernorm": "RMSNorm",
    "sglang.srt.layers.activation": "SiluAndMul",
    "sglang.srt.layers.rotary_embedding": "RotaryEmbedding",
}
"""Module and name of each layer, which has a `forward_native` in plain torch."""


def register() -> None:
    """Entry point: layers run in plain torch on float32. Runs in each process, before it builds a model."""
    for module, name in LAYERS.items():
        _run_natively(getattr(import_module(module), name))


def _run_natively(layer: Any) -> None:
    on_cuda, native = layer.forward_cuda, layer.forward_native

    def forward(self: Any, *tensors: Any, **further: Any) -> Any:
        is_float32 = any(torch.is_tensor(x) and x.dtype == torch.float32 for x in (*tensors, *further.values()))
        return (native if is_float32 else on_cuda)(self, *tensors, **further)

    layer.forward_cuda = forward


def environment(folder: Path) -> dict[str, str]:
    """Environment variables with which SGLang finds this plugin. folder: takes the file of its entry point."""
    package = folder / "sglang_float32-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-float32\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[sglang.srt.plugins]\nfloat32 = sglang_float32:register\n")
    path = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    # Products of SGLang's Triton kernels have the precision of TF32 by default, which rounds near-ties apart.
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "TRITON_F32_DEFAULT": "ieee"}
