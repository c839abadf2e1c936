"""Streamers get what transformers sends them, and end once; an exception in one changes nothing."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import make_pair, target_greedy
from test_generate import SETTINGS, prompts
from test_transformers_api import padded_prompts
from torch import Tensor
from transformers import GenerationMixin

from longspec import generate
from longspec.errors import UserError


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu" and not self.ended
        self.values.append(value)

    def end(self) -> None:
        self.ended = True


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("method", ["tree", "magicdec"])
def test_a_streamer_gets_what_transformers_sends(tmp_path: Path, method: str) -> None:
    """The prompt, then each new token: the same values and shapes in the same order."""
    model = make_pair(tmp_path)
    (row,) = prompts(8)
    eos = target_greedy(model, row, 12)[7]
    mine, theirs = Recorder(), Recorder()
    generate(model, row[None], method=method, max_new_tokens=12, eos_token_id=eos, streamer=mine, **SETTINGS)
    GenerationMixin.generate(model, row[None], max_new_tokens=12, eos_token_id=eos, streamer=theirs)
    assert mine.ended and len(mine.values) == len(theirs.values) > 2
    assert all(torch.equal(one, other) for one, other in zip(mine.values, theirs.values, strict=True))


class Breaks(Recorder):
    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.values) > 4:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("ahead")
def test_an_exception_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = make_pair(tmp_path)
    model.train()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    grads = [parameter.requires_grad for parameter in model.parameters()]
    (row,) = prompts(8)
    expected = target_greedy(model, row, 12)
    breaks = Breaks()
    with pytest.raises(KeyboardInterrupt):
        generate(model, row[None], max_new_tokens=12, streamer=breaks, **SETTINGS)
    assert [int(value) for value in breaks.values[1:]] == expected[:4]
    assert torch.is_grad_enabled() and model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == grads
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation_config)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert generate(model, row[None], max_new_tokens=12, **SETTINGS).new_tokens[0].tolist() == expected


class Ends:
    """A streamer that counts its ends, and fails at its n-th value."""

    def __init__(self, fails_at: int) -> None:
        self.left, self.ends = fails_at, 0

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.ends += 1


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
            streamer = Ends(fails_at)
            with pytest.raises(error) if error else nullcontext():
                call(ids, **{"max_new_tokens": 4, "method": "lookup", "streamer": streamer} | settings)
            assert streamer.ends == 1, (settings, call)
