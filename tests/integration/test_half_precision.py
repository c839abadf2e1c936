"""On the GPU in the dtypes that people run: longer contexts, published head layouts, nothing but finite tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import FAMILIES, make_pair

from longspec import generate
from longspec.inference.methods import METHODS

MODES: dict[str, dict[str, Any]] = {method: {"method": method} for method in METHODS} | {
    "node budget": {"method": "tree", "tree_nodes": 16},
    "lookup branches": {"method": "tree", "tree_nodes": 32, "lookup_branches": True},
    "auto": {"method": "auto"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_modes_agree_with_vanilla_up_to_rounding(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """8k prompts, head_dim 128, GQA 4: a mode leaves vanilla's tokens only where two logits are near."""
    layout = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    model = make_pair(
        tmp_path, family, dtype, **layout, vocab_size=512, initializer_range=0.05, max_position_embeddings=16384
    ).cuda()
    ids = torch.randint(1, 512, (2, 8000), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :3000] = 0
    outputs = {mode: generate(model, ids, mask, max_new_tokens=48, **MODES[mode]).new_tokens for mode in MODES}
    # A list of tokens changes the draft's head.
    model.draft_model.set_vocabulary(torch.arange(0, 512, 3))
    outputs["list"] = generate(model, ids, mask, method="tree", max_new_tokens=48).new_tokens
    for mode, rows in outputs.items():
        for row, (ours, vanilla) in enumerate(zip(rows, outputs["vanilla"], strict=True)):
            differ = (ours != vanilla).nonzero()
            if len(differ):
                at = int(differ[0])
                prompt = ids[row][mask[row].bool()]
                with torch.no_grad():
                    logits = model(torch.cat([prompt, vanilla[:at]])[None], logits_to_keep=1).logits[0, -1].float()
                top = logits.topk(2).values
                assert top[0] - top[1] < 0.05 * logits.abs().max(), f"{mode}, row {row}, token {at}: {top.tolist()}"
