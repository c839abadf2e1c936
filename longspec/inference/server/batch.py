"""The device's side of serving: a static number of rows, prefill of one of them, and rounds over the first n."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspec.inference.adaptive.measurement import measure_times
from longspec.inference.adaptive.plan_drafters import PlanDrafters, served_plans
from longspec.inference.adaptive.plans import Plan
from longspec.inference.adaptive.time_cache import RoundTimes, cache_file, cache_key, load_times, store_times
from longspec.inference.cache import Fault, TargetCache
from longspec.inference.capture import CapturedRound, warm_up
from longspec.inference.drafting.chain import NoDraft
from longspec.inference.drafting.proposal import Drafter
from longspec.inference.engine import Round
from longspec.inference.methods import AUTO, make_drafter
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler
from longspec.inference.server.draft_starter import DraftStarter
from longspec.inference.server.logprobs import scores
from longspec.inference.server.prompt_reader import PromptReader
from longspec.inference.server.requests import Sampling
from longspec.inference.server.row_rounds import RowRounds
from longspec.inference.server.row_sampling import Purpose, RowSampler, RowSettings
from longspec.inference.server.selective import SelectiveDrafter
from longspec.kernels.shared.device import upload

PREFILL_CHUNK = 1024
"""Most prompt tokens that are read between two rounds, by default."""
EXCHANGED_BYTES = 2**26
"""Most bytes that an exchange of two rows copies at a time, unless a single layer has more."""
SCORED_BYTES = 2**26
"""Most bytes of log-probabilities that `score` computes at a time, unless a single token has more."""
MOST_MEASURED_ON_CPU = 4
"""Largest batch whose rounds are measured on a CPU, where a round takes long."""
Sampled = Literal["greedy", "sampled", "truncated"]
"""Sampling of a round: all rows greedy; some at a temperature; some with top-k or top-p."""


class Mode(NamedTuple):
    """The rounds of one mode launch the same kernels."""

    speculates: bool
    """Whether any row speculates."""
    sampled: Sampled
    plan: Plan | None = None
    """The plan of method "auto", if any row speculates."""
    scores: bool = False
    """Whether rounds report `logprobs.scores`. They are not captured, because few requests ask for it."""


@dataclass(frozen=True)
class Method:
    """Drafting settings of all rows, as in `longspec.generate`."""

    name: str
    tree_shape: tuple[int, ...]
    gamma: int
    tree_rule: str
    tree_nodes: int | None = None
    lookup_branches: bool = False
    has_draft: bool = True
    """Whether method "auto" plays trees."""


class Batch:
    """Cache, draft state and sampling settings of `max_rows` rows, which rounds change in place.

    Rounds run over the first n rows. The captured ones exist for n = 1, 2, 4, ... and `max_rows`.
    """

    def __init__(
        self, runner: Runner, method: Method, max_rows: int, capacity: int, prefill_chunk: int = PREFILL_CHUNK
    ) -> None:
        """capacity: slots per row of the target's cache. prefill_chunk: most prompt tokens of a pass."""
        self.runner = runner
        self.vocab = runner.config.vocab_size
        self.device = runner.device
        self.capacity = capacity
        self.max_rows = max_rows
        self.cache = TargetCache(runner.config, max_rows, capacity, runner.dtype, runner.device)
        self.reader = PromptReader(runner, self.cache, prefill_chunk)
        self.root = torch.zeros(max_rows, dtype=torch.long, device=runner.device)
        self.active = torch.zeros(max_rows, dtype=torch.bool, device=runner.device)
        """bool [B]: the rows that rounds advance."""
        self.speculates = torch.zeros_like(self.active)
        """bool [B]: the rows whose proposals count."""
        self.settings = RowSettings.allocate(self.cache.lengths, self.vocab)
        self.sizes = _sizes(max_rows) if runner.capturable else list(range(1, max_rows + 1))
        runner.prepare(capacity)
        drafter = _drafter(runner, method, max_rows)
        drafter.reserve(capacity)
        self.starter = DraftStarter(drafter, max_rows, capacity, GREEDY, runner.device)
        self.tree_shape = method.tree_shape
        self.plans = drafter.plans if isinstance(drafter, PlanDrafters) else ()
        """The plans of method "auto"; empty for other methods."""
        self.times: dict[int, RoundTimes] = {}
        """Times of the plans' rounds at the smallest and the largest measured size."""
        all_rows = slice(0, max_rows)
        sampled = drafter.share(all_rows, self._sampler("sampled", Purpose.DRAFT, all_rows))
        truncated = sampled.share(all_rows, self._sampler("truncated", Purpose.DRAFT, all_rows))
        self.drafters = {"greedy": drafter, "sampled": sampled, "truncated": truncated}
        self._rounds: dict[tuple[Mode, int], Round] = {}

    @property
    def nodes(self) -> int:
        """Tokens that a round reads per row."""
        return self.drafters["greedy"].nodes

    @property
    def depth(self) -> int:
        return self.drafters["greedy"].depth

    def size_for(self, rows: int) -> int:
        """The smallest size of a round that covers the first `rows` rows."""
        return next(size for size in self.sizes if size >= rows)

    def capture(self) -> None:
        """Prepare prefill and the rounds of every mode and size, if they are captured, and measure the plans of "auto".

        The cache must be empty.
        """
        self.reader.capture()
        if self.runner.capturable:
            self.starter.capture()
            for size in reversed(self.sizes):  # the largest first: the others fit into its memory
                for sampled in self.drafters:
                    for plan in reversed(self.plans or (None,)):
                        if self.depth:
                            self.rounds(Mode(True, sampled, plan), size)  # type: ignore[arg-type]
                    self.rounds(Mode(False, sampled), size)  # type: ignore[arg-type]
        if self.plans:
            most = self.max_rows if self.runner.capturable else min(self.max_rows, MOST_MEASURED_ON_CPU)
            for size in sorted({1, most}):
                self.times[size] = self._measured_times(size)

    def round_time(self, plan: Plan, read: int, size: int) -> float:
        """The time of a round of the first `size` rows that reads `read` prefix slots, in seconds."""
        # Linear in the number of rows between the two sizes that were measured.
        low, high = min(self.times), max(self.times)
        at_low, at_high = (self.times[rows](plan, read / size) for rows in (low, high))
        return at_low if low == high else at_low + max(at_high - at_low, 0.0) * (size - low) / (high - low)

    def _measured_times(self, size: int) -> RoundTimes:
        """Times of the greedy rounds of all plans, from the cache if it has them."""
        room = self.capacity - self.depth - 1 - self.nodes
        # Rounds of a server also gather log-probabilities and traces, so `generate`'s times are not theirs.
        key = cache_key(self.runner, self.plans, (self.tree_shape, "server"), GREEDY, size, room)
        path = cache_file(key)
        times = load_times(path, self.plans)
        if times is None:
            rounds = {plan: self.rounds(Mode(True, "greedy", plan), size) for plan in self.plans}
            drafters = self.drafters["greedy"].share(slice(0, size), GREEDY)
            assert isinstance(drafters, PlanDrafters)
            state = self._new_rounds(Mode(False, "greedy"), slice(0, size))
            times = measure_times(state, rounds, lambda: drafters.refill(state.cache.lengths), room)
            store_times(path, key, times)
        return times

    def rounds(self, mode: Mode, rows: int) -> Round:
        """Plays rounds of the first `rows` rows, one of `sizes`; see `RowRounds.round`."""
        key = (mode, rows)
        if key not in self._rounds:
            rounds = self._new_rounds(mode, slice(0, rows))
            if self.runner.capturable and not mode.scores:
                warm_up(rounds)
                self._rounds[key] = CapturedRound(rounds)
            else:
                self._rounds[key] = rounds.round
        return self._rounds[key]

    def _new_rounds(self, mode: Mode, rows: slice) -> RowRounds:
        drafting = self._sampler(mode.sampled, Purpose.DRAFT, rows)
        verifying = self._sampler(mode.sampled, Purpose.VERIFY, rows)
        drafter: Drafter = NoDraft()
        if mode.speculates:
            drafter = self.drafters[mode.sampled].share(rows, drafting)
            if isinstance(drafter, PlanDrafters):
                assert mode.plan is not None
                drafter = drafter.drafter(mode.plan)
        selective = SelectiveDrafter(drafter, self.speculates[rows])
        rounds = RowRounds(self.runner, selective, verifying, self.cache.narrow(rows), self.root[rows])
        rounds.samplers = (drafting, verifying)
        rounds.reports_scores = mode.scores
        rounds.reports_ranks = mode.plan is not None and mode.plan.kind == "tree"
        return rounds

    def _sampler(self, sampled: Sampled, purpose: Purpose, rows: slice) -> Sampler:
        if sampled == "greedy":
            return GREEDY
        return RowSampler(self.settings.narrow(rows), sampled == "truncated", purpose)

    def read_prompt(self, row: int, tokens: Tensor, start: int) -> Tensor:
        """Read tokens [1, n] at positions start, start + 1, ... of a row; the hidden state [1, 1, hidden] at the last.

        The cache must hold the positions before `start`.
        """
        return self.reader.read(row, tokens, start)

    def score(self, hidden: Tensor, tokens: Tensor) -> list[list[float]]:
        """`logprobs.scores` of tokens [1, n] that follow hidden states [1, n, hidden], per token. Waits for the device.

        Raises ValueError for logits that are NaN.
        """
        lines: list[list[float]] = []
        step = max(1, SCORED_BYTES // (self.vocab * torch.float32.itemsize))
        for part, targets in zip(hidden.split(step, 1), tokens.split(step, 1), strict=True):
            found = scores(self.runner.logits(part), targets)[0].cpu()
            if found.isnan().any():
                raise ValueError("the target's logits are NaN or infinite")
            lines += found.tolist()
        return lines

    def first_token(self, row: int, prompt: Tensor, last_hidden: Tensor, sampled: Sampled) -> tuple[int, float, int]:
        """Choose the first token of an answer, which becomes the root; prompt: [1, P], its length that of the row.

        Returns the token, its log-probability at temperature 1, and the row's fault. Waits for the device.
        """
        rows = slice(row, row + 1)
        cache = self.cache.narrow(rows)
        cache.faults.zero_()
        logits = self.runner.logits(last_hidden)[:, 0]
        token = self._sampler(sampled, Purpose.FIRST, rows).choose(logits, cache.watch(Fault.TARGET))
        self.root[rows] = token
        if self.drafters["greedy"].reads_hidden:
            cache.newest_hidden.copy_(last_hidden)
        self.starter.start(row, prompt)
        # One transfer for all that the host reads.
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)[0, token]
        chosen, log_probability, fault = torch.cat([token.double(), log_p.double(), cache.faults.double()]).tolist()
        return int(chosen), log_probability, int(fault)

    def refill_draft(self, row: int) -> None:
        """Fill the draft's ring in a row that played plans without the draft."""
        drafter = self.starter.drafters[row]
        assert isinstance(drafter, PlanDrafters)
        drafter.refill(self.cache.lengths[row : row + 1])

    def upload(self, tokens: np.ndarray) -> Tensor:
        """Tokens, int64 [n], as LongTensor [1, n] on the device."""
        return upload(torch.from_numpy(tokens)[None], self.device)

    def assign(self, row: int, sampling: Sampling, seed: int, speculates: bool) -> None:
        """Set the sampling settings of a row."""
        self.settings.assign(row, sampling, seed, self.vocab)
        self.speculates[row] = speculates

    def set_length(self, row: int, length: int) -> None:
        self.cache.lengths[row] = length

    def end(self, row: int, length: int) -> None:
        """Take a row out of the rounds. Of what it holds, the first `length` slots stay.

        A round in flight may move the length on and store more, NaN among it. Later rounds need the slots after the
        length for their nodes, and masked slots must be finite.
        """
        self.active[row] = False
        self.cache.lengths[row] = length
        stored = slice(length, length + self.nodes)
        self.cache.keys[:, row, :, stored].zero_()
        self.cache.values[:, row, :, stored].zero_()

    def clear(self, row: int) -> None:
        """Zero the keys and values of a row. Masked slots must be finite, and those of a faulty request may be NaN."""
        self.cache.keys[:, row].zero_()
        self.cache.values[:, row].zero_()

    def copy_prefix(self, source: int, row: int, length: int) -> None:
        """Copy the keys and values of the first `length` slots of row `source` to another row."""
        for store in (self.cache.keys, self.cache.values):
            store[:, row, :, :length] = store[:, source, :, :length]

    def move(self, a: int, b: int, length: int) -> None:
        """Move row a, which runs, to row b, which does not run and goes to row a. length: tokens of the longer one."""
        cache, settings = self.cache, self.settings
        for store in (cache.keys, cache.values):
            used = store[:, :, :, :length]
            # Few layers at a time, because an exchange copies one side.
            for layers in used.split(max(1, EXCHANGED_BYTES // used[0, 0].nbytes)):
                _exchange(layers[:, a], layers[:, b])
        for state in self.drafters["greedy"].row_states():
            state[b] = state[a]  # row b has no draft yet
        states = (cache.lengths, cache.newest_hidden, cache.faults, self.root, self.active, self.speculates)
        for state in (*states, settings.seeds, settings.greedy, settings.temperature, settings.top_k, settings.top_p):
            _exchange(state[a], state[b])


def _drafter(runner: Runner, method: Method, rows: int) -> Drafter:
    """The greedy drafter of a batch."""
    if method.name == AUTO:
        plans = served_plans(method.tree_shape, method.has_draft, runner.device.type == "cpu")
        return PlanDrafters(runner, rows, GREEDY, plans, method.tree_shape, method.tree_rule)
    settings = (method.tree_shape, method.gamma, method.tree_rule, method.tree_nodes, method.lookup_branches)
    return make_drafter(method.name, runner, rows, GREEDY, *settings)


def _exchange(x: Tensor, y: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def _sizes(max_rows: int) -> list[int]:
    """1, 2, 4, ... and `max_rows`."""
    return sorted({2**power for power in range(max_rows.bit_length()) if 2**power < max_rows} | {max_rows})


GREEDY = Sampler(temperature=0.0, top_k=0, top_p=1.0)
