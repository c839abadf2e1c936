"""A draft's vocabulary list: where it comes from, and that one that does not fit is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pairs import make_pair, tiny_config

from longspec.errors import UserError
from longspec.models.draft_files import check_draft
from longspec.models.draft_vocabulary import vocabulary_maps
from longspec.models.glide import GlideMixin
from longspec.models.llama import LlamaGlide, LlamaGlideDecoderLayer

TOKENS = torch.tensor([0, 3, 4, 9, 60])
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> GlideMixin:
    """A pair whose draft proposes TOKENS; its target is in `name_or_path`."""
    folder = tmp_path_factory.mktemp("target")
    model = make_pair(folder)
    model.draft_model.set_vocabulary(TOKENS)
    model.name_or_path = str(folder)
    return model


def test_a_state_dict_brings_its_list_and_one_without_lifts_it(pair: GlideMixin) -> None:
    saved = pair.draft_model.state_dict()
    loaded = LlamaGlide.from_pretrained(pair.name_or_path, torch_dtype=torch.bfloat16, state_dict=saved)
    assert torch.equal(loaded.draft_model.vocabulary, TOKENS)
    assert not any(parameter is loaded.draft_model.d2t for parameter in loaded.parameters())
    loaded.load_draft_state({name: w for name, w in saved.items() if name not in ("d2t", "t2d")}, "state")
    assert loaded.draft_model.vocabulary is None


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    return lambda state: state.update({name: change(state[name])})


ASCENDING, DIFFERENT = "the token ids of d2t are not ascending ids in 0 … 60", "d2t and t2d are different lists"
BAD: list[tuple[str, Callable[[State], object]]] = [
    ("its vocabulary list lacks t2d", lambda state: state.pop("t2d")),
    ("its vocabulary list lacks d2t", lambda state: state.pop("d2t")),
    ("d2t is no int64 vector", changed("d2t", lambda d2t: d2t.int())),
    (ASCENDING, changed("d2t", lambda d2t: d2t + torch.tensor([0, 0, 0, 0, 1]))),
    (ASCENDING, changed("d2t", lambda d2t: d2t - 1)),
    (ASCENDING, changed("d2t", lambda d2t: d2t.fill_(2**63 - 1))),
    (ASCENDING, changed("d2t", lambda d2t: d2t - torch.tensor([0, 0, 1, 0, 0]))),
    (DIFFERENT, changed("t2d", lambda t2d: t2d[None])),
    (DIFFERENT, changed("t2d", lambda t2d: t2d.long())),
    (DIFFERENT, changed("t2d", lambda t2d: t2d.roll(1))),
    (DIFFERENT, lambda state: state.update(vocabulary_maps(TOKENS, 62))),
]


@pytest.mark.parametrize(("problem", "change"), BAD)
def test_a_list_that_does_not_fit_is_refused(
    pair: GlideMixin, problem: str, change: Callable[[State], object], tmp_path: Path
) -> None:
    """In one line, by the check before the target is loaded."""
    state = {name: weight.clone() for name, weight in pair.draft_model.state_dict().items()}
    change(state)
    torch.save(state, tmp_path / "draft.pth")
    with pytest.raises(UserError, match=rf"draft\.pth: the draft does not fit the target: {problem}"):
        check_draft(tmp_path / "draft.pth", tiny_config("llama"), LlamaGlideDecoderLayer)


def test_a_fresh_draft_takes_a_list_and_a_saved_one_does_not(pair: GlideMixin) -> None:
    fresh = LlamaGlide.from_pretrained(pair.name_or_path, draft_vocabulary=[9, 0, 60, 4, 3])
    assert torch.equal(fresh.draft_model.vocabulary, TOKENS)
    for tokens in ([], [1, 1], [61], [-1], [0.5], 5):
        with pytest.raises(UserError, match=r"draft_vocabulary: must be a list of distinct token ids in 0 … 60"):
            LlamaGlide.from_pretrained(pair.name_or_path, draft_vocabulary=tokens)
    state = pair.draft_model.state_dict()
    with pytest.raises(UserError, match="draft_vocabulary: for a fresh draft"):
        LlamaGlide.from_pretrained(pair.name_or_path, state_dict=state, draft_vocabulary=[1])
