"""The pair of a command: loaded by name or path, with a method that it supports."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import transformers

from longspec.cli.options import PairOptions, ShapeOptions
from longspec.data.aligners import Turn
from longspec.data.target_format import AUTO, resolve_chat_format, stop_tokens
from longspec.data.templates import conversation_text, encode_texts
from longspec.errors import UserError
from longspec.inference.arguments import check_sampling, checked_drafting, chosen_attention, end_tokens
from longspec.inference.engine.requests import Request
from longspec.inference.generate import GenerationOutput, generate, make_requests
from longspec.inference.load_pair import load_pair
from longspec.inference.methods import AUTO as AUTO_METHOD
from longspec.inference.methods import GLIDE_METHODS, Drafting
from longspec.inference.options import FILE_OPTIONS, WITHOUT_FILE, report_ignored
from longspec.inference.request import ALWAYS, FILTER_OPTIONS
from longspec.inference.token_options import token_settings, with_word_ids
from longspec.models.glide import GlideMixin
from longspec.models.packaged_targets import SMOLLM2
from longspec.models.target_files import position_limit
from longspec.signals import is_first_rank


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(ShapeOptions):
    """The sampling options of an answer. Meanings and ranges are those of `longspec.generate`; what is None has the
    value of the target's generation config."""

    max_new_tokens: int
    token_options: Mapping[str, Any] = field(default_factory=dict)
    """Entries of `token_options.COMMAND_OPTIONS`; others have the values of the target's generation config."""

    def __post_init__(self) -> None:
        """Raises UserError."""
        filters = {name: value for name in FILTER_OPTIONS if (value := getattr(self, name)) is not None}
        check_sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k, **filters)
        # Whether the target has the tokens is checked with its weights.
        token_settings(self.token_options, (), ALWAYS)


@dataclass
class LoadedPair:
    """A pair with its decoding method and its chat format."""

    name: str
    model: GlideMixin
    tokenizer: Any
    method: str
    chat_format: str
    """One of `data.templates.CHAT_FORMATS`."""
    stop_ids: list[int]
    """The tokens that end an answer."""
    drafting: dict[str, Any] = field(default_factory=dict)
    """Arguments of `longspec.generate` in addition to the method; see `DraftingOptions.arguments`."""
    deterministic: bool = False
    """As for `longspec.generate`."""
    applied: Collection[str] = FILE_OPTIONS
    """The options whose defaults are those of the target's generation config."""

    @property
    def positions(self) -> int:
        """Context length: maximum number of tokens of a prompt plus its answer."""
        return position_limit(self.model.config)

    def encode(
        self, prompts: Sequence[str | list[Turn]], variables: Mapping[str, Any] | None = None
    ) -> list[list[int]]:
        """Token ids of each prompt. Text is encoded as it is, a conversation in the chat format. variables: those of
        the chat template, in addition to the command's. Raises UserError."""
        family, chat_format = self.model.config.model_type, self.chat_format
        texts = (
            prompt
            if isinstance(prompt, str)
            else conversation_text(prompt, family, self.tokenizer, chat_format, variables=variables)
            for prompt in prompts
        )
        return encode_texts(list(texts), self.tokenizer)

    def generate(self, prompts: list[list[int]], sampling: SamplingOptions, **options: Any) -> GenerationOutput:
        """Call `longspec.generate` on token ids. options: its other arguments."""
        settings = {"method": self.method, "eos_token_id": self.stop_ids, **self.drafting, **self._arguments(sampling)}
        return generate(self.model, prompts, deterministic=self.deterministic, **(settings | options))

    def _arguments(self, sampling: SamplingOptions) -> dict[str, Any]:
        """Sampling options as arguments of `longspec.generate`."""
        # `open_pair` has said which of them the target's generation config sets.
        ignored = {name: None for name in WITHOUT_FILE if name not in self.applied}
        given = {name: value for name, value in vars(sampling).items() if value is not None}
        penalties = with_word_ids(given.pop("token_options"), self.tokenizer)
        return ignored | given | penalties

    def requests(self, prompts: Sequence[list[int]], sampling: SamplingOptions, seeds: Sequence[int]) -> list[Request]:
        """A request for each prompt, token ids, with a seed of its own. Raises UserError."""
        options = self._arguments(sampling)
        shape = (options.pop(name) for name in ("max_new_tokens", "temperature", "top_p", "top_k"))
        return make_requests(self.model, prompts, seeds, options, self.stop_ids, *shape)

    def decoding(self) -> dict[str, Any]:
        """The arguments `model`, `drafting` and `attention` of `inference.answering`. Raises UserError."""
        drafting = checked_drafting(self.model, Drafting(self.method, **self.drafting), False)
        attention = chosen_attention("auto", self.deterministic)
        return {"model": self.model, "drafting": drafting, "attention": attention}


def open_pair(
    source: PairOptions, method: str | None, repeats: bool = False, applied: Collection[str] | None = FILE_OPTIONS
) -> LoadedPair:
    """Load a pair by name, hub id, folder or GGUF file; None is the embedded pair.

    method: None is auto or, with `repeats`, vanilla on a CPU and tree on a GPU, lookup there without a trained draft.
    repeats: whether sampled answers must not depend on measured times, as auto's do. applied: the options of the
    target's generation config that the command applies; a note on stderr names the others that would change answers.
    None if it ignores the config on request. Raises UserError.
    """
    name = SMOLLM2 if source.model is None else source.model
    transformers.utils.logging.disable_progress_bar()
    model, tokenizer = load_pair(
        name, source.draft, source.dtype, source.device, chat_template_kwargs=source.chat_template_kwargs
    )
    if method in GLIDE_METHODS and not model.draft_is_trained:
        raise UserError(f"--method {method}: needs a trained draft of {name}; give its --draft, or --method lookup")
    if method is None:
        method = AUTO_METHOD
        if repeats:
            drafted = "tree" if model.draft_is_trained else "lookup"
            method = "vanilla" if model.device.type == "cpu" else drafted
        if not model.draft_is_trained and method != "vanilla":
            _note(f"{name}: no trained draft, so tokens are proposed by prompt lookup (--method {method})")
    if applied is not None:
        report_ignored(model.generation_config, name, applied, _note)
    target = str(model.config.name_or_path)
    chat_format = resolve_chat_format(AUTO, target, model.config.model_type, tokenizer)
    stop_ids = stop_tokens(tokenizer, sorted(end_tokens(model)))
    if chat_format == "plain":
        _note(f"{name}: its tokenizer has no chat template, so prompts are plain text")
    return LoadedPair(name, model, tokenizer, method, chat_format, stop_ids, {}, source.deterministic, applied or ())


def _note(line: str) -> None:
    if is_first_rank():  # once per launch
        print(line, file=sys.stderr, flush=True)
