"""The device's side of the engine: a static number of rows, prefill of some of them, and rounds over the first n."""

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longspec.inference import methods
from longspec.inference.adaptive.time_cache import BatchTimes, RoundTimes, cache_key, known_times, measure_times
from longspec.inference.cache import Fault
from longspec.inference.drafting.chain import NoDraft
from longspec.inference.drafting.proposal import Drafter
from longspec.inference.engine.batch_rows import BatchRows
from longspec.inference.engine.capture import CapturedRound, compile_ahead, warm_up
from longspec.inference.engine.prefill import DraftStarter, PromptReader
from longspec.inference.engine.round_record import RoundResult, scores
from longspec.inference.engine.rounds import KINDS, Mode, Round, Rounds
from longspec.inference.engine_pool import NOT_POOLED, Pooled, give_back, with_released_memory
from longspec.inference.process_group import repeated
from longspec.inference.request import Sampling
from longspec.inference.row_settings import served_penalties
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY_KIND, Sampler, SamplingKind, sampling_kind

PREFILL_CHUNK = 1024
"""Most prompt tokens that are read between two rounds, by default."""
SCORED_BYTES = 2**26
"""Most bytes of log-probabilities that `score` computes at a time, unless a single token has more."""
LEAST_ROUNDS = 128
"""Rounds of a batch that a smaller size would have covered before that size is captured. A capture takes as long as
tens of rounds, each plan of "auto" needs one, and the end of most batches has few rounds of each size."""
MOST_MEASURED_ON_CPU = 4
"""Largest batch whose rounds are measured on a CPU, where a round takes long."""


class Batch(BatchRows):
    """Rows with a draft, and their rounds, which run over the first n rows, n being one of `sizes`."""

    def __init__(
        self,
        runner: Runner,
        drafting: methods.Drafting,
        max_rows: int,
        capacity: int,
        prefill_chunk: int = PREFILL_CHUNK,
        kind: SamplingKind | None = None,
        pooled: Pooled = NOT_POOLED,
    ) -> None:
        """capacity: slots per row of the target's cache. prefill_chunk: most tokens of a pass that a server captures.
        kind: see `EngineSettings`."""
        self.kinds, self.details = KINDS if kind is None else (kind,), kind is None
        super().__init__(runner, max_rows, capacity, self.kinds[0].penalties)
        # Rounds of one token per row take nearly as long for more rows, and each size costs a warm-up.
        factor = 4 if drafting.method == "vanilla" and not self.details else 2
        powers = (factor**number for number in range(max_rows.bit_length()))
        self.sizes = sorted({max_rows, *(size for size in powers if size < max_rows)})
        if not runner.capturable:
            self.sizes = list(range(1, max_rows + 1))
        if pooled.is_whole:
            self.sizes = [max_rows]
        runner.prepare(capacity)
        all_rows = slice(0, max_rows)
        sampler = self._sampler(self.kinds[0], all_rows).drafting()
        self.drafter = methods.make_drafter(drafting, runner, max_rows, sampler, self.details)
        self.drafter.reserve(capacity)
        self.starter = DraftStarter(self.drafter, max_rows, capacity, sampler, runner.device)
        # Where rows start one after another, passes are short, and their launches would take most of the time.
        largest, later = (prefill_chunk, False) if self.details else (PREFILL_CHUNK, not pooled.is_whole)
        self.reader = PromptReader(runner, self.cache, largest, self.starter, later)
        self.plans = self.drafter.plans
        self.times = BatchTimes()
        self.drafters: dict[SamplingKind, Drafter] = {self.kinds[0]: self.drafter}
        drafter = self.drafter
        for kind in self.kinds[1:]:  # those that sample share the tensors of their trees
            drafter = drafter.share(all_rows, self._sampler(kind, all_rows).drafting())
            self.drafters[kind] = drafter
        self.nodes, self.depth = self.drafter.nodes, self.drafter.depth
        """Tokens that a round reads per row, and those on the longest path below the root."""
        self.pooled = pooled
        self.setup = {"warm_up_s": 0.0, "capture_s": 0.0, "measure_s": 0.0}
        """Seconds that the batch has spent on its rounds before they are played."""
        self._rounds: dict[tuple[Mode, int], Round] = {}
        self._covered: Counter[int] = Counter()
        """Number of rounds that each size would have covered."""
        self._last_hidden = self.cache.newest_hidden

    def size_for(self, rows: int) -> int:
        """The smallest size of a round that covers the first `rows` rows."""
        return next(size for size in self.sizes if size >= rows)

    def size_of_next(self, size: int) -> int:
        """The size of the next round, if `size` is the smallest one that covers it. The largest size serves all rounds
        until a smaller one would have covered LEAST_ROUNDS; a server has captured all of them."""
        if self.details or not self.runner.capturable:
            return size
        self._covered.update(other for other in self.sizes if other >= size)
        used = (other for other in self.sizes if other >= size and self._covered[other] > LEAST_ROUNDS)
        return next(used, self.max_rows)

    @repeated
    def capture(self, usual: Sampling | None = None) -> None:
        """Capture prefill and the rounds of the `usual` requests, if the runner can. The cache must be empty."""
        if self.details:
            self.reader.capture()
        if not self.runner.capturable:
            return
        kinds = self.kinds
        if self.details:
            self.starter.capture()
            usual = usual or Sampling()
            self._make_room_for_penalties([usual])
            penalties = self.kind_of([usual]).penalties
            kinds = tuple(kind._replace(penalties=penalties) for kind in kinds[:-1])
        modes = []
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            for kind in kinds:
                if self.depth:
                    modes += [(Mode(True, kind, plan, self.details), size) for plan in reversed(self.plans or (None,))]
                if self.details or not self.depth:
                    modes.append((Mode(False, kind, None, self.details), size))
        self.prepare(modes)

    @repeated
    def measure(self) -> None:
        """Measure the plans of "auto", if this is the method. The cache must be empty."""
        if not self.plans or self.times.by_size:
            return
        start, earlier = time.perf_counter(), self.seconds_of_setup
        most = self.max_rows if self.runner.capturable else min(self.max_rows, MOST_MEASURED_ON_CPU)
        for size in sorted({self.sizes[0], max(self.sizes[0], most)}):
            self.times.by_size[size] = self._measured_times(size)
        self.setup["measure_s"] += time.perf_counter() - start - (self.seconds_of_setup - earlier)

    @property
    def seconds_of_setup(self) -> float:
        return sum(self.setup.values())

    def kind_of(self, samplings: Sequence[Sampling]) -> SamplingKind:
        """The batch's only kind; else the first of KINDS that follows all these settings, with their penalties."""
        if not self.details:
            return self.kinds[0]
        needed = sampling_kind(samplings)
        greedy = needed.rows == "greedy"
        kind = GREEDY_KIND if greedy else next(kind for kind in KINDS[1:] if {*needed.filters} <= {*kind.filters})
        return kind._replace(penalties=served_penalties(samplings) if self.runner.capturable else needed.penalties)

    def _measured_times(self, size: int) -> RoundTimes:
        """Times of the rounds of all plans, in the batch's first kind, from the cache if it has them."""
        room = self.pooled.room or self.capacity - self.depth - 1 - self.nodes
        kind, rows = self.kinds[0], slice(0, size)
        state = self.state(Mode(True, kind, self.plans[0], self.details), rows)
        drafter = self._drafter(rows, self._sampler(kind, rows))
        key = cache_key(state.kind._replace(drafting=drafter.kind), self.plans, self.runner.config, room)

        def measure() -> RoundTimes:
            keys = {plan: (Mode(True, kind, plan, self.details), size) for plan in self.plans}
            self.prepare(list(keys.values()))
            rounds = {plan: self._rounds[key] for plan, key in keys.items()}
            return measure_times(state, rounds, lambda: drafter.refill(state.cache.lengths), room)

        return known_times(key, measure)

    def rounds(self, mode: Mode, rows: int) -> Round:
        """Plays rounds of the first `rows` rows, one of `sizes`; see `Rounds.round`."""
        self.prepare([(mode, rows)])
        return self._rounds[mode, rows]

    def prepare(self, keys: Sequence[tuple[Mode, int]]) -> None:
        """Make the rounds of some modes and numbers of rows ready, unless they are."""
        states = {key: self.state(key[0], slice(0, key[1])) for key in keys if key not in self._rounds}
        captured = {key for key in states if self.runner.capturable and not key[0].scores}
        start = time.perf_counter()
        compile_ahead([states[key] for key in captured])
        for key, state in states.items():
            self._rounds[key] = state.round
            if key in captured:
                warm_up(state)
                warm = time.perf_counter()
                self._rounds[key] = CapturedRound(state)
                self.setup["warm_up_s"] += warm - start
                start = time.perf_counter()
                self.setup["capture_s"] += start - warm

    def state(self, mode: Mode, rows: slice) -> Rounds:
        """What rounds of some consecutive rows work on."""
        sampler = self._sampler(mode.sampling, rows)
        drafter: Drafter = NoDraft()
        if mode.speculates or not self.depth:
            drafter = self._drafter(rows, sampler).for_plan(mode.plan)
        speculates = self.speculates[rows] if self.details else None
        cache, root = self.cache.narrow(rows), self.root[rows]
        return Rounds(self.runner, drafter, sampler, cache, root, mode.report, speculates)

    def _drafter(self, rows: slice, sampler: Sampler) -> Drafter:
        """The drafter of some consecutive rows. sampler: the target's."""
        drafter = self.drafters.get(sampler.kind)
        # A drafting method of the user's own need not share its state.
        if drafter is not None and rows == slice(0, self.max_rows):
            return drafter
        drafter = drafter or self.drafters[sampler.kind._replace(penalties=None)]
        return drafter.share(rows, sampler.drafting())

    def _sampler(self, kind: SamplingKind, rows: slice) -> Sampler:
        return Sampler(kind, self.settings.narrow(rows)).on(self.runner.backend)

    @repeated
    def play(self, mode: Mode, size: int) -> RoundResult:
        """Play a round of the first `size` rows, one of `sizes`."""
        return self.rounds(mode, size)(self.active[:size])

    @repeated
    def read_prompts(self, rows: slice, chunks: Sequence[np.ndarray], start: int) -> Tensor:
        """Read the next tokens, int64, of the prompts of consecutive rows, which hold the positions before `start`.
        Returns the hidden states [n, 1, hidden] at their last tokens, which `first_tokens` reads."""
        ends = [start + len(chunk) for chunk in chunks]
        tokens = self.upload(chunks)
        captured = self.reader.capture_s
        self._last_hidden = with_released_memory(self.runner.model, lambda: self.reader.read(rows, tokens, start, ends))
        self.setup["capture_s"] += self.reader.capture_s - captured
        return self._last_hidden

    @repeated
    def read_scored(self, row: int, chunk: np.ndarray, following: np.ndarray, start: int) -> list[list[float]]:
        """Read the next tokens of a row's prompt; `round_record.scores` of the tokens after each of them, `following`,
        which lacks one at the end of the prompt. Waits for the device. Raises ValueError for logits that are NaN."""
        hidden = self.reader.read_all(row, self.upload([chunk]), start)
        self._last_hidden = hidden[:, -1:]
        lines: list[list[float]] = []
        if not len(following):
            return lines
        step = max(1, SCORED_BYTES // (self.runner.config.vocab_size * torch.float32.itemsize))
        tokens = self.upload([following])
        for part, targets in zip(hidden[:, : len(following)].split(step, 1), tokens.split(step, 1), strict=True):
            own = scores(self.runner.logits(part), targets)[0].cpu()
            if own.isnan().any():
                raise ValueError("the target's logits are NaN or infinite")
            lines += own.tolist()
        return lines

    @repeated
    def first_tokens(
        self, rows: slice, part: slice, prompts: Sequence[np.ndarray], kind: SamplingKind, scored: bool = False
    ) -> Tensor:
        """Choose the first tokens of the answers in n consecutive rows, which become the roots and join the rounds.
        part: the rows among those of the newest `read_prompts`. Returns fp64 [n, 3]: the token, its log-probability at
        temperature 1 (0 without details), and the row's fault; then, if `scored`, `round_record.scores` of it."""
        last_hidden = self._last_hidden[part]
        cache = self.cache.narrow(rows)
        cache.faults.zero_()
        logits = self.runner.logits(last_hidden)[:, 0]
        ids, lengths = self.upload(prompts), [len(prompt) for prompt in prompts]
        sampler, watch = self._sampler(kind, rows), cache.watch(Fault.TARGET)
        tokens = sampler.first_tokens(logits, ids, lengths, watch)
        self.root[rows] = tokens
        if self.drafter.reads_hidden:
            cache.newest_hidden.copy_(last_hidden)
        self.starter.start(rows, ids, lengths)
        cache.compare_ranks(tokens[:, None], torch.ones_like(tokens))
        self.active[rows] = True
        log_p = torch.zeros_like(tokens[:, None], dtype=torch.float64)
        if self.details:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            log_p = wide.log_softmax(-1).gather(1, tokens[:, None]).double()
        columns = [tokens[:, None].double(), log_p, cache.faults[:, None].double()]
        return torch.cat([*columns, scores(logits, tokens)] if scored else columns, 1)

    @repeated
    def refill_draft(self, rows: Sequence[int]) -> None:
        """Fill the draft's window in rows that played plans without the draft."""
        if len(rows) == 1:
            part = slice(rows[0], rows[0] + 1)
            self._drafter(part, self._sampler(self.kinds[0], part)).refill(self.cache.lengths[part])
        else:
            self.drafter.refill(self.cache.lengths)  # which changes nothing in the others

    @repeated
    def retire(self) -> None:
        """Keep the batch for a later call. All requests must have ended, without a fault."""
        # Equal calls play rounds and passes of equal sizes, whose sums round alike.
        self._covered.clear()
        self.reader.forget_reads()
        give_back(self)
