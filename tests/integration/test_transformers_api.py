"""`model.generate`: transformers' arguments, results and streamers, and tokens of the target alone."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import noted
from pairs import FAMILIES, make_pair, target_greedy
from test_generate import SETTINGS, prompts
from tiny_tokenizer import byte_tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    pipeline,
)

from longspec import generate
from longspec.errors import UserError
from longspec.inference.drafting.tree import TreeDrafter
from longspec.models.glide import GlideMixin

SHAPE = {"tree_shape": (2, 3)}
target_alone: Any = GenerationMixin.generate
"""transformers' own decoding of the same weights."""


def padded_prompts() -> dict[str, Tensor]:
    """Padded left, as transformers wants it."""
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("family", "settings"),
    zip(
        cycle(FAMILIES),
        (
            {},
            {"max_new_tokens": 7},
            {"max_length": 15},
            {"generation_config": GenerationConfig(max_new_tokens=6, do_sample=False)},
            {"max_new_tokens": 9, "eos_token_id": [11, 17, 40], "pad_token_id": 3},
            {"max_new_tokens": 9, "eos_token_id": torch.tensor([11, 17, 40])},
            {"max_new_tokens": 9, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(12)])},
            {"max_new_tokens": 9, "repetition_penalty": 1.0, "num_beams": 1, "min_new_tokens": 0},
            {"max_new_tokens": 9, "no_repeat_ngram_size": 2, "min_new_tokens": 6, "eos_token_id": [11, 17, 40]},
            {"max_new_tokens": 9, "generation_config": GenerationConfig(suppress_tokens=[*range(30)])},
        ),
        strict=False,
    ),
)
def test_greedy_results_are_transformers_own(tmp_path: Path, family: str, settings: dict) -> None:
    model = make_pair(tmp_path, family, pad_token_id=None)
    expected = target_alone(model, **padded_prompts(), **settings)
    assert torch.equal(model.generate(**padded_prompts(), **settings, **SHAPE), expected)
    assert expected.shape[1] > 9


def test_results_as_a_dict_carry_the_statistics(model: GlideMixin) -> None:
    """And show that rounds drafted: the target drafting for itself accepts every token."""
    settings = {"max_new_tokens": 16, "return_dict_in_generate": True}
    out = model.generate(**padded_prompts(), **settings, method="magicdec", gamma=4)
    assert torch.equal(out.sequences, target_alone(model, **padded_prompts(), **settings).sequences)
    assert out.stats.mean_acceptance_length == 5 and out["sequences"] is out.sequences


def test_defaults_come_from_the_models_generation_config(model: GlideMixin) -> None:
    model.generation_config.max_new_tokens = 5
    model.generation_config.eos_token_id = 60
    assert model.generate(**padded_prompts(), **SHAPE).shape == (2, 14)
    model.generation_config.do_sample, model.generation_config.temperature = True, 1e9
    samples = [model.generate(**padded_prompts(), **SHAPE, seed=seed).tolist() for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]


def test_options_of_the_models_config_that_cannot_be_applied_are_ignored_with_a_warning(
    model: GlideMixin, caplog: pytest.LogCaptureFixture
) -> None:
    """None of them reaches transformers' own preparation. The caller's are refused."""
    settings = {"max_new_tokens": 5, "method": "lookup"}
    expected = model.generate(**padded_prompts(), **settings)
    options = {"guidance_scale": 1.1, "num_beams": 3, "constraints": [[3]], "prompt_lookup_num_tokens": 3}
    model.generation_config.update(**options, cache_implementation="quantized", output_scores=True, stop_strings=["a"])
    before = model.generation_config.to_dict()
    for own in (None, deepcopy(model.generation_config)):  # a pipeline passes a copy
        assert torch.equal(model.generate(**padded_prompts(), **settings, generation_config=own), expected)
    assert model.generation_config.to_dict() == before and "guidance_scale 1.1, constraints" in caplog.text
    model.generation_config.eos_token_id = "2"
    with pytest.raises(UserError, match="eos_token_id '2' is not a token id"):
        model.generate(**padded_prompts(), **settings)


def test_several_sequences_of_a_prompt_are_samples_of_their_own(tmp_path: Path) -> None:
    """In transformers' order; with torch's global seed or one of the call."""
    model = make_pair(tmp_path, initializer_range=0.01)  # nearly uniform
    settings = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8, "top_k": 0}
    torch.manual_seed(3)
    out = model.generate(**padded_prompts(), **settings, **SHAPE)
    torch.manual_seed(3)
    assert torch.equal(model.generate(**padded_prompts(), **settings, **SHAPE), out)
    assert torch.equal(out[:, :9], padded_prompts()["input_ids"].repeat_interleave(3, 0))
    assert len(set(map(tuple, out[:, 9:].tolist()))) == 6


def test_stop_strings_end_where_transformers_ends(tmp_path: Path) -> None:
    """In the middle of a round's tokens too; from arguments and from a config."""
    model, tokenizer = make_pair(tmp_path, vocab_size=262), byte_tokenizer()
    ids = tokenizer("a prompt", return_tensors="pt").input_ids
    free = target_alone(model, input_ids=ids, max_new_tokens=30)[0, ids.shape[1] :]
    letters = [text for text in map(tokenizer.decode, free) if len(text) == 1 and text.isascii() and text.isprintable()]
    assert len(letters) > 3
    lengths = set()
    for letter in letters:
        settings = {"stop_strings": [letter], "max_new_tokens": 30}
        expected = target_alone(model, input_ids=ids, tokenizer=tokenizer, **settings)
        lengths.add(expected.shape[1])
        ours = {"input_ids": ids, "tokenizer": tokenizer, "method": "magicdec"}
        assert torch.equal(model.generate(**ours, **settings), expected)
        model.generation_config.stop_strings = [letter]
        assert torch.equal(model.generate(**ours, max_new_tokens=30), expected)
        model.generation_config.stop_strings = None
    assert len(lengths) > 3
    with pytest.raises(UserError, match="stop_strings: pass tokenizer= as well"):
        model.generate(ids, stop_strings=["a"])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"generation_config": GenerationConfig(guidance_scale=1.3)}, "guidance_scale"),
        ({"exponential_decay_length_penalty": (5, 1.1)}, "exponential_decay_length_penalty"),
        ({"output_scores": True}, "output_scores"),
        ({"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(2.0)])}, "logits_processor"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [1]}, "prefix_allowed_tokens_fn"),
        ({"assistant_model": "a model"}, "assistant_model"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_applied_is_refused_by_name(model: GlideMixin, settings: dict, name: str) -> None:
    with pytest.raises(UserError, match=f"^{name}: ") as error:
        model.generate(**padded_prompts(), **settings)
    assert "\n" not in str(error.value)


def test_a_pipeline_speculates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of a pipeline of the target alone, sampled at a temperature next to none."""
    model, tokenizer = make_pair(tmp_path, vocab_size=262), byte_tokenizer()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rounds = noted(monkeypatch, TreeDrafter, "propose", lambda *_: 0)
    settings = {"max_new_tokens": 8, "do_sample": True, "temperature": 1e-4}
    texts = []
    for one in (model, plain):
        pipe = pipeline("text-generation", model=one, tokenizer=tokenizer, device="cpu")
        texts.append(pipe(["a prompt", "another"], batch_size=2, **settings))
    assert texts[0] == texts[1] and rounds


class Recorder:
    """A streamer that keeps what it gets, and fails at its n-th value."""

    def __init__(self, fails_at: int = 0) -> None:
        self.values: list[Tensor] = []
        self.fails_at, self.ends = fails_at, 0

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu" and not self.ends
        self.values.append(value)
        if len(self.values) == self.fails_at:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.ends += 1


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("method", ["tree", "magicdec"])
def test_a_streamer_gets_what_transformers_sends(model: GlideMixin, method: str) -> None:
    """The prompt, then each new token: the same values and shapes in the same order."""
    (row,) = prompts(8)
    eos = target_greedy(model, row, 12)[7]
    mine, theirs = Recorder(), Recorder()
    generate(model, row[None], method=method, max_new_tokens=12, eos_token_id=eos, streamer=mine, **SETTINGS)
    target_alone(model, row[None], max_new_tokens=12, eos_token_id=eos, streamer=theirs)
    assert mine.ends == 1 and len(mine.values) == len(theirs.values) > 2
    assert all(torch.equal(one, other) for one, other in zip(mine.values, theirs.values, strict=True))


@pytest.mark.usefixtures("ahead")
def test_an_exception_leaves_the_model_as_it_was(model: GlideMixin) -> None:
    model.train()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    grads = [parameter.requires_grad for parameter in model.parameters()]
    (row,) = prompts(8)
    expected = target_greedy(model, row, 12)
    breaks = Recorder(fails_at=5)
    with pytest.raises(KeyboardInterrupt):
        generate(model, row[None], max_new_tokens=12, streamer=breaks, **SETTINGS)
    assert [int(value) for value in breaks.values[1:]] == expected[:4]
    assert torch.is_grad_enabled() and model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == grads
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation_config)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert generate(model, row[None], max_new_tokens=12, **SETTINGS).new_tokens[0].tolist() == expected


def test_a_streamer_is_ended_once_however_generation_ends(tmp_path: Path) -> None:
    """A reader in another thread would wait for ever."""
    model, ids = make_pair(tmp_path), padded_prompts()["input_ids"][1:]
    cases: list[tuple[dict[str, Any], int, type[BaseException] | None]] = [
        ({}, 0, None),
        ({}, 3, KeyboardInterrupt),
        ({"max_new_tokens": 10**6}, 0, UserError),
        ({"method": "none"}, 0, UserError),
        ({"stopping_criteria": [lambda *_: 1 / 0]}, 0, ZeroDivisionError),
    ]
    for settings, fails_at, error in cases:
        for call in (model.generate, partial(generate, model)):
            streamer = Recorder(fails_at)
            with pytest.raises(error) if error else nullcontext():
                call(ids, **{"max_new_tokens": 4, "method": "lookup", "streamer": streamer} | settings)
            assert streamer.ends == 1, (settings, call)
