"""The target's pass in training: once for several lags, on kernels, without waiting for the device."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import OPTIONS, Handed, make_pair
from torch import Tensor

from longspec.models.glide import GlideMixin
from longspec.models.target_kernels import use_kernels
from longspec.train.loss import DraftLoss

B, T = 2, 12


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(1, 61, (B, T), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(4), 900 + torch.arange(4, T)]).expand(B, -1)
    borders = torch.tensor([0, 5, T, 2 * T], dtype=torch.int32)
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions, "cu_seqlens": borders}


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


@pytest.mark.parametrize(("family", "overrides"), [("llama", ODD_HEADS), ("qwen2", {}), ("qwen3", {}), ("mistral", {})])
def test_elementwise_kernels_change_no_result(
    tmp_path: Path, family: str, overrides: dict[str, Any], device: str
) -> None:
    """Hidden states of target and draft, the modules that run, and calls by transformers are the same."""
    model: Any = make_pair(tmp_path, family, initializer_range=0.1, num_hidden_layers=2, **overrides).to(device)
    for name, parameter in model.model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)).to(device)
    objective = Handed(lambda *inputs: inputs[:2])
    inputs = {name: x.to(device) if name in ("input_ids", "position_ids") else x for name, x in batch().items()}
    counts: Counter[str] = Counter()
    for name, module in model.model.named_modules():
        module.register_forward_hook(lambda *_, name=name: counts.update([name]))

    def run() -> tuple[Any, Counter[str]]:
        counts.clear()
        return model(**inputs, lags=torch.tensor([1, 5, 3]), objective=objective), counts.copy()

    expected, expected_counts = run()
    logits = model(inputs["input_ids"]).logits
    use_kernels(model.model, model.draft_layer_class)
    forwards = [module for module in model.model.modules() if "forward" in vars(module)]
    per_layer = 6 if hasattr(model.model.layers[0].self_attn, "q_norm") else 4
    assert len(forwards) == per_layer * model.config.num_hidden_layers + 1
    got, got_counts = run()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert {name: n for name, n in expected_counts.items() if "act_fn" not in name} == got_counts
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
