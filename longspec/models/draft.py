"""The interface of a draft architecture: its options, what it reads of the target, its training forward and its files.

Its decoding step is a `DraftDecoder` (`inference.drafting.decoder`). GLIDE (`draft_layer`) is one implementation. See
docs/own-draft.md.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from longspec.errors import UserError
from longspec.kernels.training.segments import Segments
from longspec.kernels.training.varlen_torch import TorchAttention
from longspec.models.draft_vocabulary import MAPS, listed_tokens, vocabulary_maps

MAX_WINDOW = 2**20
Rope = tuple[Tensor, Tensor]
"""The target's rotary table at the tokens' positions: cos, sin, each [B, T, D]."""
KeysValues = tuple[Tensor, Tensor]
"""One layer's keys, rotated, and values, each [B, K, T, D]."""
ARCHITECTURE_KEY, OPTIONS_KEY = "draft_architecture", "draft_options"
"""Keys of a draft's architecture and its options in `config.json` and in the metadata of its weight file."""


@dataclass(frozen=True)
class Options:
    """Options of a draft's architecture. They are saved with the draft, so their values are numbers, text and tuples.

    A subclass names its architecture and raises UserError in `__post_init__` for values that no draft can have.
    """

    architecture: ClassVar[str]
    """Name of the architecture, as in the config key `model.architecture`."""
    window: int = MAX_WINDOW
    """Tokens before its own that a query of the draft sees; unlike the other options it can be changed."""

    @classmethod
    def checked(cls, stated: Mapping[str, Any], prefix: str = "") -> Self:
        """Options from `stated`; a missing name has its default. prefix: precedes names in errors. Raises UserError."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(stated) - set(known)):
            raise UserError(f"{prefix}{unknown[0]}: {cls.architecture} has no such option, only {', '.join(known)}")
        lists = {name: tuple(x) for name, x in stated.items() if isinstance(x, Sequence) and not isinstance(x, str)}
        try:
            return cls(**{**stated, **lists})
        except UserError as error:
            raise UserError(f"{prefix}{error}") from error

    def __post_init__(self) -> None:
        window = self.window
        if not isinstance(window, int) or isinstance(window, bool) or not 1 <= window <= MAX_WINDOW:
            raise UserError(f"window: must be a whole number of tokens in 1 … {MAX_WINDOW} (the draft's window)")

    def check_target(self, config: Any, source: str) -> None:
        """Raise UserError unless the draft fits a target with `config`. source: name of the setting or the draft."""

    def check_fresh(self, config: Any, source: str) -> None:
        """Raise UserError unless a fresh draft can start for a target with `config`. source: name of the setting."""

    def entries(self) -> dict[str, Any]:
        """The entries for a draft's files, from which `checked` restores the options."""
        return {ARCHITECTURE_KEY: self.architecture, OPTIONS_KEY: asdict(self)}


@dataclass(frozen=True)
class Reads:
    """What a draft reads of the target's pass, besides embeddings and rotary table."""

    kv_layers: tuple[int, ...] = ()
    """Layers of which it reads the keys and values, in this order."""
    layer_inputs: tuple[int, ...] = ()
    """Layers of which it reads the input, that is the output of the layer before. Decoding passes them to `feed`."""
    hidden: bool = False
    """Whether it reads the hidden state after the final norm."""


class TargetStates(NamedTuple):
    """Results of the target's pass in training."""

    hidden: Tensor
    """[B, T, hidden] after the final norm."""
    keys_values: list[KeysValues]
    """Of `Reads.kv_layers`, in their order."""
    layer_inputs: Tensor | None = None
    """[B, T, n · hidden], those of the n layers of `Reads.layer_inputs` next to each other; None without any."""


@dataclass(frozen=True)
class TrainingPass:
    """What a draft's training forward works on: B rows of T tokens, which consist of M segments."""

    tokens: Tensor
    """LongTensor [B, T]."""
    positions: Tensor
    """LongTensor [B, T]."""
    embeddings: Tensor
    """[B, T, hidden], the target's."""
    rope: Rope
    segments: Segments
    attention: TorchAttention
    """The attention of the pair's device and dtype, over flattened tokens."""
    target: TargetStates

    def newest_hidden(self, lags: Tensor | None) -> Tensor:
        """The target's hidden state [B, T, hidden] at the newest token that each query reads; 0 where there is none.

        lags: as in `Draft.training_forward`.
        """
        numbers = self.segments.newest_keys(lags)
        rows = self.target.hidden.flatten(0, 1).index_select(0, numbers.clamp(min=0))
        return rows.masked_fill((numbers < 0)[:, None], 0).view_as(self.target.hidden)


class Draft(nn.Module):
    """A draft: a module whose parameters train, while the target is frozen.

    A subclass has `options_class`, sets `reads` if it reads more than embeddings, and implements `training_forward`.
    """

    options_class: ClassVar[type[Options]]
    published_names: ClassVar[tuple[str, ...]] = ()
    """Entries of `architectures` in `config.json` by which published drafts of other projects are recognized."""
    reads = Reads()
    trained_lags: int | None = None
    """Number of lags 1, 2, ... that every training step covers; None for one random lag per segment."""
    lag_weights: Sequence[float] = ()
    """Weights of the losses at the lags 1 … `trained_lags`; they count relative to their sum."""
    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: Any, options: Options) -> None:
        """config: the target's."""
        super().__init__()
        self.options: Any = options
        self.vocab_size: int = config.vocab_size
        # The vocabulary list; a draft without one has no such entries in its state dict.
        for name in MAPS:
            self.register_buffer(name, None)

    @abstractmethod
    def training_forward(self, given: TrainingPass, lags: Sequence[Tensor | None]) -> list[Tensor]:
        """Hidden states [B, T, hidden] for each entry of `lags`; at i they predict token i + 1, as input of the head.

        An entry is a LongTensor [M], the lag of each segment: the query at i reads nothing of the target after token
        i - lag. None is the block pattern of the variant "base" (see docs/config.md), and not for drafts with
        `trained_lags`. In decoding, level d of a tree is proposed at lag d.
        """

    @property
    def head(self) -> nn.Linear | None:
        """The draft's own head over its vocabulary; None if it uses the target's."""
        return None

    @property
    def window(self) -> int:
        """Self-attention window W in tokens."""
        return self.options.window

    @window.setter
    def window(self, tokens: int) -> None:
        self.options = replace(self.options, window=tokens)

    @property
    def vocabulary(self) -> Tensor | None:
        """The token ids that the draft proposes, LongTensor [Vd], ascending; None for the whole vocabulary."""
        return None if self.d2t is None else listed_tokens(self.d2t)

    def set_vocabulary(self, tokens: Tensor | None) -> None:
        """Restrict the draft to `tokens`, ascending ids, LongTensor [Vd]; None lifts the restriction."""
        device = next(self.parameters()).device
        maps = {} if tokens is None else vocabulary_maps(tokens.to(device), self.vocab_size)
        for name in MAPS:
            self.register_buffer(name, maps.get(name))

    def reset_parameters(self, std: float) -> None:
        """A fresh draft: weights N(0, std), biases 0, norms 1."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=std)

    def start_from_target(self, target: Any) -> None:
        """Take weights of a fresh draft from the target, which has `model` and `lm_head`."""

    def renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights from a file under the names of this module; those without a use are left out."""
        return dict(weights)

    def shapes(self, weights: Mapping[str, Tensor], listed: int | None) -> dict[str, torch.Size]:
        """The shapes that the weights of a file must have, by name, without the vocabulary list.

        weights: those of the file. listed: length of its vocabulary list; None without one.
        """
        return {name: weight.shape for name, weight in self.state_dict().items() if name not in MAPS}

    def load(self, weights: Mapping[str, Tensor], tokens: Tensor | None, target: Any) -> None:
        """Load weights that have the right shapes. tokens: the vocabulary list. target: as in `start_from_target`."""
        self.set_vocabulary(tokens)
        self.load_state_dict(dict(weights))

    @classmethod
    def published_options(cls, config: Mapping[str, Any], prefix: str) -> Options:
        """The options of a published draft from its `config.json`. prefix: precedes names in errors."""
        raise NotImplementedError

    @classmethod
    def folder_config(cls, config: Any, options: Options, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """The content of `config.json` in a draft's folder, next to `options.entries()`. config: the target's."""
        return json.loads(config.to_json_string())
