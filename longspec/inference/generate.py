"""`generate`: continues prompts; its arguments are named as in transformers' `generate`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import StoppingCriteria

from longspec.errors import UserError, warn_once
from longspec.inference import arguments
from longspec.inference.answering import Listener, answer_all
from longspec.inference.engine.requests import Request, Tokens
from longspec.inference.methods import AUTO, DEFAULT_SHAPE, Drafting
from longspec.inference.options import check_arguments, sampling_settings
from longspec.inference.request import Sampling
from longspec.inference.sampling import row_seeds
from longspec.inference.stats import GenerationStats
from longspec.inference.token_options import check_integer
from longspec.models.glide import GlideMixin, check_pair
from longspec.models.target_files import position_limit

P = ParamSpec("P")
T = TypeVar("T")


class Streamer(Protocol):
    """transformers' streamer interface, with an optional third method. If a streamer has `put_from(value: Tensor,
    origin: Origin) -> None`, it receives the new tokens through it, and only the prompt through `put`."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


def ends_streamer(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a function with a parameter `streamer`: ends it once, also if the function raises. A reader in
    another thread would otherwise wait for ever. One decorated function calls another by its `__wrapped__`."""
    position = list(signature(function).parameters).index("streamer")

    @wraps(function)
    def ending(*args: P.args, **kwargs: P.kwargs) -> T:
        streamer = kwargs.get("streamer", args[position] if len(args) > position else None)
        try:
            return function(*args, **kwargs)
        finally:
            if callable(end := getattr(streamer, "end", None)):
                end()

    return ending


@dataclass
class GenerationOutput:
    sequences: Tensor
    """LongTensor [B, longest]: each row's prompt without its padding and its new tokens, padded on the right."""
    new_tokens: list[Tensor]
    """One LongTensor per row: the generated tokens up to and including EOS."""
    stats: GenerationStats
    """Counts and times over all rows."""


@ends_streamer
@torch.no_grad()
def generate(
    model: GlideMixin,
    input_ids: Tensor | list[list[int]] | Mapping[str, Any],
    attention_mask: Tensor | None = None,
    method: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    tree_shape: Sequence[int] | None = None,
    gamma: int = 4,
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    pad_token_id: int | None = None,
    seed: int | Sequence[int] | None = None,
    streamer: Streamer | None = None,
    tree_rule: str = "reject",
    compile: bool = True,
    attention: str = "auto",
    allow_untrained_draft: bool = False,
    stopping_criteria: Sequence[StoppingCriteria] | None = None,
    tree_nodes: int | None = None,
    lookup_branches: bool = False,
    batch_size: int | None = None,
    deterministic: bool = False,
    **options: Any,
) -> GenerationOutput:
    """Continue prompts losslessly: greedy at temperature 0, else samples of the target's own distribution.

    input_ids, attention_mask: LongTensor [B, P], padded left or right as the mask says; or a tokenizer's output, or a
    list of token ids per row.
    method: vanilla, seq, tree, magicdec, lookup (prompt lookup) or auto; None is tree if tree_shape, tree_nodes or
    lookup_branches is given, else auto. seq, magicdec and lookup draft chains of gamma tokens. seq and tree need a
    trained draft unless allow_untrained_draft is set. auto chooses between vanilla, lookup and trees before each round,
    from the acceptances so far and the times of rounds, which it measures once per device (see `adaptive`).
    tree_shape: number of nodes in each level, None for 4 16 16 16 16.
    tree_nodes: nodes of the tree to be verified, the root included: those with the most probable paths; None for all.
    lookup_branches: continuations of earlier occurrences of the newest tokens join the tree.
    tree_rule: above temperature 0, "reject" samples the tree from the draft and uses recursive rejection; "descend"
    drafts the most probable tree and follows the target's own draws in it. Both are exact; "reject" accepts more
    tokens.
    eos_token_id, pad_token_id: None takes the model's own.
    seed: 0 ... 2^64 - 1 for row 0, from which the others follow (see `row_seed`), or one per row; None draws one from
    torch's global generator. The tokens of a row depend on its own seed and not on the other rows, except above
    temperature 0 with method "auto", whose choices follow from all rows that start together.
    streamer: as in transformers, for a single row; with the origin of each token if it has `put_from` (see `Streamer`).
    It is ended once, also if the call raises.
    compile: use fused layers, and on CUDA one graph per round; otherwise transformers' modules run kernel by kernel.
    attention: "auto" or a backend (see `kernels.choice.choose_backend`).
    deterministic: make each token depend, bit for bit, on the tokens before it alone, in half precision, too. Needs an
    NVIDIA GPU, costs some speed, and excludes `attention`.
    stopping_criteria: each is called after every new token with the ids [1, length] of one row, its prompt as passed in
    followed by its new tokens, and with scores None.
    batch_size: rows that are decoded at the same time; a row that ends goes to the next prompt. None decodes all rows
    in one batch. `ttft_s` is then the time of all prefills.
    options: filters and penalties of transformers and OpenAI, by default those of the model's generation config (see
    `options` and docs/your-model.md). Every other option that changes the distribution is refused by name.
    Raises UserError (a ValueError) for settings that cannot work, and for logits that are NaN or infinite.
    """
    # All checks come before long work.
    check_pair(model)
    numbers = (max_new_tokens, temperature, top_p, top_k, seed, batch_size)
    max_new_tokens, temperature, top_p, top_k, seed, batch_size = map(arguments.plain, numbers)
    options = {name: arguments.plain(value) for name, value in options.items()}
    if method is None:
        describes_tree = tree_shape is not None or tree_nodes is not None or lookup_branches
        method = "tree" if describes_tree else AUTO
        if method == AUTO and not (model.draft_is_trained or allow_untrained_draft):
            name = model.config.name_or_path
            warn_once("%s: no trained draft, so tokens are proposed by prompt lookup alone", name)
    shape = DEFAULT_SHAPE if tree_shape is None else tree_shape
    drafting = Drafting(method, shape, gamma, tree_rule, tree_nodes, lookup_branches)
    drafting = arguments.checked_drafting(model, drafting, allow_untrained_draft)
    check_arguments(options, model.generation_config, model.config.name_or_path)
    given, rows = arguments.prompt_rows(input_ids, attention_mask)
    arguments.check_streamer(streamer, len(rows))
    arguments.check_stopping(stopping_criteria)
    eos_ids = arguments.end_tokens(model, eos_token_id)
    pad_id = arguments.pad_token(model, pad_token_id)
    arguments.check_seed(seed, len(rows))
    attention = arguments.chosen_attention(attention, deterministic)
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1)
        if streamer is not None or stopping_criteria:
            raise UserError("batch_size: not with streamer or stopping_criteria; leave it out")
    seeds = row_seeds(seed, len(rows), greedy=temperature == 0)
    ids, sampling = [row.tolist() for row in rows], (temperature, top_p, top_k)
    requests = make_requests(model, ids, seeds, options, eos_ids, max_new_tokens, *sampling)
    for request in requests:
        arguments.check_request(request, model.config.vocab_size, position_limit(model.config))
    answers: list[list[int]] = [[] for _ in rows]
    device = model.lm_head.weight.device
    prompts = [row.to(device) for row in given] if stopping_criteria else given
    put_from = getattr(streamer, "put_from", None)
    if streamer is not None:
        streamer.put(given[0][None].cpu())
    reads_each = streamer is not None or bool(stopping_criteria)

    def take(number: int, event: Tokens) -> int | None:
        if not reads_each:
            answers[number] += event.ids
            return None
        for count, (token, origin) in enumerate(zip(event.ids, event.origins, strict=True), 1):
            answers[number].append(token)
            if put_from is not None:
                put_from(torch.tensor([token]), origin)
            elif streamer is not None:
                streamer.put(torch.tensor([token]))
            if stopping_criteria:
                # They see the padded prompt, as in transformers' own `generate`.
                ids = torch.cat([prompts[number], torch.tensor(answers[number], device=device)])[None]
                if any(bool(torch.as_tensor(ends(ids, None)).all()) for ends in stopping_criteria):  # type: ignore[arg-type]
                    return count
        return None

    listener = Listener(take, in_blocks=not reads_each)
    # Caches and kernels have the pair's own dtype.
    with torch.autocast(device.type, enabled=False):
        stats = answer_all(model, drafting, requests, batch_size, listener, attention, compile)
    # Rows end at different lengths.
    new_tokens = [torch.tensor(tokens, dtype=torch.long, device=device) for tokens in answers]
    sequences = [torch.cat([row.to(device), new]) for row, new in zip(rows, new_tokens, strict=True)]
    return GenerationOutput(pad_sequence(sequences, batch_first=True, padding_value=pad_id), new_tokens, stats)


def make_requests(
    model: GlideMixin,
    prompts: Sequence[list[int]],
    seeds: Sequence[int | None],
    options: Mapping[str, Any],
    eos_ids: Collection[int],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
) -> list[Request]:
    """A request for each prompt, with a seed of its own. options: as for `generate`. Raises UserError."""
    config, vocab, requests = model.generation_config, model.config.vocab_size, []
    for prompt, seed in zip(prompts, seeds, strict=True):
        settings = sampling_settings(options, config, eos_ids, vocab, len(prompt))
        sampling = Sampling(temperature, top_p, top_k, seed, **settings)
        requests.append(Request(prompt, max_new_tokens, sampling, frozenset(eos_ids)))
    return requests
