"""Rounds of draft, verify, accept and compact. They are the same for every method."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from longspec.inference.acceptance import accept
from longspec.inference.adaptive.plans import Plan
from longspec.inference.cache import Fault, TargetCache
from longspec.inference.drafting.proposal import Drafter, Proposal
from longspec.inference.engine.round_record import Report, RoundResult, scores
from longspec.inference.request import FILTERS
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY_KIND, Sampler, SamplingKind
from longspec.models.target_attention import LayerInputs

CAPACITY_STEP = 256
"""The number of cache slots per row is a multiple of this."""
MOST_SIZE_CLASSES = 128
"""From this number of steps on, the cache size does not change which kernels run, because splits are bounded."""
KINDS = (GREEDY_KIND, *(SamplingKind("mixed", names) for names in ((), ("top_k", "top_p"), tuple(FILTERS))))
"""The kinds of sampling of a server in order of what their rounds can do. The last one is captured when it is first
needed, and so are all with penalties, which are those of SERVED_PENALTIES."""


class Mode(NamedTuple):
    """The rounds of one mode launch the same kernels."""

    speculates: bool
    """Whether any row speculates."""
    sampling: SamplingKind
    plan: Plan | None = None
    """The plan of method "auto", if any row speculates."""
    details: bool = True
    """Whether log-probabilities and traces are reported."""
    scores: bool = False
    """Whether rounds report `round_record.scores`. They are not captured, because few requests ask for it."""

    @property
    def report(self) -> Report:
        return Report(self.plan is not None and self.plan.kind == "tree", self.details, self.scores)


class KernelKey(NamedTuple):
    """Everything that the kernels of a batch's rounds depend on. Whatever outlives a round by its kernels is found by
    this key: compiled kernels, engines with captured rounds, and measured times."""

    runner: Hashable
    """`Runner.kind`."""
    drafting: Hashable
    """The drafter's `kind`, or the settings that it is made from."""
    sampling: SamplingKind
    rows: int
    """Rows of a round."""
    all_rows: int
    """Rows of the cache: compaction runs over all of it."""
    size_class: int
    """Slots per row in steps of CAPACITY_STEP."""
    report: Report = Report()


def size_class(slots: int) -> int:
    """`KernelKey.size_class` of rows with this number of slots."""
    return min(slots // CAPACITY_STEP, MOST_SIZE_CLASSES)


Round = Callable[[Tensor], RoundResult]
"""`Rounds.round`, or a captured one."""


@dataclass(eq=False)
class Rounds:
    """Decoding rounds of a ragged batch whose prompts are in the cache. The root of a row is its newest token, the only
    one that the target has not read. All state is in tensors that change in place, so that rounds can be captured."""

    runner: Runner
    drafter: Drafter
    sampler: Sampler
    """The target's, with the operations of the runner's backend."""
    cache: TargetCache
    root: Tensor
    """LongTensor [B], the newest token of each row, at position cache.lengths[b]."""
    report: Report = field(default_factory=Report)
    speculates: Tensor | None = None
    """bool [B], changed in place: the rows whose proposals count; None for all. The others emit one token per round."""

    @property
    def capacity(self) -> int:
        """Slots per row of the target's cache, and an upper bound of all positions."""
        return self.cache.keys.shape[3]

    @property
    def kind(self) -> KernelKey:
        """Equal for batches whose rounds launch the same kernels."""
        sizes = len(self.root), self.cache.all_rows, size_class(self.capacity)
        return KernelKey(self.runner.kind, self.drafter.kind, self.sampler.kind, *sizes, self.report)

    def round(self, active: Tensor) -> RoundResult:
        """Draft, verify, accept and compact once. active: bool [B]; other rows do not change, and no pass reads their
        prefix. The tokens of a row with a fault in `cache.faults` are undefined."""
        # Draft and verify.
        cache = self.cache.reading(active)
        proposal = self.drafter.propose(self.root, cache)
        if self.speculates is not None:
            # A root without children accepts nothing, and its bonus token follows the target's whole distribution.
            proposal = replace(proposal, parents=torch.where(self.speculates[:, None], proposal.parents, -1))
        states = LayerInputs(self.drafter.layer_inputs)
        hidden = self.forward_tree(proposal, cache, states)
        logits = self.runner.logits(hidden)

        # Accept. The bonus token costs no pass of its own: its distribution is that of the last accepted node.
        penalized = self.sampler.penalized(logits, proposal)
        accepted = accept(proposal, penalized, self.sampler, self.cache.watch(Fault.TARGET))
        if self.drafter.reads_hidden:
            last = accepted.path.gather(1, accepted.count[:, None])[..., None]
            newest = hidden.gather(1, last.expand(-1, -1, hidden.shape[2]))
            self.cache.newest_hidden.copy_(torch.where(active[:, None, None], newest, self.cache.newest_hidden))

        # Compact: store the root and the accepted draft tokens in the caches of draft and target.
        count = (accepted.count + 1) * active
        path_tokens = proposal.tokens.gather(1, accepted.path)
        steps = torch.arange(proposal.depth + 1, device=count.device)
        fed = [path_tokens, self.cache.lengths[:, None] + steps, steps < count[:, None]]
        if (read := states.joined()) is not None:
            fed.append(read.gather(1, accepted.path[..., None].expand(-1, -1, read.shape[2])))
        self.drafter.feed(*fed)
        # The path starts with the root, which an earlier round emitted. The bonus token comes after the last node.
        emitted = path_tokens.roll(-1, dims=1).scatter_(1, accepted.count[:, None], accepted.bonus[:, None])
        self.sampler.append(emitted, count)
        self.cache.keep(accepted.path, count, self.runner.backend)

        self.cache.compare_ranks(emitted, count)
        result = self.pack(proposal, accepted.path, emitted, count, logits)
        torch.where(active, accepted.bonus, self.root, out=self.root)  # the proposal may hold this tensor
        return result

    def pack(self, proposal: Proposal, path: Tensor, tokens: Tensor, counts: Tensor, logits: Tensor) -> RoundResult:
        """The record of a round. path: see `Accepted`; logits [B, N, V]: the target's at every node."""
        report, from_lookup = self.report, proposal.from_lookup
        # Of the other entries' dtype, so that one kernel packs them.
        marks = torch.zeros_like(path) if from_lookup is None else from_lookup.gather(1, path).long()
        columns = [counts[:, None], self.cache.faults[:, None], tokens, marks]
        if report.details:
            chosen = logits.flatten(1).gather(1, path * logits.shape[2] + tokens)
            # Of the emitted tokens, at temperature 1.
            log_p = chosen - self.runner.backend.log_sum_exp(logits).gather(1, path)
            columns.append(log_p.double().view(torch.long))
        if report.ranks:
            assert proposal.ranks is not None
            columns += [proposal.ranks.gather(1, path), proposal.levels_by_rank()]
        trace = torch.cat([proposal.tokens, proposal.parents, path], 1) if report.details else None
        token_scores = None
        if report.scores:
            token_scores = scores(logits.gather(1, path[..., None].expand(-1, -1, logits.shape[2])), tokens)
        return RoundResult(tokens, counts, torch.cat(columns, 1), token_scores, trace)

    def forward_tree(self, proposal: Proposal, cache: TargetCache, states: LayerInputs | None = None) -> Tensor:
        """The target's hidden states [B, N, hidden] at every node of the tree, in one pass that stores keys and values
        after the accepted tokens (see `TargetCache.keep`). states: collects inputs of layers at every node."""
        slots = cache.next_slots(proposal.tokens.shape[1])
        positions = cache.lengths[:, None] + proposal.levels
        # A row without a prefix to read attends to other slots than its nodes', and its result is not used.
        attend = self.runner.attention.hybrid(cache.prefix_lengths, proposal.visible)
        return self.runner.target(proposal.tokens, positions, cache, slots, attend, states)
