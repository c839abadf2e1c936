"""`generate`: from prompts to tokens, with names as in transformers' own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteria

from longspec.errors import UserError
from longspec.inference.acceptance import Sampler
from longspec.inference.arguments import (
    check_draft_window,
    check_drafting,
    check_rows,
    check_sampling,
    check_stopping,
    check_streamer,
    check_trained,
    end_tokens,
    pad_token,
    prompt_batch,
    prompt_rows,
    seeded_generator,
)
from longspec.inference.cache import Fault
from longspec.inference.capture import capture_round, warm_up
from longspec.inference.engine import Engine, Round
from longspec.inference.methods import AUTO, DEFAULT_SHAPE, make_drafter
from longspec.inference.options import REFUSED, WARPERS, build_warpers, refuse_options
from longspec.inference.runner import make_runner
from longspec.inference.tree_shapes import choose_shape
from longspec.models.glide import GlideMixin, check_pair
from longspec.models.target_files import context_window

Stops = Callable[[int, Sequence[int]], bool]
"""Whether a row (its number, its new tokens) ends here, apart from EOS and its limit."""


Origin = Literal["target", "draft", "lookup"]
"""Where an emitted token comes from: the target itself (a row's first token and each bonus token), or an accepted
proposal of a draft (GLIDE's, or MagicDec's sparse target) or of prompt lookup."""


class Streamer(Protocol):
    """transformers' streamer interface, with an optional third method.

    `put_from(value: Tensor, origin: Origin) -> None`, if there is one, gets each new token in the place of `put`, which
    then gets the prompt only.
    """

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@dataclass
class GenerationStats:
    """Counts over all rows, each while it is unfinished; times in seconds, prefill and its token apart."""

    rounds: int = 0
    """Verification passes, counted for each row."""
    row_rounds: list[int] = field(default_factory=list)
    """The passes of each row."""
    decoded_tokens: int = 0
    """Tokens that verification passes emitted, the bonus tokens included."""
    accepted_by_depth: list[int] = field(default_factory=list)
    """Entry d - 1: passes that emitted at least d draft tokens."""
    ttft_s: float = 0.0
    """Time to first token: prefill, and what recording a round as a graph takes longer than it."""
    decode_s: float = 0.0
    peak_memory_bytes: int = 0
    """Most bytes allocated on the CUDA device during the call; 0 on a CPU."""
    tree_shape: tuple[int, ...] = ()
    """Nodes of each level that a tree was drafted with; empty for other methods."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted by verification passes over passes; nan before the first pass."""
        return self.decoded_tokens / self.rounds if self.rounds else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed over all rows; nan before the first pass."""
        return self.decoded_tokens / self.decode_s if self.decode_s else float("nan")


@dataclass
class GenerationOutput:
    sequences: Tensor
    """LongTensor [B, longest]: prompt without its padding + new tokens, padded right."""
    new_tokens: list[Tensor]
    """A LongTensor a row: the generated tokens up to and with its EOS."""
    stats: GenerationStats


@torch.no_grad()
def generate(
    model: GlideMixin,
    input_ids: Tensor | Mapping[str, Any],
    attention_mask: Tensor | None = None,
    method: str = "tree",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    tree_shape: Sequence[int] | str = DEFAULT_SHAPE,
    gamma: int = 4,
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    pad_token_id: int | None = None,
    seed: int | None = None,
    streamer: Streamer | None = None,
    tree_rule: str = "reject",
    compile: bool = True,
    attention: str = "auto",
    allow_untrained_draft: bool = False,
    stopping_criteria: Sequence[StoppingCriteria] | None = None,
    **options: Any,
) -> GenerationOutput:
    """Continue prompts losslessly: greedy at temperature 0, else samples of the target's own distribution.

    input_ids, attention_mask: LongTensor [B, P], padded left or right as the mask says (all real without one), or a
    tokenizer's output in the place of input_ids.
    method: vanilla, seq, tree (of tree_shape), magicdec or lookup (prompt lookup); all but tree draft chains of gamma.
    seq and tree need a trained draft unless allow_untrained_draft is set.
    tree_shape: nodes of each level, or "auto": the fastest for this model, device and context, measured on these
    prompts before anything is generated, unless it is in the cache (see `tree_shapes.choose_shape`).
    eos_token_id, pad_token_id: None takes the model's own. seed: 0 ... 2^64 - 1; None draws from torch's global
    generator. streamer: gets the prompt [1, P] and then each new token [1] of a single row, on the CPU, as from
    transformers, with its origin if the streamer takes it (see `Streamer`).
    tree_rule, above temperature 0: "reject" (a tree sampled from the draft without replacement, with recursive
    rejection) or "descend" (the draft's most probable tree, as far as the target's own draws lead into it); both are
    exact, the first accepts more.
    compile: on CUDA, fused layers and each round as one CUDA graph; without it transformers' modules, kernel by kernel.
    attention: "auto", "flash", "triton" or "sdpa" (see `kernels.attention.decoding_attention`).
    stopping_criteria: each is called after every new token with the ids [1, length] of one row, its prompt as given
    followed by its new tokens, and with scores None.
    options: transformers' min_p, typical_p and epsilon_cutoff, applied above temperature 0; they default to the model's
    generation config. Every other option that changes the distribution is refused by name, as an argument and in the
    generation config (see `options`).
    Raises UserError (a ValueError) for settings that cannot work, and for logits that are NaN or infinite.
    """
    check_pair(model)
    check_drafting(method, tree_shape, gamma, tree_rule, model.config.vocab_size)
    check_trained(model, method, allow_untrained_draft)
    _check_options(options)
    refuse_options(options, model.generation_config)
    input_ids, attention_mask = prompt_batch(input_ids, attention_mask)
    rows = prompt_rows(input_ids, attention_mask)
    check_sampling(max_new_tokens, temperature, top_p, top_k)
    check_rows(model, rows, max_new_tokens)
    check_streamer(streamer, len(rows))
    check_stopping(stopping_criteria)
    eos_ids = end_tokens(model.generation_config.eos_token_id if eos_token_id is None else eos_token_id)
    pad_id = pad_token(model, pad_token_id)
    check_draft_window(method, tree_shape, gamma, model.draft_model.window)
    extra_warpers = build_warpers(options, model.generation_config)
    runner = make_runner(model, attention, compile)
    device = runner.device
    sampler = Sampler(temperature, top_k, top_p, seeded_generator(seed, device), extra_warpers)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    with torch.cuda.device_of(model.lm_head.weight):  # kernels are launched on the current device
        prompts, lengths = _pad_right(rows, 0).to(device), [len(row) for row in rows]
        if method == "tree" and tree_shape == AUTO:
            limit = context_window(model.config)
            tree_shape = choose_shape(runner, prompts, lengths, sampler, tree_rule, limit)
        shape = tuple(map(int, tree_shape)) if method == "tree" else ()
        drafter = make_drafter(method, runner, len(rows), sampler, shape, gamma, tree_rule)
        engine = Engine(runner, drafter, sampler, prompts, lengths, max_new_tokens)
        stops = _stops(stopping_criteria, input_ids.to(device)) if stopping_criteria else None
        proposed: Origin = "lookup" if method == "lookup" else "draft"
        decoder = Decoder(engine, max_new_tokens, eos_ids, streamer, stops, proposed)
        decoder.stats.tree_shape = shape
        decoder.run()
    new_tokens = [torch.tensor(tokens, dtype=torch.long, device=device) for tokens in decoder.new_tokens]
    whole = [torch.cat([row.to(device), new]) for row, new in zip(rows, new_tokens, strict=True)]
    return GenerationOutput(_pad_right(whole, pad_id), new_tokens, decoder.stats)


class Decoder:
    """The host's side of a generation: which tokens each row has, and when it is finished."""

    def __init__(
        self,
        engine: Engine,
        max_new_tokens: int,
        eos_ids: set[int],
        streamer: Streamer | None,
        stops: Stops | None = None,
        proposed: Origin = "draft",
    ) -> None:
        """proposed: the origin of accepted tokens."""
        self.engine, self.limit, self.eos_ids = engine, max_new_tokens, eos_ids
        self.streamer, self.stops, self.proposed = streamer, stops, proposed
        batch = len(engine.prompts)
        self.new_tokens: list[list[int]] = [[] for _ in range(batch)]
        self.active = [True] * batch
        self.device_active = torch.ones(batch, dtype=torch.bool, device=engine.root.device)
        self.stats = GenerationStats(row_rounds=[0] * batch, accepted_by_depth=[0] * engine.drafter.depth)

    def run(self) -> None:
        device = self.engine.prompts.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if self.engine.runner.capturable:
            warm_up(self.engine)
        start = time.perf_counter()
        first, play_round = self._start()
        self.stats.ttft_s = time.perf_counter() - start
        for row, token in enumerate(first):
            self._emit(row, [token], accepted=0)
        start = time.perf_counter()
        while any(self.active):
            self.note(*play_round(self.device_active))
        self.stats.decode_s = time.perf_counter() - start
        if device.type == "cuda":
            self.stats.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
        if self.streamer is not None:
            self.streamer.end()

    def _start(self) -> tuple[list[int], Round]:
        """Prefill; each row's first token, and what plays a round."""
        first = self.engine.prefill()
        play_round: Round = self.engine.round
        if self.engine.runner.capturable and self.limit > 1:
            play_round = capture_round(self.engine)  # while the device still reads the prompts
        tokens, faults = torch.stack([first, self.engine.cache.faults]).tolist()
        for row, fault in enumerate(faults):
            self._check_fault(row, fault)
        return tokens, play_round

    def note(self, tokens: Tensor, counts: Tensor) -> None:
        """Take in what a round emitted: the one place where the host waits for it."""
        result = torch.cat([tokens, counts[:, None], self.engine.cache.faults[:, None]], 1).tolist()
        for row, (*row_tokens, count, fault) in enumerate(result):
            if self.active[row]:
                self._check_fault(row, fault)
                emitted = self._emit(row, row_tokens[:count], accepted=count - 1)
                self.stats.rounds += 1
                self.stats.row_rounds[row] += 1
                self.stats.decoded_tokens += emitted
                for depth in range(min(emitted, count - 1)):
                    self.stats.accepted_by_depth[depth] += 1

    def _check_fault(self, row: int, fault: int) -> None:
        """Raise UserError for a row whose last pass read logits that define no distribution."""
        if fault:
            position = self.engine.prompt_lengths[row] + len(self.new_tokens[row]) - 1
            raise UserError(
                f"row {row}, position {position}: the {Fault(fault).name.lower()}'s logits are NaN or infinite at "
                f"temperature {self.engine.sampler.temperature:g}; check its weights and its dtype"
            )

    def _emit(self, row: int, tokens: Sequence[int], accepted: int) -> int:
        """Append `tokens`, the first `accepted` of them proposed ones, to a row up to its end; the number taken."""
        new_tokens = self.new_tokens[row]
        for taken, token in enumerate(tokens, start=1):
            new_tokens.append(token)
            self._stream(token, self.proposed if taken <= accepted else "target")
            is_last = len(new_tokens) == self.limit or token in self.eos_ids
            if is_last or (self.stops is not None and self.stops(row, new_tokens)):
                self.active[row] = False
                self.device_active[row] = False
                return taken
        return len(tokens)

    def _stream(self, token: int, origin: Origin) -> None:
        if self.streamer is None:
            return
        if put_from := getattr(self.streamer, "put_from", None):
            put_from(torch.tensor([token]), origin)
        else:
            self.streamer.put(torch.tensor([token]))


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in REFUSED and name not in WARPERS and name != "token_type_ids":  # some tokenizers return these
            raise UserError(f"{name}: no argument of longspec.generate; model.generate takes those of transformers")


def _stops(criteria: Sequence[StoppingCriteria], input_ids: Tensor) -> Stops:
    """Calls each criterion on a single row: its ids as given, and its new tokens."""

    def stops(row: int, new_tokens: Sequence[int]) -> bool:
        ids = torch.cat([input_ids[row], input_ids.new_tensor(new_tokens)])[None]
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in criteria)  # type: ignore[arg-type]

    return stops


def _pad_right(rows: Sequence[Tensor], pad_id: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad_id)
