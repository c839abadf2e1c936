"""A draft made of its target's layers fits it, and each of its weights is the one that it should begin with."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_fixtures import make_target
from transformers import AutoModelForCausalLM

from longspec.models.draft_files import draft_window, load_draft
from longspec.models.llama import LlamaGlide
from longspec.models.qwen2 import Qwen2Glide
from scripts.pipeline.warm_start import WRITERS, write_warm_start

PLACES = {
    "input_layernorm": (0, "input_layernorm"),
    "self_attn": (0, "self_attn"),
    "post_self_attention_layernorm": (-1, "input_layernorm"),
    "cross_attn": (-1, "self_attn"),
    "post_cross_attention_layernorm": (-1, "post_attention_layernorm"),
    "mlp": (-1, "mlp"),
}


@pytest.mark.parametrize(("family", "pair"), [("llama", LlamaGlide), ("qwen2", Qwen2Glide)])
def test_a_warm_start_is_the_targets_own_layers(
    family: str, pair: type[LlamaGlide | Qwen2Glide], tmp_path: Path
) -> None:
    """What the target has not, as Llama's biases, is 0; what adds to the embeddings adds as much as a norm gives."""
    torch.manual_seed(0)
    make_target(tmp_path / "target", family)
    (file,) = (tmp_path / "target").glob("*.safetensors")
    state = load_file(file)
    state["model.norm.weight"].uniform_(0.2, 0.6)  # a fresh target's are 1
    save_file(state, file, metadata={"format": "pt"})
    write_warm_start(tmp_path / "start", tmp_path / "target", window=128)
    pair.from_pretrained(tmp_path / "target", glide_path=tmp_path / "start")  # no weight missing or unexpected
    assert draft_window(tmp_path / "start") == 128
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).model
    size = model.norm.weight.square().mean().sqrt()
    for name, weight in load_draft(tmp_path / "start").items():
        place, _, rest = name.partition(".")
        layer, module = PLACES[place]
        wanted = model.layers[layer].state_dict().get(f"{module}.{rest}", torch.zeros_like(weight))
        if name.removesuffix(".weight") in WRITERS:
            written = weight @ torch.randn(weight.shape[1], 4096)
            torch.testing.assert_close(written.square().mean().sqrt(), size, rtol=0.05, atol=0)
            torch.testing.assert_close(weight, wanted * (weight.norm() / wanted.norm()), msg=name)
        else:
            assert torch.equal(weight, wanted), name
        assert weight.any() or name.endswith("bias")
