"""The demo's own measures are what their names say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import make_pair, tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from longspec.inference.acceptance import accept
from longspec.inference.engine import Engine
from longspec.inference.methods import make_drafter
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler
from scripts.pipeline.forced import probability_by_depth, teacher_forced_acceptance
from scripts.pipeline.quality import bigram_nats, bits_per_byte, bytes_of_tokens, distinct_share, target_nats

VOCAB = 61


def test_bigram_is_a_distribution_after_every_token() -> None:
    """Probabilities over the vocabulary add up to one, after tokens that were seen in training and one that was not."""
    train = torch.randint(VOCAB - 1, (500,), generator=torch.Generator().manual_seed(0))
    for before in (0, 17, VOCAB - 1):
        probabilities = [
            torch.tensor(-bigram_nats(train, torch.tensor([[before, after]]), VOCAB)).exp() for after in range(VOCAB)
        ]
        assert sum(probabilities).item() == pytest.approx(1, abs=1e-4)
        assert min(probabilities) > 0


def test_bigram_has_learnt_the_pairs_it_was_shown() -> None:
    train = torch.arange(10).repeat(50)
    rows = torch.arange(10).repeat(3)[None]
    assert bigram_nats(train, rows, 10) < 0.3 * len(rows[0])


def test_target_nats_are_those_of_transformers_own_loss() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config("llama")).eval()
    rows = torch.randint(VOCAB, (5, 12))
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss
    assert target_nats(model, rows, batch=2) == pytest.approx(loss.item() * 5 * 11, rel=1e-5)


def test_bytes_are_counted_as_utf8_writes_them() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = "def größe(): return '→ 漢'\n" * 3
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    ids = torch.tensor([[fast.eos_token_id, *fast(text)["input_ids"], fast.eos_token_id]])
    counts = bytes_of_tokens(fast)
    assert counts[ids].sum() == len(text.encode())
    assert bits_per_byte(torch.log(torch.tensor(2.0)).item() * len(text.encode()), ids, counts) == pytest.approx(1)


def test_distinct_share_tells_a_loop_from_text() -> None:
    assert distinct_share([list(range(50)), list(range(50))]) == 1
    assert distinct_share([[1, 2] * 32]) == pytest.approx(2 / 61)


@torch.no_grad()
def test_teacher_forced_on_the_targets_own_words_is_its_greedy_acceptance(tmp_path: Path) -> None:
    """With the target's greedy continuation as the text, rounds go exactly as far as in decoding."""
    shape, prompt = (4, 8, 8), 9
    model = make_pair(tmp_path, initializer_range=0.02).eval()
    prompts = torch.randint(VOCAB, (3, prompt), generator=torch.Generator().manual_seed(2))
    sampler = Sampler(0.0, 0, 1.0)
    runner = Runner(model)
    engine = Engine(
        runner, make_drafter("tree", runner, 3, sampler, shape, 1, "descend"), sampler, prompts, [prompt] * 3, 100
    )
    text = [[*row, token] for row, token in zip(prompts.tolist(), engine.prefill().tolist(), strict=True)]
    per_round = []
    for _ in range(20):
        tokens, counts, *_ = engine.round(torch.ones(3, dtype=torch.bool))
        per_round.append(counts)
        for row, new, count in zip(text, tokens.tolist(), counts.tolist(), strict=True):
            row += new[:count]
    length = min(map(len, text))
    read, emitted, rounds = torch.full((3,), prompt), 0, 0
    for counts in per_round:
        active = read + len(shape) + 2 <= length
        emitted, rounds, read = emitted + int(counts[active].sum()), rounds + int(active.sum()), read + counts
    rows = torch.tensor([row[:length] for row in text])
    assert rounds < emitted, "nothing was accepted, so nothing is shown"
    found = teacher_forced_acceptance(model, rows, [prompt] * 3, [length] * 3, shape)
    assert found is not None and found.acceptance_length == pytest.approx(emitted / rounds)
    assert sum(found.accepted_by_depth) == emitted - rounds


@torch.no_grad()
def test_probability_by_depth_is_that_of_the_targets_own_draws(tmp_path: Path) -> None:
    """Descending the tree along many draws goes as deep, on average, as the sum over the tree's paths says."""
    shape = (3, 5, 4)
    model = make_pair(tmp_path, initializer_range=0.1, vocab_size=6).eval()
    sampler, runner = Sampler(1.0, 0, 1.0, torch.Generator().manual_seed(0)), Runner(model)
    drafter: Any = make_drafter("tree", runner, 2, sampler, shape, 1, "descend")
    prompts = torch.randint(6, (2, 9), generator=torch.Generator().manual_seed(2))
    engine = Engine(runner, drafter, sampler, prompts, [9, 9], 100)
    engine.prefill()
    proposal = drafter.propose(engine.root, engine.cache)
    logits = engine.verify(proposal)
    probabilities = probability_by_depth(proposal, logits)
    reached = torch.zeros(2, 3)
    for _ in range(2000):
        count = accept(proposal, logits, sampler).count
        reached += count[:, None] > torch.arange(3)
    assert (reached / 2000 - probabilities).abs().max() < 4 * 0.5 / 2000**0.5
    assert probabilities.min() > 0.01, "nothing is accepted, so nothing is shown"


def test_rows_that_are_too_short_for_a_round_give_nothing(tmp_path: Path) -> None:
    model = make_pair(tmp_path).eval()
    assert teacher_forced_acceptance(model, torch.zeros(1, 12, dtype=torch.long), [9], [12], (2, 2)) is None
