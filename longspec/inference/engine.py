"""The engine: chunked prefill, then rounds of draft, verify, accept and compact. It is the same for every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longspec.inference.acceptance import accept
from longspec.inference.cache import Fault, TargetCache
from longspec.inference.drafting.proposal import Drafter, Proposal
from longspec.inference.kernel_key import CAPACITY_STEP, KernelKey, kernel_key
from longspec.inference.round_record import PLAIN, Report, RoundResult, pack
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler

PREFILL_TOKENS = 4096
"""Largest number of prompt tokens per pass of prefill, summed over its rows."""
PREFILL_ROWS = 8
"""Largest number of rows per pass of prefill, unless one pass reads all their tokens. Each pass reads the prefix of its
rows again, so chunks must be long."""
LEAST_PREFILL_TOKENS = 512
"""A pass of prefill over fewer tokens takes as long, because it reads the same weights."""
Round = Callable[[Tensor], RoundResult]
"""`Rounds.round`, or a captured one."""


class Rounds:
    """Decoding rounds of a ragged batch whose prompts are in the cache.

    Each row has a root: its newest token, the only one that the target has not read yet. All state is in tensors that a
    round changes in place, so that a round can be captured as a CUDA graph and replayed.
    """

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        sampler: Sampler,
        cache: TargetCache,
        root: Tensor,
        report: Report = PLAIN,
    ) -> None:
        """root: LongTensor [B], the newest token of each row, at position cache.lengths[b]. sampler: the target's."""
        self.runner = runner
        self.drafter = drafter
        self.sampler = sampler
        self.cache = cache
        self.root = root
        self.report = report

    @property
    def capacity(self) -> int:
        """Slots per row of the target's cache, and an upper bound of all positions."""
        return self.cache.keys.shape[3]

    @property
    def kind(self) -> KernelKey:
        """Equal for batches whose rounds launch the same kernels."""
        rows, all_rows = len(self.root), self.cache.all_rows
        return kernel_key(self.runner, self.drafter.kind, self.sampler.kind, rows, self.capacity, all_rows, self.report)

    def round(self, active: Tensor) -> RoundResult:
        """Draft, verify, accept and compact once. active: bool [B]; other rows do not change, and no pass reads their
        prefix.

        The tokens of a row with a fault in `cache.faults` are undefined.
        """
        # Draft and verify.
        cache = self.cache.reading(active)
        proposal = self.drafter.propose(self.root, cache)
        hidden = self.forward_tree(proposal, cache)
        logits = self.runner.logits(hidden)

        # Accept. The bonus token costs no pass of its own: its distribution is that of the last accepted node.
        accepted = accept(proposal, logits, self.sampler, self.cache.watch(Fault.TARGET))
        if self.drafter.reads_hidden:
            last = accepted.path.gather(1, accepted.count[:, None])[..., None]
            newest = hidden.gather(1, last.expand(-1, -1, hidden.shape[2]))
            self.cache.newest_hidden.copy_(torch.where(active[:, None, None], newest, self.cache.newest_hidden))

        # Compact: store the root and the accepted draft tokens in the caches of draft and target.
        count = torch.where(active, accepted.count + 1, 0)
        path_tokens = proposal.tokens.gather(1, accepted.path)
        steps = torch.arange(proposal.depth + 1, device=count.device)
        self.drafter.feed(path_tokens, self.cache.lengths[:, None] + steps, steps < count[:, None])
        self.cache.keep(accepted.path, count)
        self.root.copy_(torch.where(active, accepted.bonus, self.root))

        # The path starts with the root, which an earlier round emitted. The bonus token comes after the last node.
        emitted = path_tokens.roll(-1, dims=1).scatter(1, accepted.count[:, None], accepted.bonus[:, None])
        self.cache.compare_ranks(emitted, count)
        return pack(proposal, accepted, emitted, count, self.cache.faults, logits, self.report)

    def verify(self, proposal: Proposal) -> Tensor:
        """The target's logits [B, N, V] at every node of the tree."""
        return self.runner.logits(self.forward_tree(proposal, self.cache))

    def forward_tree(self, proposal: Proposal, cache: TargetCache) -> Tensor:
        """The target's hidden states [B, N, hidden] at every node of the tree, in one pass.

        The nodes' keys and values go to the slots of `cache` after the accepted tokens; `TargetCache.keep` moves the
        accepted ones into place.
        """
        slots = cache.next_slots(proposal.tokens.shape[1])
        positions = cache.lengths[:, None] + proposal.levels
        # A row without a prefix to read attends to other slots than its nodes', and its result is not used.
        attend = self.runner.attention.hybrid(cache.prefix_lengths, proposal.visible)
        return self.runner.target(proposal.tokens, positions, cache, slots, attend)


class Engine(Rounds):
    """Decodes a ragged batch of prompts: prefill, then rounds."""

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        sampler: Sampler,
        prompts: Tensor,
        prompt_lengths: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        """Allocate the caches of a batch. `prefill` reads the prompts.

        prompts: LongTensor [B, P], padded on the right. prompt_lengths: tokens per row without padding, at least 1.
        max_new_tokens: per row; the cache has room for them.
        """
        self.prompts = prompts
        self.prompt_lengths = list(prompt_lengths)

        # A row's last round can take it up to depth + 1 tokens past its limit. The nodes of a tree are stored after the
        # accepted tokens.
        slots = prompts.shape[1] + max_new_tokens + drafter.depth + 1 + drafter.nodes
        capacity = -(-slots // CAPACITY_STEP) * CAPACITY_STEP
        positions = None if sampler.greedy else sampler.settings.positions
        cache = TargetCache(runner.config, len(prompts), capacity, runner.dtype, runner.device, positions)
        super().__init__(runner, drafter, sampler, cache, prompts[:, 0].clone())
        runner.prepare(capacity)
        drafter.reserve(capacity)

    def prefill(self) -> Tensor:
        """Read the prompts and choose the first token of each row, LongTensor [B], which becomes its root."""
        lengths = torch.tensor(self.prompt_lengths, device=self.prompts.device)
        last_hidden = self._read_prompts()

        self.cache.lengths.copy_(lengths)
        if self.drafter.reads_hidden:
            self.cache.newest_hidden.copy_(last_hidden)
        self.drafter.start(self.prompts, lengths)

        self.cache.faults.zero_()
        logits = self.runner.logits(last_hidden)[:, 0]
        self.root.copy_(self.sampler.after_prefill().choose(logits, self.cache.watch(Fault.TARGET)))
        self.cache.compare_ranks(self.root[:, None], torch.ones_like(self.root))
        return self.root.clone()

    def _read_prompts(self) -> Tensor:
        """Fill the cache group by group, each chunk by chunk.

        Returns the hidden state [B, 1, hidden] at the last token of each row.
        """
        last_hidden: list[Tensor] = [torch.empty(0)] * len(self.prompts)
        waiting = [(rows, 0) for rows in self._unread(0)]
        while waiting:
            rows, start = waiting.pop()
            count = rows.stop - rows.start
            longest = max(self.prompt_lengths[rows])
            end = min(start + PREFILL_TOKENS // count, longest)
            positions = torch.arange(start, end, device=self.prompts.device).expand(count, -1)

            # The chunk's queries are the last ones over the slots 0 ... end - 1.
            def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, end: int = end) -> Tensor:
                return self.runner.attention.prefill(q, k[:, :, :end], v[:, :, :end], scale)

            # A prompt token at position p is stored in slot p. Padding is stored, too, and later overwritten by rounds.
            cache = self.cache.narrow(rows)
            hidden = self.runner.target(self.prompts[rows, start:end], positions, cache, positions, attend)
            for row in range(rows.start, rows.stop):
                if start < self.prompt_lengths[row] <= end:
                    last_hidden[row] = hidden[row - rows.start, self.prompt_lengths[row] - 1 - start].clone()
            waiting += [(unread, end) for unread in self._unread(end, rows)]
        return torch.stack(last_hidden)[:, None]

    def _unread(self, start: int, within: slice = slice(None)) -> list[slice]:
        """Groups of consecutive rows with prompt tokens from position `start` on. A pass reads one group.

        Rows without such tokens separate two groups, unless reading them along is cheaper than another pass.
        """
        groups: list[slice] = []
        for row in range(*within.indices(len(self.prompts))):
            if self.prompt_lengths[row] <= start:
                continue
            if groups and self._joins(row, groups[-1], start):
                groups[-1] = slice(groups[-1].start, row + 1)
            else:
                groups.append(slice(row, row + 1))
        return groups

    def _joins(self, row: int, group: slice, start: int) -> bool:
        """Whether passes from position `start` on read `row` together with the `group` before it."""
        count = row + 1 - group.start
        longest_rest = max(self.prompt_lengths[group.start : row + 1]) - start
        padding = (row - group.stop) * (self.prompt_lengths[row] - start)
        fits = count <= PREFILL_ROWS or count * longest_rest <= PREFILL_TOKENS
        return fits and padding < LEAST_PREFILL_TOKENS
