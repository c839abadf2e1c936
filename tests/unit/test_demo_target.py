"""The demo's target is trained as its settings say."""

import torch
from pairs import tiny_config
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaForCausalLM

from scripts.demo.target import TargetSettings, schedule_of_batches, shuffled
from scripts.pipeline.target_model import MuonWithAdamW, warm_up_hold_decay


def test_the_schedule_reaches_both_optimizers_after_the_groups_were_replaced() -> None:
    """accelerate loads the state into a prepared optimizer, which gives it new groups."""
    model = LlamaForCausalLM(tiny_config("llama"))
    optimizer = MuonWithAdamW(model, matrix_lr=0.01, embedding_lr=0.1, momentum=0.9)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.load_state_dict(optimizer.state_dict())
    for step in range(3):
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.01 * 0.5**step, 0.1 * 0.5**step]
        assert all(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_every_weight_has_exactly_one_optimizer_and_muon_the_layers_matrices() -> None:
    model = LlamaForCausalLM(tiny_config("llama"))
    muon, adamw = MuonWithAdamW(model, matrix_lr=0.01, embedding_lr=0.1, momentum=0.9).parts
    names = {id(weight): name for name, weight in model.named_parameters()}
    of_muon, of_adamw = (
        {names[id(weight)] for group in part.param_groups for weight in group["params"]} for part in (muon, adamw)
    )
    assert of_muon | of_adamw == set(names.values())
    assert not of_muon & of_adamw
    assert {name.split(".")[-2] for name in of_muon} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


def test_batches_go_from_short_rows_to_long_ones_and_share_a_step_among_the_ranks() -> None:
    settings = TargetSettings(steps=10, tokens_a_step=64, long_share=0.3)
    short, long = torch.arange(40 * 8).view(40, 8), torch.arange(20 * 16).view(20, 16)
    batches = schedule_of_batches(short, long, settings, ranks=2)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(4, 8)] * 14 + [(2, 16)] * 6
    seen = torch.cat([batch["input_ids"] for batch in batches[:10]])
    assert len(seen.unique(dim=0)) == 40  # all rows once before any comes again


def test_shuffled_goes_on_without_end() -> None:
    batches = shuffled(torch.arange(5)[:, None], 3, torch.Generator().manual_seed(0))
    drawn = torch.cat([next(batches) for _ in range(5)])
    assert drawn.flatten().bincount().tolist() == [3] * 5


def test_learning_rate_rises_holds_and_falls_to_nothing() -> None:
    factors = [warm_up_hold_decay(step, 4, step / 200) for step in range(200)]
    assert 0 < factors[0] < 1
    assert factors[10:100] == [1.0] * 90
    assert factors[100:] == sorted(factors[100:], reverse=True)
    assert 0 < factors[-1] < 0.02
