"""The target's pass in training ends at the last module whose output is read."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import FAMILIES, OPTIONS, Handed, make_pair
from torch import Tensor

from longspec.models.glide import GlideMixin
from longspec.models.target_kernels import use_kernels
from longspec.train.loss import DraftLoss

LAST = "model.layers.2"
AFTER_LAST_KEYS = (
    *(f"{LAST}.self_attn.{name}" for name in ("q_proj", "o_proj")),
    *(f"{LAST}.{name}" for name in ("post_attention_layernorm", "mlp", "mlp.down_proj")),
    *("model.norm", "lm_head"),
)
B, T = 2, 12


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(1, 61, (B, T), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(4), 900 + torch.arange(4, T)]).expand(B, -1)
    borders = torch.tensor([0, 5, T, 2 * T], dtype=torch.int32)
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions, "cu_seqlens": borders}


def calls(model: Any, objective: Any) -> Counter[str]:
    """Number of calls of each module in one training forward and backward pass."""
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: counts.update([name]))
    loss, _ = model(**batch(), lags=torch.tensor([1, 5, 3]), objective=objective)
    loss.backward()
    return counts


@pytest.mark.parametrize(
    ("family", "kind", "objective", "is_whole"),
    [
        *((family, "published", DraftLoss("ce"), False) for family in FAMILIES),
        *(("llama", kind, DraftLoss("ce"), kind != "kv_layers") for kind in ("kv_layers", "feature", "both")),
        *(("llama", "published", DraftLoss(loss), True) for loss in ("distill", "mixed")),
        ("llama", "published", DraftLoss("ce", log_target_loss=True), True),
    ],
)
def test_the_pass_ends_at_the_last_keys_unless_more_is_read(
    tmp_path: Path, family: str, kind: str, objective: DraftLoss, is_whole: bool
) -> None:
    """Without it the last layer runs its norm, keys and values once. A further layer is free; a feature and the losses
    of the target's logits need the whole pass. The gradient reaches all weights of the draft."""
    model = make_pair(tmp_path, family, options=OPTIONS[kind])
    counts = calls(model, objective)
    assert {counts[name] for name in AFTER_LAST_KEYS if name != "lm_head"} == {int(is_whole)}
    assert is_whole or not (counts["lm_head"] or counts[f"{LAST}.self_attn.q_norm"])
    assert all(counts[f"{LAST}.{name}"] == 1 for name in ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj"))
    assert all(counts[f"model.layers.{layer}.mlp"] == counts[f"model.layers.{layer}"] == 1 for layer in (0, 1))
    weights = dict(model.draft_model.named_parameters())
    assert all(weight.grad is not None and weight.grad.any() for weight in weights.values())


@torch.no_grad()
def test_several_lags_share_one_pass_of_the_target(tmp_path: Path) -> None:
    """Several rows of lags give, with one pass of the target, the results of each row alone."""
    model: GlideMixin = make_pair(tmp_path)
    lags = torch.tensor([[1, 1, 1], [4, 2, 5]])
    objective = Handed(lambda hidden, target_hidden, labels, lm_head: hidden)
    alone = [model(**batch(), lags=row, objective=objective) for row in lags]
    counts: Counter[str] = Counter()
    model.model.layers[0].register_forward_hook(lambda *_: counts.update(["layer 0"]))
    together = model(**batch(), lags=lags, objective=objective)
    assert counts["layer 0"] == 1
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


ODD_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 20}


@pytest.mark.parametrize(
    ("family", "overrides", "reads_target"),
    [("llama", ODD_HEADS, True), ("qwen2", {}, True), ("qwen3", {}, False), ("mistral", {}, False)],
)
def test_elementwise_kernels_change_no_result(
    tmp_path: Path, family: str, overrides: dict[str, Any], reads_target: bool, device: str
) -> None:
    """Hidden states of target and draft, and calls by transformers, are the same."""
    model: Any = make_pair(tmp_path, family, initializer_range=0.1, num_hidden_layers=2, **overrides).to(device)
    for name, parameter in model.model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)).to(device)
    objective = Handed(lambda *inputs: inputs[:2], reads_target)
    inputs = {name: x.to(device) if name in ("input_ids", "position_ids") else x for name, x in batch().items()}
    lags = torch.tensor([1, 5, 3])
    expected = model(**inputs, lags=lags, objective=objective)
    logits = model(inputs["input_ids"]).logits
    use_kernels(model.model, model.draft_layer_class)
    forwards = [module for module in model.model.modules() if "forward" in vars(module)]
    per_layer = 6 if hasattr(model.model.layers[0].self_attn, "q_norm") else 4
    assert len(forwards) == per_layer * model.config.num_hidden_layers + 1
    got = model(**inputs, lags=lags, objective=objective)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(inputs["input_ids"]).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["base", "sinkpi-slicing"])
@pytest.mark.parametrize(("loss", "kind"), [("ce", "published"), ("mixed", "published"), ("ce", "both")])
def test_the_host_never_waits_for_the_device_in_a_micro_batch(
    tmp_path: Path, variant: str, loss: str, kind: str
) -> None:
    model: Any = make_pair(tmp_path, dtype=torch.bfloat16, options=OPTIONS[kind]).cuda()
    use_kernels(model.model, model.draft_layer_class)
    inputs = {name: x.cuda() if name in ("input_ids", "position_ids") else x for name, x in batch().items()}
    inputs |= {"lags": None if variant == "base" else torch.tensor([1, 5, 3]), "objective": DraftLoss(loss)}
    model(**inputs)[0].backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**inputs)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
