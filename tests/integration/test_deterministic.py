"""Deterministic decoding: greedy tokens and the keys that they leave are the same bits for every method and batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_devices import INTERPRETED
from pairs import OPTIONS, make_pair
from serving import ids

pytest.importorskip("triton")

from longspec import generate
from longspec.errors import UserError
from longspec.inference.cache import TargetCache
from longspec.inference.drafting.chain import NoDraft
from longspec.inference.drafting.proposal import Drafter, Proposal
from longspec.inference.engine.request_engine import EngineSettings, RequestEngine
from longspec.inference.engine.requests import Request
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.fused_runner import FusedRunner, make_runner
from longspec.inference.methods import Drafting
from longspec.inference.request import Sampling
from longspec.inference.sampling import GREEDY
from longspec.kernels import DETERMINISTIC
from longspec.kernels.backend import Backend
from longspec.kernels.triton.deterministic import DeterministicAttention, DeterministicBackend
from longspec.models.glide import GlideMixin

MODES: dict[str, dict[str, Any]] = {
    "vanilla": {"method": "vanilla"},
    "lookup": {"method": "lookup", "gamma": 15},
    "seq": {"method": "seq"},
    "tree": {"method": "tree"},
    "budget": {"method": "tree", "tree_nodes": 32, "lookup_branches": True},
    "auto": {"method": "auto"},
}
NEW_TOKENS = 48


class Interpreted(Backend):
    """The products and layers of the deterministic backend; torch for all else, because the interpreter is slow."""

    embed = staticmethod(DeterministicBackend.embed)
    linear = staticmethod(DeterministicBackend.linear)
    stream = staticmethod(DeterministicBackend.stream)


class TokensInATree(Drafter):
    """Proposes given tokens as one path of a tree, with a wrong sibling before each of them."""

    def __init__(self, answers: torch.Tensor) -> None:
        """answers: LongTensor [B, depth], the tokens after the root."""
        self.answers = answers
        self.depth = answers.shape[1]
        self.nodes = 1 + 2 * self.depth

    def propose(self, root: torch.Tensor, cache: TargetCache) -> Proposal:
        siblings = torch.stack([(self.answers + 1) % 61, self.answers], 2).flatten(1)
        number = torch.arange(self.nodes)
        parents = ((number - 1) // 2 * 2).where(number > 0, -1)
        on_path = (number % 2 == 0) & (number < number[:, None])
        visible = on_path | torch.eye(self.nodes, dtype=torch.bool)
        tokens, batch = torch.cat([root[:, None], siblings], 1), len(root)
        return Proposal(tokens, parents.expand(batch, -1), (number + 1) // 2, visible.expand(batch, -1, -1), self.depth)


@pytest.mark.slow  # Triton's interpreter takes half a minute; tests/unit/test_deterministic_kernels.py has its parts
@INTERPRETED
@torch.no_grad()
def test_a_tree_leaves_the_bits_that_decoding_one_token_at_a_time_leaves(tmp_path: Path) -> None:
    """Keys and values of two rows in one round against each row alone; one row's path passes a border of blocks."""
    model = make_pair(tmp_path, "qwen3", torch.float16, num_hidden_layers=2, initializer_range=0.05)
    runner = FusedRunner(model, Interpreted(DeterministicAttention()))
    prompts, lengths, depth = torch.randint(0, 61, (2, 62), generator=torch.Generator().manual_seed(1)), [62, 5], 3

    def batch_of(drafter: Drafter, rows: slice) -> StaticBatch:
        return StaticBatch(runner, drafter, GREEDY, prompts[rows], lengths[rows], max_new_tokens=20)

    alone, answers = [], []
    for row in range(2):
        batch = batch_of(NoDraft(), slice(row, row + 1))
        tokens = [batch.prefill()]
        for _ in range(depth + 1):
            batch.round(torch.ones(1, dtype=torch.bool))
            tokens.append(batch.root.clone())
        alone.append(batch.cache)
        answers.append(torch.cat(tokens))
    expected = torch.stack(answers)
    together = batch_of(TokensInATree(expected[:, 1:-1]), slice(0, 2))
    assert torch.equal(together.prefill(), expected[:, 0])
    together.round(torch.ones(2, dtype=torch.bool))
    assert torch.equal(together.root, expected[:, -1])
    for row, cache in enumerate(alone):
        used = slice(0, lengths[row] + depth + 1)
        assert together.cache.lengths[row] == cache.lengths[0] == used.stop
        assert torch.equal(together.cache.keys[:, row, :, used], cache.keys[:, 0, :, used])
        assert torch.equal(together.cache.values[:, row, :, used], cache.values[:, 0, :, used])


def served(model: GlideMixin, prompts: list[list[int]], mode: dict[str, Any]) -> list[list[int]]:
    """Answers of an engine whose requests start at different times and whose prompts are read in pieces."""
    options = dict(mode)
    drafting = Drafting(options.pop("method"), **options)
    settings = EngineSettings(drafting, 3, memory=2**30, prefill_chunk=96, attention=DETERMINISTIC)
    engine = RequestEngine(model, settings)
    with torch.no_grad():
        engine.batch.measure()  # without `prepare`, each kind of round is captured when it is first played
    answers: list[list[Any]] = [[] for _ in prompts]
    for prompt, events in zip(prompts, answers, strict=True):
        engine.add(Request(prompt, NEW_TOKENS, Sampling(0.0), frozenset()), events.append)
        engine.step()
    while engine.step():
        pass
    engine.close()
    return [*map(ids, answers)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "dtype", "heads"),
    [
        ("llama", torch.bfloat16, {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}),
        ("qwen2", torch.bfloat16, {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 128}),
        ("qwen3", torch.float16, {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 96}),
    ],
)
def test_greedy_answers_are_those_of_vanilla_in_every_mode_and_batch(
    tmp_path: Path, family: str, dtype: torch.dtype, heads: dict[str, int]
) -> None:
    """Prompts of 5 to 5,000 tokens, alone, eight together, and served with chunks and reuse of prefixes."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": 512, "max_position_embeddings": 8192}
    # Logits differ by little, so that greedy tokens change with the rounding. The draft shares the target's head and
    # reads its cache, so that some of its tokens are accepted.
    near_ties: dict[str, Any] = {"initializer_range": 0.05, "options": OPTIONS["both"]}
    model = make_pair(tmp_path, family, dtype, **near_ties, **sizes, **heads).eval().cuda()
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 63, 64, 250, 300, 1000, 4060, 5000]
    prompts = [torch.randint(1, 512, (length,), generator=generator).tolist() for length in lengths]
    prompts[5] = prompts[4] + prompts[5][300:]  # a common prefix
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "deterministic": True, "eos_token_id": ()}
    expected = [generate(model, [prompt], **settings, **MODES["vanilla"]).new_tokens[0].tolist() for prompt in prompts]
    for name, mode in MODES.items():
        together = [tokens.tolist() for tokens in generate(model, prompts, **settings, **mode).new_tokens]
        assert together == expected, f"{name}, eight together"
        assert served(model, prompts, mode) == expected, f"{name}, served"
        for prompt, answer in [(prompts[1], expected[1]), (prompts[6], expected[6])]:
            assert generate(model, [prompt], **settings, **mode).new_tokens[0].tolist() == answer, name
    penalized = settings | {"repetition_penalty": 1.3}
    answers = [generate(model, prompts[3:4], **penalized, **mode).new_tokens[0].tolist() for mode in MODES.values()]
    assert answers == [answers[0]] * len(MODES)


def test_what_cannot_be_deterministic_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = make_pair(tmp_path), torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(UserError, match=r"^deterministic: cannot run here: it needs a CUDA device, not cpu; l[^:]*$"):
        generate(model, prompt, deterministic=True, method="vanilla")
    with pytest.raises(UserError, match="leave attention='sdpa' out"):
        generate(model, prompt, deterministic=True, attention="sdpa")
    monkeypatch.setattr("longspec.inference.fused_runner.model_backend", lambda model, attention: None)
    with pytest.raises(UserError, match="compile=True"):
        make_runner(model, DETERMINISTIC, compiled=False)
    monkeypatch.setattr("longspec.inference.fused_runner.model_parallel_rank_and_size", lambda: (0, 2))
    with pytest.raises(UserError, match="several ranks"):
        make_runner(model, DETERMINISTIC, compiled=True)
