"""Checks of requests, and of the arguments of `generate`, whose name each UserError starts with."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspec.errors import UserError
from longspec.inference.engine.requests import Request, RequestTooLarge
from longspec.inference.methods import AUTO, GLIDE_METHODS, TREE_RULES, Drafting, method_names
from longspec.inference.request import FILTERS
from longspec.inference.token_options import check_integer, check_option, is_integer, is_real
from longspec.kernels import DETERMINISTIC
from longspec.models.draft_layer import check_window
from longspec.models.glide import GlideMixin

MAX_NODES = 1024
"""Largest number of nodes per verification pass, the root included."""
LEAST_TEMPERATURE = 1e-30
"""Smallest temperature above 0. Logits up to 3e8 divided by it are finite in fp32."""
LARGEST_TEMPERATURE = torch.finfo(torch.float32).max


def chosen_attention(attention: str, deterministic: bool) -> str:
    """The attention of an engine: `attention`, or the one of deterministic decoding. Raises UserError for both."""
    if not deterministic:
        return attention
    if attention not in ("auto", DETERMINISTIC):
        raise UserError(f"deterministic: has an attention of its own; leave attention={attention!r} out")
    return DETERMINISTIC


def prompt_rows(input_ids: Any, attention_mask: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Each prompt as passed in, and without its padding; LongTensors [length]. input_ids: token ids [B, P], a list of
    token ids per row, or a tokenizer's output, which contains the mask as well. Raises UserError."""
    if isinstance(input_ids, Mapping):
        if "input_ids" not in input_ids:
            raise UserError(f"input_ids: a mapping without the key input_ids, only {', '.join(map(str, input_ids))}")
        attention_mask = input_ids.get("attention_mask") if attention_mask is None else attention_mask
        input_ids = input_ids["input_ids"]
    if isinstance(input_ids, list):
        is_valid = (isinstance(row, Sequence) and row and all(map(is_integer, row)) for row in input_ids)
        if not input_ids or not all(is_valid):
            raise UserError("input_ids: a list; give one list of token ids per row, none empty")
        given = [torch.tensor(row, dtype=torch.long) for row in input_ids]
    else:
        check_token_ids(input_ids)
        given = list(input_ids.long())
    if attention_mask is None:
        return given, given
    masks: list[Tensor] = []
    with suppress(TypeError, ValueError, RuntimeError):  # what torch raises for anything but numbers
        masks = [torch.as_tensor(own, device=row.device).bool() for own, row in zip(attention_mask, given, strict=True)]
    if [mask.shape for mask in masks] != [row.shape for row in given]:
        raise UserError("attention_mask: give 0 or 1 per token of input_ids, in a tensor or lists of the same shape")
    rows = [row[mask] for row, mask in zip(given, masks, strict=True)]
    for number, row in enumerate(rows):
        if len(row) == 0:
            raise UserError(f"attention_mask: row {number} has no real token; a prompt needs at least one")
    return given, rows


def check_token_ids(input_ids: Any) -> None:
    """Raise UserError unless input_ids is an integer tensor [B, P] with at least one token."""
    found = f"a {type(input_ids).__name__}"
    if isinstance(input_ids, Tensor):
        is_number = not (input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool)
        if is_number and input_ids.dim() == 2 and input_ids.numel():
            return
        found = f"{input_ids.dtype} of shape {tuple(input_ids.shape)}"
    example = 'such as tokenizer(text, return_tensors="pt").input_ids'
    raise UserError(f"input_ids: {found}; give a LongTensor [batch, length], none empty, {example}")


def checked_drafting(model: GlideMixin, drafting: Drafting, allow_untrained_draft: bool) -> Drafting:
    """Drafting settings that fit a model; the levels of "auto" fit its vocabulary. Raises UserError."""
    method, vocab_size = drafting.method, model.config.vocab_size
    check_drafting(drafting, vocab_size)
    has_draft = model.draft_is_trained or allow_untrained_draft
    if method in GLIDE_METHODS and not has_draft:
        raise UserError(
            f"method: {method!r} needs a trained draft, and this model has a fresh one; load it with its draft "
            "(--draft DRAFT, in Python glide_path=DRAFT or allow_untrained_draft=True), or choose method lookup"
        )
    check_draft_window(drafting, model.draft_model.window)
    widths = drafting.tree_shape if method in ("tree", AUTO) else ()
    shape = tuple(min(int(width), vocab_size) for width in widths)
    return replace(drafting, tree_shape=shape, has_draft=has_draft)


def check_drafting(drafting: Drafting, vocab_size: int = MAX_NODES) -> None:
    """Raise UserError for an unknown method or tree rule, and for a tree or gamma outside its range. vocab_size: that
    of the target, which limits the levels of a tree; the default is for a target that is not read yet."""
    method = drafting.method
    known_methods = (*method_names(), AUTO)
    for name, value, known in (("method", method, known_methods), ("tree_rule", drafting.tree_rule, TREE_RULES)):
        if value not in known:
            raise UserError(f"{name}: {value!r} is unknown; choose one of {', '.join(known)}")
    if method in ("tree", AUTO):
        _check_tree_shape(drafting.tree_shape, vocab_size if method == "tree" else MAX_NODES)
    if drafting.tree_nodes is not None:
        check_integer("tree_nodes", drafting.tree_nodes, 2, MAX_NODES)
    if method not in ("vanilla", "tree"):
        check_integer("gamma", drafting.gamma, 1, MAX_NODES - 1)


def check_draft_window(drafting: Drafting, window: int) -> None:
    """Raise UserError if the draft's window, in tokens, is too small for the method's depth."""
    if drafting.method == "seq":
        check_window(window, drafting.gamma, "gamma")
    elif drafting.method in ("tree", AUTO):
        check_window(window, len(drafting.tree_shape), "tree_shape")


def _check_tree_shape(tree_shape: Any, most: int) -> None:
    """Raise UserError unless tree_shape is a list of level sizes of at most `most` nodes, within MAX_NODES in all."""
    widths = tree_shape if isinstance(tree_shape, Sequence) else ()
    if not widths or not all(is_integer(width) and 1 <= width <= most for width in widths):
        raise UserError(f"tree_shape: {tree_shape!r}; give the nodes of each level, 1 to {most}, as in 4,16,16,16,16")
    if 1 + sum(widths) > MAX_NODES:
        raise UserError(f"tree_shape: {1 + sum(widths)} nodes with the root; a tree has at most {MAX_NODES}")


def check_sampling(max_new_tokens: int, temperature: float, top_p: float, top_k: int, **filters: float) -> None:
    """Raise UserError for sampling settings of a wrong type or outside their range. filters: others of FILTERS."""
    if not is_real(temperature) or not (temperature == 0 or LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE):
        valid = f"from {LEAST_TEMPERATURE:.2g} to {LARGEST_TEMPERATURE:.2g}"
        raise UserError(f"temperature: {temperature!r}; it must be 0 (greedy) or {valid}")
    for name, value in {"max_new_tokens": max_new_tokens, "top_p": top_p, "top_k": top_k, **filters}.items():
        check_option(name, value)


def check_request(request: Request, vocab_size: int, limit: int) -> None:
    """Raise RequestTooLarge for a request of more than `limit` tokens, another UserError if it is malformed."""
    sampling = request.sampling
    check_sampling(request.max_new_tokens, sampling.temperature, **{name: getattr(sampling, name) for name in FILTERS})
    check_seed(sampling.seed)
    if not request.prompt:
        raise UserError("prompt: empty; it needs at least one token")
    for token in (min(request.prompt), max(request.prompt)):
        if not 0 <= token < vocab_size:
            raise UserError(f"prompt: token id {token}, the target has {vocab_size}; use the target's own tokenizer")
    if request.longest > limit:
        raise RequestTooLarge(
            f"prompt of {len(request.prompt)} tokens + max_new_tokens {request.max_new_tokens}: "
            f"{request.longest} tokens, more than the {limit} positions of a row"
        )


def plain(value: Any) -> Any:
    """A number of numpy as one of Python, which JSON and the shapes of kernels take; any other value as it is."""
    return value.item() if isinstance(value, np.generic) else value


def check_seed(seed: int | Sequence[int] | None, rows: int = 1) -> None:
    """Raise UserError unless seed is None, or one or `rows` integers of 64 bits."""
    seeds = [seed] * rows if isinstance(seed, str) or not isinstance(seed, Sequence) else list(seed)
    if len(seeds) != rows:
        raise UserError(f"seed: {len(seeds)} seeds for {rows} rows; give one, or one per row")
    for own in seeds:
        if own is not None:
            check_integer("seed", own, 0, 2**64 - 1)


def check_streamer(streamer: Any, batch: int) -> None:
    """Raise UserError for an object that is not a streamer, and for a streamer with a batch of several rows."""
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise UserError(f"streamer: a {type(streamer).__name__}; give an object with the methods put and end")
    if streamer is not None and batch > 1:
        raise UserError(f"streamer: batch of {batch}; streaming takes a single prompt")


def check_stopping(criteria: Any) -> None:
    """Raise UserError unless `criteria` is None or a list of callables."""
    if criteria is not None and not (isinstance(criteria, Sequence) and all(map(callable, criteria))):
        raise UserError(f"stopping_criteria: a {type(criteria).__name__}; give a list of StoppingCriteria")


def end_tokens(model: GlideMixin, eos_token_id: Any = None) -> set[int]:
    """The ids that end an answer: eos_token_id, an id or a collection or tensor of ids, else the model's own."""
    ids = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
    ids = ids.flatten().tolist() if isinstance(ids, Tensor) else ids
    if not isinstance(ids, Collection) or isinstance(ids, str):
        ids = [] if ids is None else [ids]
    if not all(is_integer(token) for token in ids):
        raise UserError(f"eos_token_id: {ids!r}; give an id, or a list or tensor of ids")
    return {int(token) for token in ids}


def pad_token(model: GlideMixin, pad_token_id: Any) -> int:
    """The id to pad rows with: pad_token_id, else the model's own, else 0."""
    candidates = (pad_token_id, model.generation_config.pad_token_id, model.config.pad_token_id)
    value = next((candidate for candidate in candidates if candidate is not None), 0)
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not is_integer(value) or abs(value) >= 2**31:
        raise UserError(f"pad_token_id: {value!r}; give a token id")
    return int(value)
