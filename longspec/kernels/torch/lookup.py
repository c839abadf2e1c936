"""Plain torch: continuations of earlier occurrences of the newest tokens, and how often they were right."""

import torch
from torch import Tensor

from longspec.kernels.shared.tree import LookupState


def longest_matches(history: Tensor, lengths: Tensor, longest: int, chains: int) -> tuple[Tensor, Tensor]:
    """Earlier positions whose tokens equal the newest ones: the longest match first, then the latest position.

    history: LongTensor [B, S], the token at each position; the newest one of row b is at position lengths[b]. longest:
    maximum length of a match in tokens. Returns two LongTensors [B, chains]: the last position of each match, and its
    length, 0 if there is none. The tokens that follow the matches of a row differ.
    """
    newest_position = lengths[:, None].long()
    positions = torch.arange(history.shape[1], device=history.device)

    # match_length[b, p]: number of tokens up to position p that equal the newest ones, at most `longest`.
    match_length = torch.zeros_like(history)
    matches = (positions < newest_position).expand_as(match_length)
    for back in range(longest):
        newest = history.gather(1, (newest_position - back).clamp(min=0))
        exists = (positions >= back) & (newest_position >= back)
        matches = matches & exists & (history.roll(back, 1) == newest)
        match_length = match_length + matches

    score = (match_length * len(positions) + positions).where(match_length > 0, -1)
    following = history.roll(-1, 1)
    ends, match_lengths = [], []
    for _ in range(chains):
        best_score, best = score.max(1, keepdim=True)
        ends.append(best.where(best_score >= 0, 0))
        match_lengths.append(match_length.gather(1, best).where(best_score >= 0, 0))
        score = score.where(following != following.gather(1, best), -1)
    return torch.cat(ends, 1), torch.cat(match_lengths, 1)


def extend_branches(state: LookupState, root: Tensor, lengths: Tensor, sizes: Tensor, prior_weight: float) -> None:
    """Count the hits of the former lookup branches, and replace them by those below a new root, in place.

    root: LongTensor [B], the newest tokens, at positions lengths [B]; written to the history. sizes: LongTensor [K],
    tokens per branch, at most D. K is 1 or 2. prior_weight: number of trials that the priors count as.
    """
    newest_position = lengths[:, None].long()
    state.history.scatter_(1, newest_position, root[:, None])
    longest = state.hits.shape[1]
    steps = torch.arange(state.tokens.shape[2], device=root.device)
    in_branch = steps < sizes[:, None]

    # Compare the former branches with the tokens emitted since then. A branch counts up to its first miss.
    after = state.roots[:, None] + 1 + steps
    known = in_branch & (after <= newest_position)[:, None] & (state.match_lengths > 0)[..., None]
    truth = state.history.gather(1, after.clamp(max=state.history.shape[1] - 1))
    hit = ((state.tokens == truth[:, None]) & known).cumprod(2)
    tried = torch.cat([torch.ones_like(hit[..., :1]), hit[..., :-1]], 2) * known
    bucket = (state.match_lengths[..., None] + steps).clamp(1, longest) - 1
    state.hits.scatter_add_(1, bucket.flatten(1), hit.flatten(1).float())
    state.trials.scatter_add_(1, bucket.flatten(1), tried.flatten(1).float())

    # The new branches. Where a branch reaches the root, it goes on as the tokens since the match repeat.
    ends, match_lengths = longest_matches(state.history, lengths, longest, state.tokens.shape[1])
    period = newest_position - ends
    following = ends[..., None] + 1 + steps % period[..., None].clamp(min=1)
    state.tokens.copy_(state.history.gather(1, following.flatten(1)).view_as(state.tokens))
    rate = (state.hits + prior_weight * state.priors) / (state.trials + prior_weight)
    bucket = (match_lengths[..., None] + steps).clamp(1, longest) - 1
    scores = rate.log().gather(1, bucket.flatten(1)).view(bucket.shape).cumsum(2)
    state.scores.copy_(scores.where(in_branch & (match_lengths > 0)[..., None], -torch.inf))
    state.match_lengths.copy_(match_lengths)
    state.roots.copy_(newest_position[:, 0])
