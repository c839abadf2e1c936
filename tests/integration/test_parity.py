"""A draft computes the same while decoding (window, stale target cache) as while training (full sequences)."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import compare_trees, prefilled, training_logits, training_pass
from pairs import FAMILIES, OPTIONS, make_pair
from torch import Tensor

from longspec.inference.drafting.chain import ChainDrafter
from longspec.inference.drafting.glide import GlideDraft
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY
from longspec.models.draft_layer import WINDOW, DraftOptions
from longspec.models.glide import GlideMixin

DEPTH = 5
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def parity_pair(folder: Path, family: str, **overrides: Any) -> GlideMixin:
    """Logits of order one, so that 1e-5 is close to fp32's own rounding."""
    return make_pair(folder, family, initializer_range=0.1, **overrides)


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(7))


def altered(tokens: Tensor, place: int) -> Tensor:
    """The tokens with another one at a place."""
    changed = tokens.clone()
    changed[place] = (changed[place] + 1) % 61
    return changed


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 256},
    "qwen2": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "mistral": {"rope_type": "linear", "factor": 4.0},
}
MHA = {"num_key_value_heads": 4, "head_dim": 16}


def compare_chains(model: GlideMixin, tokens: Tensor, roots: list[int], depth: int, is_base: bool = False) -> None:
    """Node d - 1 of a row's chain proposes level d as training does at lag d, or in the base variant."""
    draft = GlideDraft(Runner(model), len(roots), nodes=depth)
    prompts = [row[:n] for row, n in zip(tokens, roots, strict=True)]
    engine = prefilled(model, prompts, ChainDrafter(draft, depth, GREEDY))
    for step in range(depth):
        node = torch.stack([row[n + step] for row, n in zip(tokens, roots, strict=True)])
        logits = draft.next_logits(node, step, engine.cache, draft.feature(engine.cache))
        for b, n in enumerate(roots):
            expected = training_logits(model, tokens[b, : n + step + 1], None if is_base else step + 1)[-1]
            torch.testing.assert_close(logits[b], expected, **TOLERANCE, msg=f"root {n}, step {step}")


@pytest.mark.parametrize("family", ROPES)
def test_draft_uses_the_targets_scaled_rotary_embedding(tmp_path: Path, family: str) -> None:
    """The table at a token's position is the target's own, its scaling included."""
    model = parity_pair(tmp_path, family, rope_parameters=ROPES[family] | {"rope_theta": 10000.0})
    positions = torch.arange(700)[None]
    _, table = model.embed(random_tokens(1, 700), positions)
    plain = parity_pair(tmp_path / "plain", family).embed(random_tokens(1, 700), positions)[1]
    expected = model.model.rotary_emb(torch.zeros(1), positions)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(table, expected, strict=True))
    assert not torch.allclose(table[0], plain[0])


@pytest.mark.parametrize(
    ("family", "overrides", "window"), [("llama", {}, WINDOW), ("qwen2", MHA, WINDOW), ("mistral", MHA, 48)]
)
def test_chain_logits_equal_training_logits_at_the_same_lag(
    tmp_path: Path, family: str, overrides: dict, window: int, device: str
) -> None:
    """Roots from 1 to past the window, ragged in one batch."""
    model = parity_pair(tmp_path, family, **overrides).to(device)
    model.draft_model.window = window
    roots = [1, 2, 5, window - 1, window, window + 1, window + 18]
    compare_chains(model, random_tokens(len(roots), window + 28).to(device), roots, DEPTH)


@pytest.mark.parametrize("variant", ["base", "sinkpi-slicing"])
@pytest.mark.parametrize(
    ("family", "options"),
    [*(("llama", options) for options in OPTIONS.values()), *((other, OPTIONS["both"]) for other in FAMILIES[1:])],
)
def test_drafts_of_every_kind_draft_as_either_variant_trains(
    tmp_path: Path, family: str, options: DraftOptions, variant: str, device: str
) -> None:
    """In the base variant a block of 4 begins at the root, so there roots are multiples of 4 and chains short of it."""
    model = parity_pair(tmp_path, family, options=replace(options, window=16)).to(device)
    is_base = variant == "base"
    roots, depth = ([4, 12, 16, 20], 4) if is_base else ([1, 2, 15, 16, 17, 27], DEPTH)
    compare_chains(model, random_tokens(len(roots), 32).to(device), roots, depth, is_base)


@pytest.mark.parametrize(
    ("family", "options"), [*zip(FAMILIES, cycle((OPTIONS["published"], OPTIONS["both"])), strict=False)]
)
def test_tree_logits_equal_training_logits_along_each_path(
    tmp_path: Path, family: str, options: DraftOptions, device: str
) -> None:
    """Every node, whatever its siblings, equals the training forward over the prefix and its own ancestors."""
    model = parity_pair(tmp_path, family, options=options).to(device)
    prompts = [row[:n] for row, n in zip(random_tokens(3, 540).to(device), (3, 509, 530), strict=True)]
    compare_trees(model, prompts, TOLERANCE)


def test_window_edge(tmp_path: Path) -> None:
    """The query at i sees the keys i - 512 … i, in training and (by parity) in decoding: 512 back yes, 513 no."""
    model = parity_pair(tmp_path, "llama")
    model.draft_model.cross_attn.o_proj.weight.zero_()  # leaves the self-attention as the only way to the past
    tokens = random_tokens(530)
    last = training_logits(model, tokens, lag=1)[-1]
    for back, seen in ((512, True), (513, False)):
        assert torch.equal(training_logits(model, altered(tokens, -1 - back), lag=1)[-1], last) != seen


SOURCES = ("cross_attn.o_proj", "extra_cross_attn.0.o_proj", "feature_proj")
"""What a draft reads of its target."""


def reading_only(folder: Path, source: str) -> GlideMixin:
    """A pair whose draft reads, apart from the token itself, one of SOURCES."""
    model = parity_pair(folder, "llama", options=OPTIONS["both"])
    for other in ("self_attn.o_proj", *SOURCES):
        if other != source:
            model.draft_model.get_submodule(other).weight.zero_()
    return model


@pytest.mark.parametrize("source", SOURCES)
def test_lag_edge(tmp_path: Path, source: str) -> None:
    """At lag s the query at i sees what the target has up to i - s: a change there shows, one later does not."""
    model = reading_only(tmp_path, source)
    tokens = random_tokens(20)
    for lag in range(1, DEPTH + 1):
        last = training_logits(model, tokens, lag)[-1]
        for back, seen in ((lag, True), (lag - 1, False)):
            if back == 0:
                continue  # the query itself
            assert torch.equal(training_logits(model, altered(tokens, -1 - back), lag)[-1], last) != seen, (lag, back)


@pytest.mark.parametrize("source", SOURCES)
def test_base_variant_sees_whole_blocks_before_its_own(tmp_path: Path, source: str) -> None:
    """Block size 4: the query at i sees target keys j with j // 4 < i // 4, so labels never leak through the target."""
    model = reading_only(tmp_path, source)
    tokens = random_tokens(14)
    plain = training_logits(model, tokens, lag=None)
    for key in range(14):
        differs = (training_logits(model, altered(tokens, key), lag=None) != plain).any(-1).tolist()
        assert differs == [query == key or key // 4 < query // 4 for query in range(14)], key


@pytest.mark.parametrize(("lag", "without"), [(3, 3), (None, 4)])
def test_a_query_without_visible_keys_has_no_feature(tmp_path: Path, lag: int | None, without: int) -> None:
    """The first `without` tokens of a segment are drafted from their embeddings alone."""
    model = reading_only(tmp_path, "feature_proj")
    tokens = random_tokens(12)
    read = training_logits(model, tokens, lag)
    model.draft_model.feature_proj.weight.zero_()
    alone = training_logits(model, tokens, lag)
    assert (read == alone).all(-1).tolist() == [place < without for place in range(12)]


@pytest.mark.parametrize("options", [OPTIONS["published"], OPTIONS["both"]], ids=["published", "both"])
def test_packed_segments_do_not_see_each_other(tmp_path: Path, options: DraftOptions) -> None:
    """Segments that share a row give the logits of the same segments alone, jumps in position (anchors) included."""
    model = parity_pair(tmp_path, "qwen2", options=options)
    first, second = random_tokens(9), random_tokens(23)
    anchored = torch.cat([torch.arange(4), 1000 + torch.arange(4, 23)])

    def hidden(segments: list[Tensor], positions: list[Tensor], lags: list[int]) -> Tensor:
        both: Any = lambda draft, target, *_: torch.cat([draft, target], -1)[0]  # noqa: E731
        return training_pass(model, segments, torch.tensor(lags), both, positions)

    packed = hidden([first, second], [torch.arange(9), anchored], [2, 3])
    torch.testing.assert_close(packed[:9], hidden([first], [torch.arange(9)], [2]), **TOLERANCE)
    torch.testing.assert_close(packed[9:], hidden([second], [anchored], [3]), **TOLERANCE)


def test_target_sees_its_sinks_across_the_jump(tmp_path: Path) -> None:
    """Anchor-offset positions leave the attention whole: the first token still reaches the target's last state."""
    model = parity_pair(tmp_path, "llama")
    positions = torch.cat([torch.arange(4), 2000 + torch.arange(4, 20)])[None]

    def last_state(tokens: Tensor) -> Tensor:
        newest: Any = lambda draft, target, *_: target[0, -1]  # noqa: E731
        return training_pass(model, [tokens], torch.tensor([1]), newest, [positions[0]])

    tokens = random_tokens(20)
    assert not torch.equal(last_state(tokens), last_state(altered(tokens, 0)))
    with_mask = model.model(tokens[None], position_ids=positions, attention_mask=torch.ones(1, 20)).last_hidden_state
    torch.testing.assert_close(last_state(tokens), with_mask[0, -1], **TOLERANCE)
