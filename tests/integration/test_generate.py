"""`generate`: the target's own tokens, for every method, batch, padding and place of EOS."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from calls import noted
from pairs import make_pair, padded, target_greedy
from tiny_tokenizer import byte_tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from longspec import generate
from longspec.errors import UserError
from longspec.inference import methods
from longspec.inference.cache import TargetCache
from longspec.inference.drafting import magicdec
from longspec.inference.drafting.proposal import Drafter, Proposal, chain
from longspec.inference.engine.batch import Batch
from longspec.inference.engine.scheduler import Scheduler
from longspec.inference.fused_runner import FusedRunner
from longspec.inference.methods import GLIDE_METHODS, METHODS
from longspec.inference.runner import Runner
from longspec.models import draft_vocabulary
from longspec.models.glide import GlideMixin

SETTINGS = {"tree_shape": (3, 5, 4), "gamma": 3}


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> GlideMixin:
    """For calls that change nothing."""
    return make_pair(tmp_path_factory.mktemp("pair"))


def prompts(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 61, (n,), generator=generator) for n in lengths]


class Repeats(Drafter):
    """Proposes the newest token again. It has no state, and no part for some rows."""

    def __init__(self, runner: Runner, batch: int, gamma: int) -> None:
        self.depth, self.nodes, self.kind = gamma, gamma + 1, ("repeats", batch, gamma)

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        return chain(root[:, None].repeat(1, self.nodes))


def test_a_method_that_cannot_start_rows_one_after_another_decodes_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(methods._own, "repeats", Repeats)
    model, rows = make_pair(tmp_path), prompts(4, 11, 7)
    out = generate(model, [row.tolist() for row in rows], method="repeats", gamma=2, max_new_tokens=9)
    assert [new.tolist() for new in out.new_tokens] == [target_greedy(model, row, 9) for row in rows]
    assert len(out.stats.accepted_by_depth) == 2
    few = generate(model, [row.tolist() for row in rows], method="repeats", gamma=2, max_new_tokens=9, batch_size=2)
    assert torch.equal(few.sequences, out.sequences)
    with pytest.raises(UserError, match="method: the drafter of 'repeats' has no share"):
        Scheduler(model, "repeats", memory=2**27)


@pytest.mark.parametrize("settings", [{"method": "vanilla"}, {"temperature": 1.0, "seed": 3, "min_p": 0.02}])
@pytest.mark.parametrize("listed", [None, [0, 2, 3, 5]])
def test_rows_that_wait_get_the_tokens_of_one_batch(
    tmp_path: Path, settings: dict[str, Any], listed: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at a time, of which some share a prefix, also with a list, next to which few prompt tokens have room."""
    model = make_pair(tmp_path, vocab_size=7, initializer_range=0.1)
    rows = [row % 7 for row in prompts(5, 70, 1, 3, 9)]
    if listed is not None:
        rows = [row.where(torch.isin(row, torch.tensor(listed)), 1) for row in rows]
        model.draft_model.set_vocabulary(torch.tensor(listed))
        monkeypatch.setattr(draft_vocabulary, "LEAST_EXTRA", 1)
        monkeypatch.setattr(draft_vocabulary, "TOTAL_EXTRA", 6)
    rows.append(torch.cat([rows[1], torch.tensor([1, 2])]))
    ids = [row.tolist() for row in rows]
    settings = {"method": "tree", "max_new_tokens": 9, "eos_token_id": [5]} | SETTINGS | settings
    whole, few = (generate(model, ids, **settings, batch_size=size) for size in (None, 2))
    assert [new.tolist() for new in few.new_tokens] == [new.tolist() for new in whole.new_tokens]
    for name in ("decoded_tokens", "row_rounds", "rounds", "tree_shape", "accepted_by_depth"):
        assert getattr(few.stats, name) == getattr(whole.stats, name), name
    with pytest.raises(UserError, match="batch_size: not with"):
        generate(model, ids[:1], batch_size=1, stopping_criteria=[lambda *_: False])


def test_a_round_is_one_pass_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted tokens are not read again."""
    columns = noted(monkeypatch, FusedRunner, "target", lambda runner, tokens, *_: tokens.shape[1])
    (row,) = prompts(9)
    out = generate(make_pair(tmp_path), row[None], method="tree", max_new_tokens=20, tree_shape=(3, 5))
    assert columns[-out.stats.rounds :] == [9] * out.stats.rounds and sum(columns[: -out.stats.rounds]) == 9


@pytest.mark.usefixtures("ahead")
def test_no_round_is_played_that_cannot_be_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vanilla emits one token per round, after the first one."""
    played = noted(monkeypatch, Batch, "play", lambda *_: 0)
    generate(make_pair(tmp_path), *padded(prompts(4, 9), "left"), method="vanilla", max_new_tokens=7, pad_token_id=0)
    assert len(played) == 6


def test_prompt_and_new_tokens_may_fill_the_targets_positions_exactly(tmp_path: Path) -> None:
    model = make_pair(tmp_path, max_position_embeddings=32)
    (row,) = prompts(20)
    assert generate(model, row[None], max_new_tokens=12).new_tokens[0].tolist() == target_greedy(model, row, 12)
    with pytest.raises(UserError, match="32 positions"):
        generate(model, row[None], max_new_tokens=13)


def test_eos_is_the_configs_whose_other_options_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, and only those that would change the answer."""
    model = make_pair(tmp_path)
    (row,) = prompts(8)
    tokens = target_greedy(model, row, 10)
    model.generation_config.update(eos_token_id=tokens[4], max_time=0.5, min_p=0.2, cache_implementation="static")
    for _ in range(2):
        out = generate(model, row[None], max_new_tokens=10)
        assert out.new_tokens[0].tolist() == tokens[: tokens.index(tokens[4]) + 1]
    (record,) = [record for record in caplog.records if "generation config" in record.message]
    assert f"{tmp_path}: its generation config sets max_time 0.5, which" in record.message
    model.generation_config.suppress_tokens = tokens[:1]
    assert generate(model, row[None], max_new_tokens=10).new_tokens[0][0] != tokens[0]
    assert generate(model, row[None], max_new_tokens=10, suppress_tokens=None).new_tokens[0][0] == tokens[0]


def test_magicdec_drafts_from_a_fixed_view_and_stays_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past sink + window the draft differs from the target, so some tokens are refused; the output does not change."""
    assert (magicdec.SINK, magicdec.RECENT) == (32, 1024)
    monkeypatch.setattr(magicdec, "SINK", 4)
    monkeypatch.setattr(magicdec, "RECENT", 8)
    model = make_pair(tmp_path)
    rows = prompts(5, 60)
    out = generate(model, *padded(rows, "left"), method="magicdec", max_new_tokens=20, gamma=4)
    assert [new.tolist() for new in out.new_tokens] == [target_greedy(model, row, 20) for row in rows]
    assert 1 <= out.stats.mean_acceptance_length < 5
    sparse = magicdec.SparseTarget(Runner(model), 3, nodes=4)
    view, visible = sparse._view(torch.tensor([2, 6, 100]), step=1, capacity=120)
    assert view.shape == (3, 4 + 8 + 4)
    seen = [sorted(slots[keep].tolist()) for slots, keep in zip(view, visible, strict=True)]
    assert seen == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, *range(92, 102)]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "beam"}, "method: 'beam' is unknown"),
        ({"tree_rule": "accept"}, "tree_rule: 'accept' is unknown"),
        ({"tree_shape": ()}, r"tree_shape: \(\)"),
        ({"tree_shape": (4, 62)}, "1 to 61"),
        ({"tree_shape": "auto"}, "tree_shape: 'auto'"),
        ({"tree_shape": (60,) * 18}, "tree_shape: 1081 nodes"),
        ({"tree_nodes": 1}, "tree_nodes: 1; it must be an integer from 2 to 1024"),
        ({"method": "lookup", "gamma": 10**9}, "gamma: 1000000000"),
        ({"temperature": math.nan}, "temperature: nan"),
        ({"temperature": 1e-37}, "temperature: 1e-37"),
        ({"max_new_tokens": "9"}, "max_new_tokens: '9'"),
        ({"max_new_tokens": 4096}, "4096 positions"),
        ({"seed": 2**64}, "seed: 18446744073709551616"),
        ({"eos_token_id": "</s>"}, r"eos_token_id: \['</s>'\]"),
        ({"pad_token_id": "<pad>"}, "pad_token_id"),
        ({"stop_strings": ["a"]}, r"stop_strings: \['a'\] applies to model.generate only"),
        ({"streamer": print}, "streamer"),
        ({"do_sample": True}, "do_sample: not an argument"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0; it must be from 0.01 to 100"),
        ({"sequence_bias": {(3,): 101}}, "sequence_bias: 101 for"),
        ({"suppress_tokens": [61]}, "suppress_tokens: 61 is not a token id; the vocabulary has 61"),
        ({"logit_bias": {3: 101}}, "logit_bias: 101 for token 3; it must be a number from -100 to 100"),
        ({"logit_bias": dict.fromkeys(range(61), 1), "bad_words_ids": [[1]] * 964}, "1025 biases and bans in all"),
        ({"typical_p": 0.0, "temperature": 1.0}, "typical_p: 0.0; it must be from 0 to 1, but not 0"),
        ({"min_p": 1.5, "temperature": 1.0}, "min_p: 1.5"),
        ({"bad_words_ids": [[]]}, "bad_words_ids: a word of 0 tokens"),
    ],
)
def test_bad_settings_are_one_clear_line(shared_model: GlideMixin, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        generate(shared_model, torch.ones(1, 4, dtype=torch.long), **settings)
    assert "\n" not in str(error.value)


def test_bad_prompts_are_one_clear_line(model: GlideMixin) -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(UserError, match="row 1 has no real token"):
        generate(model, ids, torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))
    for token in (61, -1):
        with pytest.raises(UserError, match=f"token id {token}, the target has 61"):
            generate(model, ids * token)
    for wrong, message in [
        (ids[:, :0], "none empty"),
        (ids[0], "input_ids: torch.int64 of shape"),
        (ids.float(), "input_ids: torch.float32"),
        ("a prompt", "input_ids: a str"),
        ([[1, 2], []], "input_ids: a list"),
    ]:
        with pytest.raises(UserError, match=message):
            generate(model, wrong)  # type: ignore[arg-type]
    for mask in (ids[:1], [[1, 1], [1, 1]], "mask"):
        with pytest.raises(UserError, match="attention_mask: give"):
            generate(model, ids, mask)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="streaming takes a single prompt"):
        generate(model, ids, streamer=SimpleNamespace(put=print, end=print))
    with pytest.raises(UserError, match="model: a LlamaForCausalLM"):
        generate(LlamaForCausalLM(model.config), ids)  # type: ignore[arg-type]


def test_a_fresh_draft_needs_an_explicit_argument(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Methods that do not read the draft go without it; the default says so."""
    model = make_pair(tmp_path)
    model.draft_is_trained = False
    (row,) = prompts(8)
    expected = target_greedy(model, row, 5)
    for method in METHODS:
        settings = {"method": method, "max_new_tokens": 5} | SETTINGS
        if method in GLIDE_METHODS:
            with pytest.raises(UserError, match=f"method: '{method}' needs a trained draft"):
                generate(model, row[None], **settings)
        found = generate(model, row[None], **settings, allow_untrained_draft=method in GLIDE_METHODS)
        assert found.new_tokens[0].tolist() == expected
    assert "draft" not in caplog.text
    found = generate(model, row[None], max_new_tokens=5)
    assert found.new_tokens[0].tolist() == expected
    assert f"{tmp_path}" in caplog.text and "no trained draft" in caplog.text
    assert found.stats.rounds_by_plan and set(found.stats.rounds_by_plan) <= {"vanilla", "lookup 5", "lookup 16"}


def test_a_tokenizers_output_is_a_prompt_and_numbers_may_be_numpys(tmp_path: Path) -> None:
    """Of a tokenizer as keywords or in the place of input_ids."""
    model = make_pair(tmp_path, vocab_size=300)
    batch = byte_tokenizer()(["a", "a longer prompt"], padding=True, return_tensors="pt")
    assert not batch["attention_mask"].all()
    expected = generate(model, batch["input_ids"], batch["attention_mask"], max_new_tokens=6).sequences.tolist()
    for own in (batch, {name: value.tolist() for name, value in batch.items()}):
        with torch.autocast("cpu", torch.bfloat16):  # which does not change the pair's own dtype
            assert generate(model, own, max_new_tokens=6).sequences.tolist() == expected
    numbers = dict.fromkeys(("max_new_tokens", "batch_size", "seed", "top_k"), np.int64(6))
    assert generate(model, **batch, **numbers, repetition_penalty=np.float32(1)).sequences.tolist() == expected


def test_a_window_smaller_than_the_depth_is_refused(model: GlideMixin) -> None:
    """A round's tokens would overwrite each other in the draft's window."""
    model.draft_model.window = 3
    (row,) = prompts(8)
    for settings in ({"method": "seq", "gamma": 3}, {"tree_shape": (2, 2, 2)}, {"method": "auto"}):
        with pytest.raises(UserError, match=r"(gamma|tree_shape): \d levels, but the draft's window is 3 tokens"):
            generate(model, row[None], **settings)
    expected = target_greedy(model, row, 20)
    for settings in ({"method": "seq", "gamma": 2}, {"tree_shape": (2, 2)}, {"method": "lookup", "gamma": 3}):
        assert generate(model, row[None], max_new_tokens=20, **settings).new_tokens[0].tolist() == expected
