"""`generate`: from prompts to tokens, with names as in transformers' own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from longspec.errors import UserError
from longspec.inference.acceptance import Sampler
from longspec.inference.capture import capture_round, warm_up
from longspec.inference.engine import Engine, Round
from longspec.inference.methods import METHODS, TREE_RULES, make_drafter
from longspec.inference.runner import make_runner
from longspec.inference.tree_shapes import AUTO, DEFAULT_SHAPE, choose_shape
from longspec.models.glide import GlideMixin
from longspec.models.target_files import context_window


class Streamer(Protocol):
    """transformers' streamer interface."""

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
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    method: str = "tree",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    tree_shape: Sequence[int] | str = DEFAULT_SHAPE,
    gamma: int = 4,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    seed: int | None = None,
    streamer: Streamer | None = None,
    tree_rule: str = "reject",
    compile: bool = True,
    attention: str = "auto",
) -> GenerationOutput:
    """Continue prompts losslessly: greedy at temperature 0, else samples of the target's own distribution.

    input_ids, attention_mask: LongTensor [B, P], padded left or right as the mask says (all real without one).
    method: vanilla, seq, tree (of tree_shape), magicdec or lookup (prompt lookup); all but tree draft chains of gamma.
    tree_shape: nodes of each level, or "auto": the fastest for this model, device and context, measured on these
    prompts before anything is generated, unless it is in the cache (see `tree_shapes.choose_shape`).
    eos_token_id, pad_token_id: None takes the model's own. streamer: gets the new tokens of a single row as they
    come, on the CPU, and not the prompt. seed: None draws from torch's global generator. tree_rule, above temperature
    0: "reject" (a tree sampled from the draft without replacement, with recursive rejection) or "descend" (the draft's
    most probable tree, as far as the target's own draws lead into it); both are exact, the first accepts more.
    compile: on CUDA, fused layers and each round as one CUDA graph; without it transformers' modules, kernel by kernel.
    attention: "auto", "flash", "triton" or "sdpa" (see `kernels.attention.decoding_attention`).
    Raises UserError (a ValueError) for settings that cannot work.
    """
    rows = _prompt_rows(input_ids, attention_mask)
    check_drafting(method, tree_shape, gamma, tree_rule, model.config.vocab_size)
    check_sampling(max_new_tokens, temperature, top_p, top_k)
    _check_rows(model, rows, max_new_tokens)
    if streamer is not None and len(rows) > 1:
        raise UserError(f"streamer: batch of {len(rows)}; streaming takes a single prompt")
    runner = make_runner(model, attention, compile)
    device = runner.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    sampler = Sampler(temperature, top_k, top_p, generator)
    with torch.cuda.device_of(model.lm_head.weight):  # kernels are launched on the current device
        prompts, lengths = _pad_right(rows, 0).to(device), [len(row) for row in rows]
        if method == "tree" and tree_shape == AUTO:
            limit = context_window(model.config)
            tree_shape = choose_shape(runner, prompts, lengths, sampler, tree_rule, limit)
        shape = tuple(map(int, tree_shape)) if method == "tree" else ()
        drafter = make_drafter(method, runner, len(rows), sampler, shape, gamma, tree_rule)
        engine = Engine(runner, drafter, sampler, prompts, lengths, max_new_tokens)
        decoder = Decoder(engine, max_new_tokens, _eos_ids(model, eos_token_id), streamer)
        decoder.stats.tree_shape = shape
        decoder.run()
    new_tokens = [torch.tensor(tokens, dtype=torch.long, device=device) for tokens in decoder.new_tokens]
    whole = [torch.cat([row.to(device), new]) for row, new in zip(rows, new_tokens, strict=True)]
    return GenerationOutput(_pad_right(whole, _pad_id(model, pad_token_id)), new_tokens, decoder.stats)


class Decoder:
    """The host's side of a generation: which tokens each row has, and when it is finished."""

    def __init__(self, engine: Engine, max_new_tokens: int, eos_ids: set[int], streamer: Streamer | None) -> None:
        self.engine, self.limit, self.eos_ids, self.streamer = engine, max_new_tokens, eos_ids, streamer
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
            self._emit(row, [token])
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
        if not self.engine.runner.capturable or self.limit == 1:
            return first.tolist(), self.engine.round
        captured = capture_round(self.engine)  # while the device still reads the prompts
        return first.tolist(), captured

    def note(self, tokens: Tensor, counts: Tensor) -> None:
        """Take in what a round emitted: the one place where the host waits for it."""
        for row, (*row_tokens, count) in enumerate(torch.cat([tokens, counts[:, None]], 1).tolist()):
            if self.active[row]:
                emitted = self._emit(row, row_tokens[:count])
                self.stats.rounds += 1
                self.stats.row_rounds[row] += 1
                self.stats.decoded_tokens += emitted
                for depth in range(min(emitted, count - 1)):
                    self.stats.accepted_by_depth[depth] += 1

    def _emit(self, row: int, tokens: list[int]) -> int:
        """Append `tokens` to a row up to its EOS or limit; how many were taken."""
        tokens = tokens[: self.limit - len(self.new_tokens[row])]
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos_ids), None)
        tokens = tokens[:end]
        self.new_tokens[row] += tokens
        if end is not None or len(self.new_tokens[row]) == self.limit:
            self.active[row] = False
            self.device_active[row] = False
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens))
        return len(tokens)


def _prompt_rows(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Each prompt without its padding."""
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise UserError(f"input_ids: shape {tuple(input_ids.shape)}; give token ids [batch, length], none empty")
    if attention_mask is None:
        return list(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise UserError(
            f"attention_mask: shape {tuple(attention_mask.shape)} is not that of input_ids {tuple(input_ids.shape)}"
        )
    rows = [ids[keep] for ids, keep in zip(input_ids, attention_mask.bool().to(input_ids.device), strict=True)]
    if empty := [row for row, ids in enumerate(rows) if len(ids) == 0]:
        raise UserError(f"attention_mask: row {empty[0]} has no real token; a prompt needs at least one")
    return rows


def check_drafting(method: str, tree_shape: Sequence[int] | str, gamma: int, tree_rule: str, vocab_size: int) -> None:
    """Raise UserError for an unknown method or tree rule, or a tree shape or gamma that cannot be drafted."""
    for name, value, known in (("method", method, METHODS), ("tree_rule", tree_rule, TREE_RULES)):
        if value not in known:
            raise UserError(f"{name}: {value!r} is unknown; choose one of {', '.join(known)}")
    if method == "tree" and tree_shape != AUTO:
        _check_tree_shape(tree_shape, vocab_size)
    if method in ("seq", "magicdec", "lookup") and gamma < 1:
        raise UserError(f"gamma: {gamma}; a chain needs at least 1 token")


def _check_tree_shape(tree_shape: Sequence[int] | str, vocab_size: int) -> None:
    if isinstance(tree_shape, str) or AUTO in tree_shape:
        raise UserError(f"tree_shape: {tree_shape!r}; give the nodes of each level, as in 4 16 16 16 16, or {AUTO!r}")
    if not tree_shape:
        raise UserError("tree_shape: empty; give the number of nodes of each level, as in 4 16 16 16 16")
    if not all(1 <= width <= vocab_size for width in tree_shape):
        raise UserError(f"tree_shape: {list(tree_shape)}; each level needs 1 … {vocab_size} (vocabulary) nodes")


def check_sampling(max_new_tokens: int, temperature: float, top_p: float, top_k: int) -> None:
    """Raise UserError for sampling settings outside their range."""
    for name, value, fits, wanted in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("temperature", temperature, temperature >= 0, "0 (greedy) or more"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("top_k", top_k, top_k >= 0, "0 (off) or more"),
    ):
        if not fits:
            raise UserError(f"{name}: {value}; it must be {wanted}")


def _check_rows(model: GlideMixin, rows: list[Tensor], max_new_tokens: int) -> None:
    vocab_size = model.config.vocab_size
    for token in (min(int(row.min()) for row in rows), max(int(row.max()) for row in rows)):
        if not 0 <= token < vocab_size:
            raise UserError(f"input_ids: token id {token}, the target has {vocab_size}; use the target's own tokenizer")
    longest, limit = max(len(row) for row in rows), context_window(model.config)
    if longest + max_new_tokens > limit:
        raise UserError(
            f"prompt of {longest} tokens + max_new_tokens {max_new_tokens}: more than the target's {limit} positions"
        )


def _eos_ids(model: GlideMixin, eos_token_id: int | Sequence[int] | None) -> set[int]:
    ids = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)


def _pad_id(model: GlideMixin, pad_token_id: int | None) -> int:
    for candidate in (pad_token_id, model.generation_config.pad_token_id, model.config.pad_token_id):
        if candidate is not None:
            return candidate
    return 0


def _pad_right(rows: Sequence[Tensor], pad_id: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad_id)
