"""The head of a draft with a vocabulary list: the rows of lm_head for the list and for the tokens of each prompt."""

from copy import copy

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from longspec.inference.runner import Runner
from longspec.models.draft_vocabulary import extra_columns, prompt_tokens
from longspec.models.parallel import head_rows


class ReducedHead:
    """Logits over C columns per row: the Vd tokens of the list, then E tokens of the row's own prompt, the most recent
    ones, or empty columns with logits -inf. No token has two columns. Captured rounds read the tensors."""

    def __init__(self, runner: Runner, listed: int, rows: int) -> None:
        """listed: Vd, the length of the draft's list."""
        self.runner = runner
        self.vocab: int = runner.config.vocab_size
        self.listed = listed
        self.extra = extra_columns(self.vocab, listed, rows)
        self.most_columns = listed + extra_columns(self.vocab, listed, 1)
        self.first_row = 0
        size = listed + rows * self.extra, runner.config.hidden_size
        self.weight = torch.zeros(size, dtype=runner.dtype, device=runner.device)
        """[Vd + rows * E, hidden]: the list, then the regions of all rows. A narrowed head has the same tensor."""
        self.ids = torch.zeros(rows, listed + self.extra, dtype=torch.long, device=runner.device)
        """LongTensor [rows, C]: the token of each column; any for empty columns."""
        self.bias = self.weight.new_zeros(self.ids.shape)
        """[rows, C]: 0, and -inf for empty columns."""

    @property
    def regions(self) -> Tensor:
        """The weights of the rows' own tokens, [rows, E, hidden]."""
        start = self.listed + self.first_row * self.extra
        return self.weight[start : start + len(self.ids) * self.extra].view(len(self.ids), self.extra, -1)

    def narrow(self, rows: slice) -> "ReducedHead":
        part = copy(self)
        part.first_row = self.first_row + range(len(self.ids))[rows].start
        part.ids = self.ids[rows]
        part.bias = self.bias[rows]
        return part

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        """Gather the weights of the list and of the tokens of prompts, LongTensor [B, P]; lengths: LongTensor [B]."""
        model = self.runner.model
        tokens = model.draft_model.vocabulary
        assert tokens is not None
        position, own = prompt_tokens(prompts, lengths, tokens, self.vocab).topk(self.extra, dim=1)
        self.ids[:, : self.listed] = tokens
        self.ids[:, self.listed :] = own
        self.bias[:, self.listed :].zero_().masked_fill_(position < 0, -torch.inf)
        # The list's weights, too, because an engine is kept between calls and weights can change in place.
        self.weight[: self.listed] = head_rows(model.lm_head, tokens)
        self.regions.copy_(head_rows(model.lm_head, own))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, n, hidden] -> logits [B, n, C]."""
        if len(self.ids) == 1 and self.first_row == 0:
            # The list and the first row's own tokens are adjacent: one product.
            return self.runner.product(hidden, self.weight[: self.ids.shape[1]], self.bias[0])
        listed = self.runner.product(hidden, self.weight[: self.listed])
        own = torch.baddbmm(self.bias[:, None, self.listed :], hidden, self.regions.transpose(1, 2))
        return torch.cat([listed, own], 2)


def head_bytes(config: PreTrainedConfig, dtype: torch.dtype, listed: int | None, rows: int) -> int:
    """Size of the tensors of a `ReducedHead`, before it is built. listed: Vd; None for a draft without a list: 0."""
    if listed is None:
        return 0
    extra = extra_columns(config.vocab_size, listed, rows)
    columns = rows * (listed + extra)
    weight = (listed + rows * extra) * config.hidden_size
    return (weight + columns) * dtype.itemsize + columns * torch.long.itemsize
