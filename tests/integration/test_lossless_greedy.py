"""Temperature 0 is lossless: any method, model, batch, EOS and accepted path gives transformers' own greedy tokens."""

import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from oracles import Oracle, Plan, passes_of
from pairs import FAMILIES, GLIDE, padded, tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from longspec import generate
from longspec.inference import engine_pool, methods
from longspec.inference.drafting import magicdec
from longspec.inference.drafting.lookup import BRANCH_SIZES
from longspec.inference.engine import intake
from longspec.inference.generate import GenerationOutput
from longspec.inference.methods import METHODS, TREE_RULES
from longspec.models.draft_layer import WINDOW
from longspec.models.glide import GlideMixin

TIE = 1e-5
"""Logits closer than this may change places between two ways to compute them."""


@dataclass(frozen=True)
class Target:
    family: str
    heads: tuple[int, int] = (4, 2)
    head_dim: int | None = None
    layers: int = 2
    vocab: int = 61
    tied: bool = False
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"
    seed: int = 0


@dataclass(frozen=True)
class Case:
    target: Target
    method: str
    lengths: tuple[int, ...]
    max_new_tokens: int
    tree_shape: tuple[int, ...] = (2, 4, 3)
    gamma: int = 3
    tree_rule: str = "descend"
    tree_nodes: int | None = None
    lookup_branches: bool = False
    plan: Plan = ()
    """The oracle's; empty: what the method drafts itself, tree and seq with a fresh draft."""
    eos: tuple[tuple[int, int], ...] = ()
    """(row, place) of the true continuation's tokens that serve as EOS."""
    side: str = "left"
    prompt_seed: int = 0
    chunk: int = 2048
    sparse_view: tuple[int, int] = (32, 1024)
    """magicdec's SINK and RECENT."""

    @property
    def depth(self) -> int:
        if self.method != "tree":
            return 0 if self.method == "vanilla" else self.gamma
        branches = max(BRANCH_SIZES) if self.lookup_branches else 0
        return min(max(len(self.tree_shape), branches), self.nodes - 1)

    @property
    def nodes(self) -> int:
        if self.method != "tree":
            return 1 + self.depth
        branches = sum(BRANCH_SIZES) if self.lookup_branches else 0
        return min(1 + sum(self.tree_shape) + branches, self.tree_nodes or 1024)

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.prompt_seed)
        return [torch.randint(self.target.vocab, (n,), generator=generator).tolist() for n in self.lengths]

    def truth(self) -> list[list[int]]:
        """As long as an oracle looks: a last pass may go depth tokens past the limit, the next proposal as many."""
        return [greedy(self.target, tuple(row), self.max_new_tokens + 2 * self.depth + 2) for row in self.prompts()]


@lru_cache(maxsize=4)
def build(target: Target) -> tuple[GlideMixin, PreTrainedModel]:
    """A random target with a fresh draft, and the same target loaded once more as transformers' own."""
    overrides = {
        "vocab_size": target.vocab,
        "num_hidden_layers": target.layers,
        "num_attention_heads": target.heads[0],
        "num_key_value_heads": target.heads[1],
        "tie_word_embeddings": target.tied,
        "initializer_range": 0.5,  # so wide that the continuation hardly ever loops
        **({} if target.head_dim is None else {"head_dim": target.head_dim}),
    }
    config = tiny_config(target.family, hidden_size=24, intermediate_size=32, pad_token_id=None, **overrides)
    torch.manual_seed(target.seed)
    random = AutoModelForCausalLM.from_config(config)
    for weight in random.parameters():
        if weight.dim() == 1:  # a bias, which would be 0, or a norm, which would be 1
            weight.data += 0.3 * torch.randn_like(weight)
    with TemporaryDirectory() as folder:
        random.save_pretrained(folder)
        model = GLIDE[target.family].from_pretrained(folder, torch_dtype=target.dtype)
        model.draft_is_trained = True  # as far as decoding is concerned
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype, attn_implementation=target.attention)
    assert not isinstance(own, GlideMixin) and own.dtype == model.dtype == target.dtype
    return model, own


@lru_cache(maxsize=64)
def greedy(target: Target, prompt: tuple[int, ...], limit: int, eos: tuple[int, ...] = ()) -> list[int]:
    """transformers' own continuation."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": limit, "eos_token_id": list(eos) or None, "pad_token_id": 0}
    return build(target)[1].generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def run(case: Case, eos: tuple[int, ...]) -> tuple[GenerationOutput, Oracle]:
    """What `generate` returns, and its drafter."""
    model, _ = build(case.target)
    engine_pool.release(model)  # this case has an oracle of its own
    drafters, make_drafter = [], methods.make_drafter

    def make_oracle(*args: object, **kwargs: object) -> Oracle:
        drafter = make_drafter(*args, **kwargs)
        drafters.append(Oracle(drafter, case.lengths, case.truth(), case.plan, case.target.vocab))
        return drafters[-1]

    ids, mask = padded([torch.tensor(row) for row in case.prompts()], case.side)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "make_drafter", make_oracle)
        patch.setattr(intake, "PREFILL_TOKENS", case.chunk * len(ids))
        patch.setattr(magicdec, "SINK", case.sparse_view[0])
        patch.setattr(magicdec, "RECENT", case.sparse_view[1])
        eos_token_id = eos[0] if len(eos) == 1 else eos or None
        tree = {"tree_shape": case.tree_shape, "tree_rule": case.tree_rule, "tree_nodes": case.tree_nodes}
        tree |= {"lookup_branches": case.lookup_branches}
        limits = {"max_new_tokens": case.max_new_tokens, "eos_token_id": eos_token_id, "pad_token_id": 0}
        out = generate(model, ids, mask if len(ids) > 1 else None, case.method, gamma=case.gamma, **tree, **limits)
    return out, drafters[-1]


def check(case: Case, seen: Counter[int | str]) -> None:
    """seen: counts near-ties, and the lengths that passes accepted from an oracle."""
    prompts, truth = case.prompts(), case.truth()
    eos = tuple(truth[row][place] for row, place in case.eos)
    out, oracle = run(case, eos)
    stats, by_depth = out.stats, [0] * case.depth
    for b, (prompt, new) in enumerate(zip(prompts, (new.tolist() for new in out.new_tokens), strict=True)):
        whole = prompt + new
        assert out.sequences[b].tolist() == whole + [0] * (out.sequences.shape[1] - len(whole))
        exact = same_tokens(case.target, prompt, new, greedy(case.target, tuple(prompt), case.max_new_tokens, eos))
        planned = oracle.planted[b] if case.plan and exact else oracle.accepted[b]
        passes, row_by_depth = passes_of(planned, len(new), case.depth)
        assert oracle.accepted[b] == passes and stats.row_rounds[b] == len(passes)
        assert -(-(len(new) - 1) // (case.depth + 1)) <= len(passes) <= len(new) - 1
        by_depth = [sum(pair) for pair in zip(by_depth, row_by_depth, strict=True)]
        seen.update(passes if case.plan else (), **({} if exact else {"near-ties": 1}))
    assert stats.accepted_by_depth == by_depth
    rounds, decoded = sum(map(len, oracle.accepted)), sum(len(new) - 1 for new in out.new_tokens)
    assert (stats.rounds, stats.decoded_tokens) == (rounds, decoded)
    assert stats.tree_nodes == (case.nodes if case.method == "tree" else 0)
    assert rounds == 0 or stats.mean_acceptance_length == decoded / rounds


def same_tokens(target: Target, prompt: list[int], new: list[int], expected: list[int]) -> bool:
    """False where tokens part at a tie of the target's two best logits; without a tie a difference fails."""
    at = next((i for i, (a, b) in enumerate(zip(new, expected, strict=False)) if a != b), None)
    if at is None:
        assert new == expected
        return True
    with torch.no_grad():
        logits = build(target)[1](torch.tensor([prompt + expected[:at]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert best - second <= TIE, f"token {at}: {new} instead of {expected}; logits {best}, {second}"
    warnings.warn(f"near-tie after {at} tokens: logits {best}, {second}", stacklevel=1)
    return False


@st.composite
def cases(draw: st.DrawFn, method: str) -> Case:
    target = Target(
        family=draw(st.sampled_from(FAMILIES)),
        heads=draw(st.sampled_from([(4, 2), (6, 2), (4, 4), (2, 2), (4, 1), (2, 1), (1, 1)])),
        head_dim=draw(st.sampled_from([None, 4, 10, 16])),
        layers=draw(st.integers(1, 3)),
        vocab=draw(st.integers(5, 61)),
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        attention=draw(st.sampled_from(["sdpa", "eager"])),
        seed=draw(st.integers(0, 999)),
    )
    batch, limit = draw(st.integers(1, 4)), draw(st.integers(1, 24))
    lengths = draw(st.lists(st.integers(1, 24), min_size=batch, max_size=batch))
    if draw(st.integers(0, 4)) == 4:  # one row that ends about the edge of the draft's window, or of its third
        lengths[draw(st.integers(0, batch - 1))] = WINDOW * draw(st.integers(1, 3)) + draw(st.integers(-24, 24))
    case = Case(
        target,
        method,
        tuple(lengths),
        limit,
        tree_shape=tuple(draw(st.lists(st.integers(1, min(16, target.vocab)), min_size=1, max_size=5))),
        gamma=draw(st.integers(1, 6)),
        tree_rule=draw(st.sampled_from(TREE_RULES)),
        tree_nodes=draw(st.none() | st.integers(2, 24)) if method == "tree" else None,
        lookup_branches=method == "tree" and draw(st.booleans()),
        eos=tuple(draw(st.lists(st.tuples(st.integers(0, batch - 1), st.integers(0, limit - 1)), max_size=3))),
        side=draw(st.sampled_from(["left", "right"])),
        prompt_seed=draw(st.integers(0, 999)),
        chunk=max(draw(st.sampled_from([2048, 1, 3, 8, 64, 512])), max(lengths) // 16),
        sparse_view=draw(st.sampled_from([(32, 1024), (0, 1), (2, 3), (4, 8)])),
    )
    if method == "vanilla" or draw(st.booleans()):
        return case
    step = st.lists(st.integers(0, case.depth), min_size=batch, max_size=batch)
    return replace(case, plan=draw(st.lists(step, min_size=1, max_size=8)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 8), marks=pytest.mark.slow)], ids=["few", "many"])
def test_greedy_is_lossless(method: str, seeds: range) -> None:
    """Ten examples a seed: with more, hypothesis mostly repeats parts of those it has."""
    seen: Counter[int | str] = Counter()
    all_depths = Case(Target("qwen2"), method, (2 * WINDOW - 9, 2), 29, tree_shape=(3, 8, 16, 5, 9), gamma=6)
    if depth := all_depths.depth:
        all_depths = replace(all_depths, plan=[(n, depth - n) for n in range(depth + 1)])
    check(all_depths, seen)
    if method == "tree":
        check(replace(all_depths, tree_nodes=17), seen)
        deeper = replace(all_depths, tree_nodes=32, lookup_branches=True)
        check(replace(deeper, plan=[(n, deeper.depth - n) for n in range(deeper.depth + 1)]), Counter())
    slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large]
    for number in seeds:

        @seed(f"{method} {number}")
        @settings(derandomize=True, deadline=None, database=None, max_examples=10, suppress_health_check=slow_is_fine)
        @given(cases(method))
        def lossless(case: Case) -> None:
            check(case, seen)

        lossless()
    assert seen.pop("near-ties", 0) <= 1
    assert depth == 0 or set(seen) >= set(range(depth + 1)), "accepted lengths that did not occur"


@pytest.mark.parametrize(("family", "method"), zip(FAMILIES, METHODS[1:], strict=True))
def test_every_accepted_length_meets_every_place_of_eos(family: str, method: str) -> None:
    """In both rows, at different times; the tokens are distinct, so that EOS comes where it is put."""
    case = Case(Target(family, vocab=499), method, lengths=(9, 4), max_new_tokens=10, tree_shape=(2, 4, 3), gamma=3)
    depth, places, seen = case.depth, 2 * (case.depth + 1), Counter()
    while len({token for row in case.truth() for token in row[:places]}) < 2 * places:
        case = replace(case, prompt_seed=case.prompt_seed + 1)
    for accepted, place in product(range(depth + 1), range(places)):
        eos = ((0, place), (1, places - 1 - place))
        check(replace(case, plan=((accepted, depth - accepted),), eos=eos), seen)
    assert set(seen) == set(range(depth + 1)), "an accepted length is missing, or there was a near-tie"
