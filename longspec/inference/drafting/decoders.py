"""The decoders of the draft architectures by name, and the registration of further architectures."""

from longspec.inference.drafting.decoder import DraftDecoder
from longspec.inference.drafting.eagle3 import Eagle3Decoder
from longspec.inference.drafting.glide import GlideDraft
from longspec.inference.runner import Runner
from longspec.models.architectures import add_architecture
from longspec.models.draft import Draft
from longspec.models.draft_layer import GLIDE

_decoders: dict[str, type[DraftDecoder]] = {GLIDE: GlideDraft, "eagle3": Eagle3Decoder}


def register_draft(draft: type[Draft], decoder: type[DraftDecoder]) -> None:
    """Make a draft architecture available in this process, under the name in its options' class, in training
    (`model.architecture=NAME`) and decoding. Raises UserError for a name that exists."""
    add_architecture(draft)
    _decoders[draft.options_class.architecture] = decoder


def new_decoder(runner: Runner, batch: int, nodes: int) -> DraftDecoder:
    """The decoder of the pair's draft for `batch` rows and trees of at most `nodes` nodes, the root included."""
    return _decoders[runner.model.draft_model.options.architecture](runner, batch, nodes)
