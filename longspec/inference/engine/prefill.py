"""Prefill: passes over chunks of prompts, of several rows or, as CUDA graphs, of one row each."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.drafting.proposal import Drafter
from longspec.inference.engine.capture import CapturedPass, capture_pass
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler
from longspec.kernels.shared.device import upload
from longspec.models.parallel import model_parallel_rank_and_size
from longspec.models.target_attention import LayerInputs

PREFILL_TOKENS = 4096
"""Largest number of prompt tokens per pass, summed over its rows, where no row waits for a round."""
PREFILL_ROWS = 8
"""Largest number of rows per pass, unless one pass reads all: chunks must be long, as each reads the prefix again."""
CAPTURED_BYTES = 24 * 10**9
"""Most bytes of weights that the captured passes of a group read, if it has several rows. In an engine, the launches of
one eager pass take 15 ms or more, in which an H200 reads three times as many bytes."""
LAST_GROUP_START = 2048
"""Largest start position at which the rows of a group are read in a captured pass each. After a longer prefix, a pass
over one row does not fill the device."""
SIZES = 8
"""Number of captured sizes: a chunk is padded by less than an eighth of the largest one."""
EAGER_PASSES = 2
"""Passes of a size before it is captured, unless all sizes are. A capture takes about as long as two or three of
them."""


@dataclass
class _Chunk:
    """A pass over one row on static tensors, which serve every row and position. Captured passes keep it. It does not
    know them, because a cycle would keep the cache in memory."""

    runner: Runner
    cache: TargetCache
    tokens: Tensor
    """LongTensor [1, T]."""
    span: Tensor
    """int32 [3, 1]: row, position of the first token, number of tokens."""

    def __call__(self, size: int) -> Tensor:
        """The hidden state [1, 1, hidden] at the last token of a pass that is padded to `size` tokens."""
        row, start, count = self.span
        steps = torch.arange(size, device=self.tokens.device)
        # Padding is not stored, and no token before it sees it.
        positions = (start + steps)[None]
        slots = torch.where(steps < count, positions, -1)
        # Within the pass, so that its graph computes the end for all layers.
        attend = self.runner.attention.chunk(row, start + size)
        assert attend is not None
        hidden = self.runner.target(self.tokens[:, :size], positions, self.cache.select(row), slots, attend)
        return hidden.index_select(1, (count - 1).clamp(min=0).long())


class PromptReader:
    """Passes over some tokens of rows, which follow the tokens that the rows hold."""

    def __init__(
        self,
        runner: Runner,
        cache: TargetCache,
        largest: int,
        starter: "DraftStarter | None" = None,
        captures_later: bool = False,
    ) -> None:
        """largest: most tokens of a captured pass. starter: feeds what is read to the draft. captures_later:
        whether passes are captured once their size was read EAGER_PASSES times."""
        self.runner, self.cache = runner, cache
        capacity = cache.keys.shape[3]
        step = -(-min(largest, capacity) // SIZES)
        # A pass of more than `capacity` tokens would go past the row's slots and the rotary table.
        self.sizes = range(step, capacity + 1, step)[:SIZES]
        device = cache.keys.device
        tokens = torch.zeros(1, self.sizes[-1], dtype=torch.long, device=device)
        self.chunk = _Chunk(runner, cache, tokens, torch.zeros(3, 1, dtype=torch.int32, device=device))
        self.starter, self.captures_later = starter, captures_later
        self.layers = () if starter is None else starter.drafter.layer_inputs
        self._passes: dict[int, CapturedPass[Tensor]] = {}
        """The captured pass of each size."""
        self._reads: Counter[int] = Counter()
        """Number of times that each size was read, where passes are captured later."""
        self.capture_s = 0.0
        """Seconds that captures have taken."""
        weights = sum(weight.nbytes for weight in runner.model.parameters())
        # Ranks that share a target have to decide alike, but may hold parts of unlike sizes.
        shares = model_parallel_rank_and_size()[1] > 1
        self.most_rows = 1 if shares else max(1, min(PREFILL_ROWS, CAPTURED_BYTES // weights))
        """Rows of a group that are read in a captured pass each."""

    @property
    def can_capture(self) -> bool:
        # A draft that reads layers takes the tokens of a row that the host names.
        row, start, _ = self.chunk.span
        return self.runner.capturable and not self.layers and self.runner.attention.chunk(row, start) is not None

    @property
    def captures(self) -> bool:
        """Whether passes over few rows are captured, or will be."""
        return bool(self._passes) or (self.captures_later and self.can_capture)

    def capture(self) -> None:
        """Capture a pass of each size, if the device can."""
        if self.can_capture:
            for size in reversed(self.sizes):  # the largest first: the others fit into its memory
                self._capture(size)

    def _capture(self, size: int) -> None:
        begin = time.perf_counter()
        chunk = partial(self.chunk, size)
        self.chunk.span.zero_()  # a chunk of no tokens stores nothing
        chunk()  # compiles the kernels
        self._passes[size] = capture_pass(chunk, self.chunk.tokens.device)
        self.capture_s += time.perf_counter() - begin

    def forget_reads(self) -> None:
        """Read eagerly again where passes are captured later, so that equal calls have equal results."""
        self._reads.clear()

    def read(self, rows: slice, tokens: Tensor, start: int, ends: Sequence[int]) -> Tensor:
        """Read tokens, LongTensor [n, T], of n consecutive rows from position `start` on. ends: length of each row
        after it; tokens past it are padding. Returns the hidden states [n, 1, hidden] at the last tokens."""
        counts = [end - start for end in ends]
        if sizes := self._captured_sizes(counts, start):
            passes = zip(sizes, range(rows.start, rows.stop), tokens, counts, strict=True)
            # The next pass overwrites the result of a captured one.
            hidden = torch.cat(
                [self._replay(size, row, line[:count], start).clone() for size, row, line, count in passes]
            )
        else:
            hidden = self._read_eagerly(rows, tokens, start, ends)
            if len(ends) > 1:
                last = upload(torch.tensor(counts) - 1, hidden.device)
                hidden = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))
            hidden = hidden[:, -1:]
        self.cache.lengths[rows] = upload(torch.tensor(ends, dtype=torch.int32), hidden.device)
        return hidden

    def _captured_sizes(self, counts: Sequence[int], start: int) -> list[int]:
        """The sizes of captured passes for some rows, by their numbers of tokens from position `start` on; none for an
        eager pass over all of them."""
        room = self.cache.keys.shape[3] - start
        sizes = [next((size for size in self.sizes if count <= size <= room), 0) for count in counts]
        most = self.most_rows if start <= LAST_GROUP_START else 1
        if not self.captures or len(counts) > most or not all(sizes):
            return []
        if self.captures_later:
            self._reads.update({*sizes})
            if any(self._reads[size] <= EAGER_PASSES for size in sizes):
                return []
            for size in sorted({*sizes} - self._passes.keys(), reverse=True):
                self._capture(size)
        return sizes

    def _replay(self, size: int, row: int, tokens: Tensor, start: int) -> Tensor:
        """Read tokens [T] of a row in the captured pass of a size."""
        self.chunk.tokens[0, : len(tokens)] = tokens
        span = torch.tensor([[row], [start], [len(tokens)]], dtype=torch.int32)
        self.chunk.span.copy_(upload(span, tokens.device))
        return self._passes[size]()

    def read_all(self, row: int, tokens: Tensor, start: int) -> Tensor:
        """Read tokens [1, T] of one row; the hidden states [1, T, hidden] at all of them."""
        hidden = self._read_eagerly(slice(row, row + 1), tokens, start, [start + tokens.shape[1]])
        self.cache.lengths[row] = start + tokens.shape[1]
        return hidden

    def _read_eagerly(self, rows: slice, tokens: Tensor, start: int, ends: Sequence[int]) -> Tensor:
        """A pass over tokens [n, T], of rows that end at `ends`; the hidden states [n, T, hidden]."""
        end = start + tokens.shape[1]
        positions = torch.arange(start, end, device=tokens.device).expand(len(tokens), -1)

        # The queries are the last ones over the slots 0 ... end - 1.
        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return self.runner.attention.prefill(q, k[:, :, :end], v[:, :, :end], scale)

        # A token at position p is stored in slot p. Padding is stored, too, and later overwritten by rounds.
        states = LayerInputs(self.layers)
        hidden = self.runner.target(tokens, positions, self.cache.narrow(rows), positions, attend, states)
        if self.starter is not None and (read := states.joined()) is not None:
            valid = positions < upload(torch.tensor(ends), tokens.device)[:, None]
            self.starter.feed(rows, tokens, positions, valid, read)
        return hidden


def joined_rows(unread: Sequence[tuple[int, int]], most_tokens: int, most_rows: int = PREFILL_ROWS) -> list[slice]:
    """Groups of consecutive rows that are read together, at most `most_tokens` tokens at a time. unread: row number and
    number of unread tokens of each row that has any, in ascending order. most_rows: largest number of rows of a group
    that has more tokens than that."""
    groups: list[slice] = []
    longest = 0
    for row, rest in unread:
        if groups:
            first, stop = groups[-1].start, groups[-1].stop
            count, most = row + 1 - first, max(longest, rest)
            if row == stop and (count <= most_rows or count * most <= most_tokens):
                groups[-1], longest = slice(first, row + 1), most
                continue
        groups.append(slice(row, row + 1))
        longest = rest
    return groups


class DraftStarter:
    """Starts take dozens of small kernels, whose launches would take longer than a round of a small target."""

    def __init__(self, drafter: Drafter, rows: int, capacity: int, sampler: Sampler, device: torch.device) -> None:
        """drafter: the drafter of all rows. Its `reserve(capacity)` must have been called."""
        self.drafter, self.rows, self.sampler = drafter, rows, sampler
        # Captured starts read these tensors.
        self.prompt = torch.zeros(1, capacity, dtype=torch.long, device=device)
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        self._passes: list[CapturedPass[None]] = []

    def capture(self) -> None:
        """Capture the start of each row. No row may be in use."""
        if not self.drafter.row_states():
            return
        drafters = [self._part(slice(row, row + 1)) for row in range(self.rows)]
        starts = [partial(drafter.start, self.prompt, self.length) for drafter in drafters]
        starts[0]()  # compiles the kernels
        self._passes = [capture_pass(start, self.prompt.device) for start in starts]

    def start(self, rows: slice, prompts: Tensor, lengths: Sequence[int]) -> None:
        """Start n consecutive rows. prompts: LongTensor [n, P], padded on the right."""
        if not self._passes:
            self._part(rows).start(prompts, upload(torch.tensor(lengths), self.length.device))
            return
        for row, prompt, count in zip(range(rows.start, rows.stop), prompts, lengths, strict=True):
            self.prompt[0, :count] = prompt[:count]
            self.prompt[0, count:] = 0
            self.length.fill_(count)
            self._passes[row]()

    def feed(self, rows: slice, *chunk: Tensor) -> None:
        """Feed a chunk of the prompts of some consecutive rows; see `RowState.feed_prompt`."""
        self._part(rows).feed_prompt(*chunk)

    def _part(self, rows: slice) -> Drafter:
        # A drafting method of the user's own need not share its state.
        return self.drafter if rows == slice(0, self.rows) else self.drafter.share(rows, self.sampler)
