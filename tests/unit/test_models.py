"""How a target and its draft are built."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pairs import FAMILIES, GLIDE, make_pair, save_target, tiny_config
from safetensors.torch import load_file, save_file
from training_fixtures import ROOT
from transformers import AutoModelForCausalLM

import longspec
from longspec.errors import UserError
from longspec.models.families import pair_class
from longspec.models.parallel import PretrainedModelParallelPreSplitMixin
from longspec.models.target_files import position_limit
from longspec.train.models.llama_glide import LlamaGlide, LlamaGlideDecoderLayer
from longspec.train.models.qwen2_glide import Qwen2Glide, Qwen2GlideDecoderLayer
from longspec.untrusted import read_yaml


@pytest.mark.parametrize("family", FAMILIES)
def test_pair_classes_are_transformers_own_and_public(family: str) -> None:
    """Each has a training configuration."""
    pair, name = GLIDE[family], f"{family.capitalize()}Glide"
    causal_lm = getattr(transformers, name.replace("Glide", "ForCausalLM"))
    assert issubclass(pair, causal_lm) and issubclass(pair, PretrainedModelParallelPreSplitMixin)
    assert name in longspec.__all__ and getattr(longspec, name) is pair
    assert pair_class(f"longspec.{name}.from_pretrained") is pair
    config = read_yaml(ROOT / f"conf/model/{family}.yaml")
    assert pair_class(config["model"]["_target_"]) is pair


@pytest.mark.parametrize("family", FAMILIES)
def test_constructor_loads_the_target_in_float16_and_freezes_it(tmp_path: Path, family: str) -> None:
    save_target(tmp_path, family)
    model = GLIDE[family](tiny_config(family), target_model_path=tmp_path, glide_path=None)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters() if name.startswith("draft_model.")}
    assert not any(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())


@pytest.mark.parametrize("family", FAMILIES)
def test_target_weights_and_logits_are_the_files(tmp_path: Path, family: str) -> None:
    model = make_pair(tmp_path, family)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    tokens = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    model = make_pair(tmp_path, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_fresh_draft_has_the_stated_initialisation(tmp_path: Path) -> None:
    """Weights N(0, initializer_range), biases 0, norms 1."""
    draft = make_pair(tmp_path, hidden_size=64, intermediate_size=256, initializer_range=0.05).draft_model
    for name, parameter in draft.named_parameters():
        if name.endswith("bias"):
            assert torch.all(parameter == 0), name
        elif "layernorm" in name:
            assert torch.all(parameter == 1), name
        else:
            assert abs(parameter.std().item() - 0.05) < 0.005 and abs(parameter.mean().item()) < 0.005, name


def test_state_dict_route_takes_weights_with_and_without_prefix(tmp_path: Path) -> None:
    source = make_pair(tmp_path).draft_model.state_dict()
    for prefix in ("", "draft_model."):
        given = {prefix + name: weight for name, weight in source.items()}
        loaded = LlamaGlide.from_pretrained(
            tmp_path,
            state_dict=given,
            torch_dtype="float32",
            attn_implementation="flash_attention_2",
            gradient_checkpointing=True,
            pad_token_id=5,
            ignore_mismatched_sizes=True,
        )
        assert all(torch.equal(weight, source[name]) for name, weight in loaded.draft_model.state_dict().items())
        assert loaded.gradient_checkpointing and loaded.config.pad_token_id == 5


def test_every_family_has_the_published_draft() -> None:
    """The same weights, whatever the target's attention; configs of the published drafts import two of the layers."""
    assert GLIDE["llama"].draft_layer_class is LlamaGlideDecoderLayer
    assert GLIDE["qwen2"].draft_layer_class is Qwen2GlideDecoderLayer
    layers = [GLIDE[family].draft_layer_class(tiny_config(family, head_dim=16)) for family in FAMILIES]
    shapes = [{name: weight.shape for name, weight in layer.named_parameters()} for layer in layers]
    assert all(other == shapes[0] for other in shapes)


def test_other_family_is_one_clear_line(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    with pytest.raises(UserError, match="a llama target; Qwen2Glide takes qwen2 targets"):
        Qwen2Glide.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "layer 1 of this target"),
        ("qwen3", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "has sliding_attention"),
        ("mistral", {"layer_types": ["sliding_attention"] * 3}, "a ministral target"),  # as transformers names it
        ("mistral", {"sliding_window": 4096}, "a target with sliding_window 4096"),
    ],
)
def test_targets_with_sliding_windows_are_refused_by_name(
    tmp_path: Path, family: str, settings: dict[str, Any], named: str
) -> None:
    save_target(tmp_path, family, **settings)
    with pytest.raises(UserError, match=f"{tmp_path}: .*{named}"):
        GLIDE[family].from_pretrained(tmp_path)


def test_a_window_counts_whatever_the_types_of_layers_that_mistral_does_not_read() -> None:
    config = tiny_config("mistral", sliding_window=4096, layer_types=["full_attention"] * 3)
    with pytest.raises(UserError, match="a target with sliding_window 4096"):
        GLIDE["mistral"].check_family(config, "target")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}),
        ("llama", {"sliding_window": 4096}),  # of a target that was a Mistral target
    ],
)
def test_windows_that_no_layer_uses_are_accepted(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    save_target(tmp_path, family, **settings)
    GLIDE[family].from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_scaling_that_follows_the_length_is_refused(tmp_path: Path, kind: str) -> None:
    """Its cached keys would change meaning from call to call, so no cache could be lossless."""
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(UserError, match=f"{kind} rotary scaling"):
        LlamaGlide(config, tmp_path)


def test_target_with_a_missing_weight_is_refused(tmp_path: Path) -> None:
    """transformers would fill it with random numbers and go on."""
    save_target(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.layers.2.mlp.down_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="incomplete target: 1 weights are missing"):
        LlamaGlide.from_pretrained(tmp_path)


def test_target_whose_weights_carry_code_is_refused(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return (Path.touch, (tmp_path / "ran",))

    save_target(tmp_path / "target", "llama")
    (tmp_path / "target" / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Payload()}, tmp_path / "target" / "pytorch_model.bin")
    with pytest.raises(UserError, match="weights do not load"):
        LlamaGlide.from_pretrained(tmp_path / "target")
    assert not (tmp_path / "ran").exists()


def test_draft_is_checked_before_the_target_is_loaded(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"unreadable")
    with pytest.raises(UserError, match="no such draft"):
        LlamaGlide.from_pretrained(tmp_path, glide_path=tmp_path / "missing.pth")
    with pytest.raises(UserError, match="weights do not load"):
        LlamaGlide.from_pretrained(tmp_path)


def test_position_limit_counts_the_scaling() -> None:
    """Linear: the length before scaling is stated. YaRN: either may be stated. llama3: the length after."""
    for rope, positions, limit in (
        ({"rope_type": "linear", "factor": 4.0}, 4096, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 131072),
        ({"rope_type": "default"}, 4096, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096, 4096),
    ):
        config = tiny_config("llama", max_position_embeddings=positions)
        config.rope_parameters = rope | {"rope_theta": 10000.0}
        assert position_limit(config) == limit
