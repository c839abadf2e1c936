"""The decoding methods: one engine with a drafter per method. Importing this module loads no other library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspec.errors import UserError

if TYPE_CHECKING:
    from longspec.inference.drafting.proposal import Drafter
    from longspec.inference.runner import Runner
    from longspec.inference.sampling import Sampler
    from longspec.models.glide import GlideMixin

METHODS = ("vanilla", "seq", "tree", "magicdec", "lookup")
"""The methods that draft in one way."""
GLIDE_METHODS = ("seq", "tree")
"""The methods that need a trained draft."""
TREE_RULES = ("reject", "descend")
"""The ways to draft and accept a tree above temperature 0 (see `drafting.tree`)."""
AUTO = "auto"
"""The method that chooses between vanilla, lookup and draft trees before each round (see `adaptive`)."""
DEFAULT_SHAPE = (4, 16, 16, 16, 16)
"""The paper's tree: number of nodes in each level below the root."""
DEFAULT_GAMMA = 4


def parse_shape(text: str) -> tuple[int, ...]:
    """The nodes of each level of a tree, written with commas or spaces. Raises UserError."""
    if not (widths := text.replace(",", " ").split()) or not all(width.isdecimal() for width in widths):
        raise UserError(f"--tree_shape: {text!r}; give the nodes of each level, as in 4,16,16")
    return tuple(map(int, widths))


@dataclass(frozen=True)
class Drafting:
    """How tokens are proposed. The meaning of each field is that of `longspec.generate`."""

    method: str
    tree_shape: Sequence[int] = DEFAULT_SHAPE
    gamma: int = DEFAULT_GAMMA
    tree_rule: str = TREE_RULES[0]
    tree_nodes: int | None = None
    lookup_branches: bool = False
    has_draft: bool = True
    """Whether method "auto" plays trees."""


MakeDrafter = Callable[["Runner", int, int], "Drafter"]
"""(runner, batch, gamma) -> a drafter for `batch` rows."""
_own: dict[str, MakeDrafter] = {}


def register_method(name: str, make: MakeDrafter) -> None:
    """Make a drafting method available as `method=NAME` in this process. make: called with the model's runner, the
    number of rows and `gamma`; returns a `Drafter`. Raises UserError for a name that exists."""
    if name in (*method_names(), AUTO):
        raise UserError(f"register_method: there is a method {name!r}; choose another name")
    _own[name] = make


def method_names() -> tuple[str, ...]:
    """METHODS and the registered ones."""
    return (*METHODS, *_own)


def make_drafter(
    drafting: Drafting, runner: "Runner", batch: int, sampler: "Sampler", is_served: bool = False
) -> "Drafter":
    """The drafter of a method for `batch` rows. sampler: the draft's. is_served: whether "auto" is to have few plans,
    because their rounds exist for several batch sizes and ways to sample."""
    if drafting.method in _own:
        return _own[drafting.method](runner, batch, drafting.gamma)
    from longspec.inference.adaptive.plan_drafters import PlanDrafters, plans_for
    from longspec.inference.drafting.chain import ChainDrafter, NoDraft
    from longspec.inference.drafting.decoders import new_decoder
    from longspec.inference.drafting.lookup import LookupBranches, LookupDrafter, TokenHistory
    from longspec.inference.drafting.magicdec import SparseTarget
    from longspec.inference.drafting.tree import TreeDrafter

    if drafting.method == AUTO:
        plans = plans_for(drafting, runner.device.type == "cpu", batch, is_served)
        return PlanDrafters(runner, batch, sampler, plans, drafting)
    gamma, sampler = drafting.gamma, sampler.on(runner.backend)
    if drafting.method == "tree":
        lookup = LookupBranches(runner, TokenHistory(batch, runner.device)) if drafting.lookup_branches else None
        shape, nodes = drafting.tree_shape, drafting.tree_nodes
        return TreeDrafter(runner, batch, shape, sampler, drafting.tree_rule, nodes=nodes, lookup=lookup)
    if drafting.method == "seq":
        return ChainDrafter(new_decoder(runner, batch, gamma), gamma, sampler)
    if drafting.method == "magicdec":
        return ChainDrafter(SparseTarget(runner, batch, gamma), gamma, sampler)
    if drafting.method == "lookup":
        return LookupDrafter(TokenHistory(batch, runner.device), gamma)
    return NoDraft()


def uses_draft(drafting: Drafting) -> bool:
    """Whether the method drafts with the pair's draft."""
    return drafting.method in GLIDE_METHODS or (drafting.method == AUTO and drafting.has_draft)


def list_length(model: "GlideMixin", drafting: Drafting) -> int | None:
    """Length of the vocabulary list of the draft that the method uses; None without one."""
    vocabulary = model.draft_model.vocabulary
    return len(vocabulary) if uses_draft(drafting) and vocabulary is not None else None
