"""Two processes that share a target compute what one with the whole target does: logits, losses, gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairs import save_target
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from longspec.models.draft_saving import save_draft_file
from longspec.models.llama import LlamaGlide
from longspec.models.mistral import MistralGlide
from longspec.models.parallel import head_rows
from longspec.models.qwen2 import Qwen2Glide
from longspec.models.qwen3 import Qwen3Glide
from longspec.models.target_split import split_target
from longspec.train.distributed import keep_drafts_equal, share_targets
from longspec.train.loss import DraftLoss, DraftScores

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "GQA": (LlamaGlide, {"vocab_size": 61}),
    "tied, MHA, more inputs": (LlamaGlide, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "biases of all products": (LlamaGlide, {"attention_bias": True, "mlp_bias": True}),
    "pad token of the other rank": (Qwen2Glide, {"tie_word_embeddings": True, "pad_token_id": 60}),
    "norms of heads": (Qwen3Glide, {"vocab_size": 62}),
    "Mistral": (MistralGlide, {"head_dim": 6, "tie_word_embeddings": True}),
}
INPUTS = {"tied, MHA, more inputs": {"kv_layers": (1,), "target_feature": True}}
"""Options of the draft."""
LENGTHS = torch.tensor([0, 9, 20, 40], dtype=torch.int32)


def fill_biases(file: Path) -> None:
    """A fresh target's are zero."""
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("bias"):
            weight.normal_(std=0.3)
    save_file(weights, file, metadata={"format": "pt"})


def outcome(model: Any) -> dict[str, Tensor]:
    """The pair's logits, and each objective's terms and gradients with all tokens, some, and none in the loss."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (2, 20), generator=generator)
    positions = torch.cat([torch.arange(int(length)) for length in LENGTHS.diff()]).view(2, 20)
    found = {"logits": model(tokens).logits.detach(), "rows of the head": head_rows(model.lm_head, tokens)}
    some = torch.where(torch.rand(2, 20, generator=generator) < 0.5, tokens, -100)
    for labelled, labels in (("all", tokens), ("some", some), ("none", torch.full_like(tokens, -100))):
        lags = torch.tensor([1, 3, 5])
        for kind, lag, listed in (
            ("ce", None, None),
            ("distill", lags, None),
            ("mixed", None, None),
            ("mixed", lags, torch.arange(0, model.config.vocab_size, 3)),
            ("acceptance", lags, None),
            ("acceptance", None, torch.arange(0, model.config.vocab_size, 3)),
        ):
            model.draft_model.zero_grad()
            objective = DraftLoss(kind, lag is not None, 7 * model.config.vocab_size, listed)
            loss = kind if listed is None else f"{kind}, listed"
            given = {"labels": labels, "position_ids": positions, "cu_seqlens": LENGTHS, "lags": lag}
            total, terms = model(tokens, objective=objective, **given)
            total.backward()
            scores, hits = model(tokens, objective=DraftScores(objective), **given)
            found |= {f"{loss} {labelled} {name}": term for name, term in terms.items()}
            found |= {f"{loss} {labelled} score {name}": term for name, term in scores.items()}
            found[f"{loss} {labelled} hits"] = hits
            found |= {
                f"{loss} {labelled} gradient of {name}": p.grad.clone()
                for name, p in model.draft_model.named_parameters()
            }
    return found


def on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    share_targets(2)
    for name, (glide, _) in CASES.items():
        place = Path(folder) / name
        found = outcome(glide.from_pretrained(place / "split", glide_path=place / "draft.pth", torch_dtype="float64"))
        torch.testing.assert_close(found, torch.load(place / "expected.pt"), rtol=1e-5, atol=1e-6)
    check_gradients_are_averaged(rank)
    dist.destroy_process_group()


def check_gradients_are_averaged(rank: int) -> None:
    """What rounds differently on the two ranks must not make two drafts of one."""
    layer = nn.Linear(3, 1)
    keep_drafts_equal(layer)
    (layer(torch.ones(3)) * (rank + 1)).backward()
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[1.5] * 3]


@pytest.mark.slow
def test_two_ranks_with_halves_are_one_with_the_whole(tmp_path: Path) -> None:
    for name, (glide, layout) in CASES.items():
        place = tmp_path / name
        save_target(place / "target", glide.target_class.config_class.model_type, **layout)
        fill_biases(place / "target" / "model.safetensors")
        split_target(place / "target", place / "split", 2)
        model = glide.from_pretrained(place / "target", torch_dtype="float64", **INPUTS.get(name, {}))
        save_draft_file(model.draft_model.state_dict(), place / "draft.pth", model.draft_model.options)
        torch.save(outcome(model), place / "expected.pt")
    torch.multiprocessing.spawn(on_rank, (str(tmp_path),), nprocs=2)
