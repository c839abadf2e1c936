"""Generations whose target the ranks share, compared with those of one process. A run script for forked ranks.

Arguments: the folder of `write_pairs`. Rank 0 makes the calls twice, alone and with the others, and compares.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from pairs import padded

from longspec.errors import UserError
from longspec.inference import generate as generate_module
from longspec.inference import process_group
from longspec.inference.answering import Conversation
from longspec.inference.arguments import checked_drafting
from longspec.inference.engine import intake, request_engine
from longspec.inference.engine.batch import Batch
from longspec.inference.engine.request_engine import EngineSettings, RequestEngine
from longspec.inference.engine.requests import Request
from longspec.inference.fused_runner import FusedRunner, make_runner
from longspec.inference.load_pair import load_model
from longspec.inference.methods import AUTO, METHODS, Drafting
from longspec.inference.process_group import shared_target
from longspec.inference.request import Sampling
from longspec.inference.runner import Runner
from longspec.kernels.backend import Backend
from longspec.kernels.torch.attention import DecodingAttention
from longspec.kernels.triton.backend import TritonBackend
from longspec.models.fused import can_fuse
from longspec.models.glide import GlideMixin
from longspec.models.parallel import model_parallel_rank_and_size
from longspec.ranks.agreement import launched_ranks
from longspec.signals import StopSignals

PROMPTS = [[5, 9, 2, 7, 7, 1, 30, 12, 9], [3, 8, 3, 8], [11, 4, 6, 2, 19, 23, 40, 2, 7, 1, 30, 5, 17]]
SAMPLED: dict[str, dict[str, Any]] = {
    "seq": {"temperature": 1.0},
    "tree": {"temperature": 0.8, "top_p": 0.9},
    "tree, descend": {"temperature": 1.2, "tree_rule": "descend", "top_k": 20},
    "lookup": {"temperature": 0.7, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}
"""Settings of the sampled generations by label, which starts with the method."""
ENGINE_FAMILY = "qwen2"
SMALL_WINDOW = 8
FAULTY_SEED = 13
"""Rank 1 draws other numbers for this seed."""


class InterpretedBackend(Backend):
    """The layers of `TritonBackend`, and torch for all else, because the interpreter is slow."""

    name = "interpreted"

    embed = staticmethod(TritonBackend.embed)
    linear = staticmethod(TritonBackend.linear)
    stream = staticmethod(TritonBackend.stream)


class Collector:
    """A streamer that keeps what it receives."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def outcome(model: GlideMixin, prompts: list[list[int]], **settings: Any) -> tuple[Any, ...]:
    """New tokens, rounds per row and accepted tokens by depth of a generation."""
    settings = {"tree_shape": (3, 4, 2), "gamma": 3, "max_new_tokens": 12} | settings
    ids, mask = padded([torch.tensor(prompt) for prompt in prompts])
    output = generate_module.generate(model, ids, mask, allow_untrained_draft=True, **settings)
    stats = output.stats
    return [row.tolist() for row in output.new_tokens], stats.row_rounds, stats.accepted_by_depth


def answers(model: GlideMixin, method: str) -> list[list[int]]:
    """The engine's answers to the prompts and a sampled one, on two rows, one after a prefix of another."""
    drafting = checked_drafting(model, Drafting(method, (3, 4)), allow_untrained_draft=True)
    engine = RequestEngine(model, EngineSettings(drafting, 2, memory=2**27, prefill_chunk=8))
    engine.prepare()
    tokens: list[list[int]] = [[] for _ in range(5)]
    sampled = Sampling(1.0, min_p=0.05, seed=3) if method == "tree" else Sampling(frequency_penalty=1.0)
    requests = [Request(prompt, 12) for prompt in (*PROMPTS, PROMPTS[0] * 2)] + [Request([7, 7], 9, sampled)]
    for own, request in zip(tokens, requests, strict=True):
        engine.add(request, lambda event, own=own: own.extend(getattr(event, "ids", ())))
    while engine.step():
        pass
    engine.close()
    return tokens


def conversation(model: GlideMixin) -> list[list[int]]:
    """Answers of which the second goes on with the text of the first, and the third needs a larger row."""
    talk, text, answers = Conversation(model, Drafting("tree", (3, 4)), "auto"), list[int](), list[list[int]]()
    for new in (*PROMPTS[:2], PROMPTS[2] * 40):
        text, answers = text + new, [*answers, []]
        talk.answer(Request(text, 12), lambda number, event, own=answers[-1]: own.extend(event.ids))
        text += answers[-1]
    talk.close()
    return answers


def outcomes(work: Path, families: list[str], target: str) -> dict[str, Any]:
    """Greedy generations of each family. Those with "auto" and with the engine take long, so one family has them."""
    found: dict[str, Any] = {}
    for family in families:
        model = load_model(str(work / family / target), str(work / family / "draft.pth"), torch.float32, CPU)
        # A token of the middle row's answer ends it while the others go on.
        (answer,), *_ = outcome(model, PROMPTS[1:2], method="vanilla", max_new_tokens=5)
        if family == ENGINE_FAMILY:
            # Its plans depend on measured times, its tokens do not.
            found[f"{family} auto"] = outcome(model, PROMPTS, method=AUTO, eos_token_id=answer[-1])[0]
            found[f"{family} conversation"] = conversation(model)
            found[f"{family} requests"] = [answers(model, method) for method in ("tree", AUTO)]
        for method in METHODS:
            found[f"{family} {method}"] = outcome(model, PROMPTS, method=method, eos_token_id=answer[-1])
        streamer = Collector()
        outcome(model, PROMPTS[:1], method="lookup", max_new_tokens=5, streamer=streamer)
        found[f"{family} streamed"] = streamer.tokens
    return found


def sampled(work: Path, family: str, target: str) -> dict[str, Any]:
    model = load_model(str(work / family / target), str(work / family / "draft.pth"), torch.float64, CPU)
    found = {}
    for number, (label, settings) in enumerate(SAMPLED.items()):
        found[label] = outcome(model, PROMPTS, method=label.split(",")[0], seed=number, **settings)
    # Without a seed, rank 0's global generator decides.
    torch.manual_seed(3)
    outcome(model, PROMPTS, method="seq", temperature=1.0, max_new_tokens=5)
    return found


def choose_runner(model: GlideMixin, attention: str, compiled: bool) -> Runner:
    """Fused passes on the kernels for the shared pair with a small window, because the interpreter is slow."""
    is_shared = model_parallel_rank_and_size()[1] > 1
    if is_shared and model.draft_model.window == SMALL_WINDOW:
        return FusedRunner(model, InterpretedBackend(DecodingAttention()))
    return make_runner(model, attention, compiled)


def fused(work: Path, target: str) -> dict[str, Any]:
    model = load_model(str(work / "fused" / target), str(work / "fused" / "draft.pth"), torch.float32, CPU)
    assert can_fuse(model)
    return {"fused": outcome(model, PROMPTS[1:2], method="tree", tree_shape=(2,), max_new_tokens=2)}


def plant_fault() -> None:
    """Let this rank draw other numbers than the others for FAULTY_SEED."""
    assign = Batch.assign

    def faulty(self: Batch, rows: Any, lengths: Any, samplings: Any, seeds: list[int], speculates: Any) -> None:
        seeds = [FAULTY_SEED + 1] * len(rows) if seeds[0] == FAULTY_SEED else seeds
        assign(self, rows, lengths, samplings, seeds, speculates)

    Batch.assign = faulty  # type: ignore[method-assign]


def check_disagreement(work: Path, family: str) -> None:
    """It is reported by the round in which it happens, and the ranks go on with the next call."""
    model = load_model(str(work / family / "split"), str(work / family / "draft.pth"), torch.float32, CPU)
    settings = {"method": "vanilla", "temperature": 1.5, "max_new_tokens": 40}
    try:
        outcome(model, PROMPTS, seed=FAULTY_SEED, **settings)
        raise AssertionError("the ranks drew different tokens, and no error")
    except UserError as error:
        assert "the ranks that share the target disagree" in str(error), error
    outcome(model, PROMPTS, seed=FAULTY_SEED - 1, **settings)


CPU = torch.device("cpu")

if __name__ == "__main__":
    torch.set_num_threads(1)
    work, ranks, families = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    request_engine.make_runner = choose_runner
    intake.PREFILL_TOKENS = 15  # several chunks
    process_group.MESSAGE_BYTES = 300  # long messages
    alone: dict[str, Any] = {}
    if launched_ranks()[0] == 0:
        alone = outcomes(work, families, "target") | sampled(work, families[0], "target")
        alone |= fused(work, "target")
    elif launched_ranks()[0] == 1:
        plant_fault()
    with StopSignals(at_once=True) as stop, shared_target(ranks, "cpu", stop):
        # Half of the targets are cut while they are read.
        shared = outcomes(work, families[::2], "split") | outcomes(work, families[1::2], "target")
        shared |= sampled(work, families[0], "split")
        shared |= fused(work, "target")
        check_disagreement(work, families[0])
    assert shared == alone, {name: (alone[name], shared[name]) for name in alone if alone[name] != shared[name]}
    print(f"{len(shared)} generations are the same")
