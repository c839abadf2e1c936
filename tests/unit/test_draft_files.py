"""Every form of draft on disk loads to the same weights and vocabulary list; a draft that does not fit is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from pairs import OPTIONS, make_pair, tiny_config
from safetensors.torch import save_file
from transformers import AutoConfig

from longspec.errors import UserError
from longspec.inference.registry import DRAFTS, EMBEDDED_DRAFTS
from longspec.models.draft_files import check_draft, draft_settings, list_size, load_draft
from longspec.models.draft_layer import DraftOptions
from longspec.models.draft_saving import save_draft_file, save_draft_folder
from longspec.models.draft_vocabulary import vocabulary_maps
from longspec.models.families import family_class
from longspec.models.glide import GlideMixin
from longspec.models.llama import LlamaGlide, LlamaGlideDecoderLayer
from longspec.models.target_sample import take_sample
from longspec.models.weight_files import read_metadata

PUBLISHED_NAMES = (
    [f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")]
    + [f"cross_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")]
    + ["self_attn.o_proj.weight", "cross_attn.o_proj.weight"]
    + [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    + ["input_layernorm.weight", "post_self_attention_layernorm.weight", "post_cross_attention_layernorm.weight"]
)
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


def published_state() -> State:
    """Random weights under exactly the parameter names of the published drafts, dead cross k/v included."""
    generator, layer = torch.Generator().manual_seed(3), LlamaGlideDecoderLayer(tiny_config("llama")).state_dict()
    shapes = {name: layer[name if name in layer else name.replace("cross", "self")].shape for name in PUBLISHED_NAMES}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(state: State, form: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    if form == "pth":
        torch.save(state, folder / "any_name.pth")
        return folder / "any_name.pth"
    if form == "folder":
        whole = {f"draft_model.{k}": w for k, w in state.items()} | {"model.norm.weight": torch.ones(1)}
        torch.save(whole, folder / "draft_model_weights.pth")  # next to the weights of the target
        return folder
    tiny_config("llama").save_pretrained(folder)
    if form == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif form == "sharded safetensors":
        names = list(state)
        for part in (0, 1):
            save_file({n: state[n] for n in names[part::2]}, folder / f"model-0000{part + 1}-of-00002.safetensors")
    else:
        torch.save(state, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("form", ["pth", "folder", "safetensors", "sharded safetensors", "bin"])
def test_published_names_load_from_every_form(pair: GlideMixin, tmp_path: Path, form: str) -> None:
    state = published_state()
    draft = write(state, form, tmp_path / "draft")
    model = LlamaGlide(tiny_config("llama"), pair.name_or_path, glide_path=draft, torch_dtype=torch.float32)
    loaded = model.draft_model.state_dict()
    assert set(state) - set(loaded) == {f"cross_attn.{p}_proj.{k}" for p in "kv" for k in ("weight", "bias")}
    assert all(torch.equal(weight, state[name]) for name, weight in loaded.items())


def test_matrices_in_8_bits_come_back_within_half_a_step_of_their_row(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "target")
    pair.draft_model.set_vocabulary(torch.arange(0, pair.config.vocab_size, 2))
    zeros = torch.zeros_like(pair.draft_model.mlp.up_proj.weight)
    draft = pair.draft_model.state_dict() | {"mlp.up_proj.weight": zeros}
    save_draft_folder(draft, pair.config, tmp_path / "whole")
    save_draft_folder(draft, pair.config, tmp_path / "small", int8=True)
    back = load_draft(tmp_path / "small")
    assert back.keys() == draft.keys()
    for name, weight in draft.items():
        if weight.dim() == 2:
            step = weight.abs().amax(1, keepdim=True) / 127
            assert ((back[name] - weight).abs() <= step * 0.501).all()
        else:
            assert torch.equal(back[name], weight)
    small, whole = ((tmp_path / folder / "model.safetensors").stat().st_size for folder in ("small", "whole"))
    assert small < whole / 2

    broken = safetensors.torch.load_file(tmp_path / "small" / "model.safetensors")
    del broken["self_attn.q_proj.weight_scale"]
    safetensors.torch.save_file(broken, tmp_path / "small" / "model.safetensors")
    with pytest.raises(UserError, match=r"small: self_attn\.q_proj\.weight is int8 without self_attn"):
        load_draft(tmp_path / "small")


@pytest.mark.parametrize("form", ["pth", "hub", "file of the hub's folder", "saved pair"])
def test_all_that_belongs_to_a_draft_comes_back_from_every_form(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, options, vocabulary list and target, also where the weight file alone is moved. A target of the same
    shape with other weights is reported; the same one says nothing, in any dtype."""
    options = DraftOptions(64, (1, 0), True)
    pair = make_pair(tmp_path / "first", dtype=torch.bfloat16, options=options)
    make_pair(tmp_path / "second", seed=7)
    pair.draft_model.set_vocabulary(TOKENS)
    state, sample = pair.draft_model.state_dict(), take_sample(pair, str(tmp_path / "first"))
    draft = tmp_path / "draft"
    if form == "pth":
        save_draft_file(state, tmp_path / "out" / "x.pth", options, sample)
        draft = (tmp_path / "out" / "x.pth").rename(tmp_path / "moved.pth")
        plain = LlamaGlideDecoderLayer(pair.config, options)  # still plain weights for everybody else
        plain.set_vocabulary(TOKENS)
        plain.load_state_dict(torch.load(draft, weights_only=True))
    elif form == "saved pair":
        pair.save_pretrained(draft)
    else:
        save_draft_folder(state, pair.config, draft, options, target=sample)
    if form.startswith("file"):
        draft = (draft / "model.safetensors").rename(tmp_path / "moved.safetensors")

    saved = load_draft(draft)
    assert saved.keys() == state.keys() and all(torch.equal(saved[name], weight) for name, weight in state.items())
    assert saved["d2t"].dtype == torch.int64 and saved["d2t"].tolist() == [0, 2, 2, 6, 56]
    assert saved["t2d"].dtype == torch.bool and saved["t2d"].nonzero()[:, 0].tolist() == TOKENS.tolist()
    assert list_size(draft) == 5 and draft_settings(draft).options == options
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded = LlamaGlide.from_pretrained(tmp_path / "first", glide_path=draft, dtype=dtype).draft_model
        assert loaded.options == options and torch.equal(loaded.vocabulary, TOKENS)
    assert not caplog.records
    LlamaGlide.from_pretrained(tmp_path / "second", glide_path=draft)
    assert "was trained for first, whose weights are not those of second" in caplog.text


def test_files_of_a_published_draft_say_no_more_than_its_window(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "target")
    state = pair.draft_model.state_dict()
    save_draft_file(state, tmp_path / "x.pth")
    save_draft_folder(state, pair.config, tmp_path / "hub")
    assert state.keys() == set(PUBLISHED_NAMES) - {f"cross_attn.{p}_proj.{k}" for p in "kv" for k in ("weight", "bias")}
    assert read_metadata(tmp_path / "x.pth") == {"version": 1, "draft_window": 512}
    assert read_metadata(tmp_path / "hub" / "model.safetensors") == {"format": "pt", "draft_window": "512"}
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert [key for key in config if key.startswith("draft_")] == ["draft_window"]
    assert load_draft(tmp_path / "hub").keys() == state.keys() and list_size(tmp_path / "hub") is None


def test_a_draft_that_reads_a_layer_beyond_the_targets_is_refused(tmp_path: Path) -> None:
    """The last layer counts as beyond: every draft reads it anyway. The target is not loaded yet."""
    state = make_pair(tmp_path / "target", options=OPTIONS["both"]).draft_model.state_dict()
    deep = tiny_config("llama", num_hidden_layers=4)
    save_draft_folder(state, deep, tmp_path / "draft", DraftOptions(64, (2,), True))
    with pytest.raises(UserError, match="/draft: the draft's kv_layers contain layer 2, but this target of 3"):
        check_draft(tmp_path / "draft", tiny_config("llama"), LlamaGlideDecoderLayer)
    assert check_draft(tmp_path / "draft", deep, LlamaGlideDecoderLayer)


def test_options_that_mean_nothing_are_named(tmp_path: Path) -> None:
    folder = write(published_state(), "safetensors", tmp_path)
    for option, stated in (("kv_layers", [-1]), ("kv_layers", "all"), ("target_feature", 1), ("mlp_size", 0)):
        (folder / "config.json").write_text(json.dumps({f"draft_{option}": stated}))
        with pytest.raises(UserError, match=f"{folder}: {option}: must be"):
            draft_settings(folder)


def test_the_windows_of_a_file_and_its_folder(tmp_path: Path) -> None:
    """The weight file's own comes first, then that of config.json. A state dict brings that of its file."""
    state = make_pair(tmp_path / "target").draft_model.state_dict()
    folder = write(state, "folder", tmp_path / "draft")
    (folder / "config.json").write_text('{"draft_window": 80}')
    assert draft_settings(folder).options.window == 80
    save_draft_file(state, folder / "draft_model_weights.pth", DraftOptions(64))
    for draft in (folder, folder / "draft_model_weights.pth"):
        assert draft_settings(draft).options.window == 64
    state = torch.load(folder / "draft_model_weights.pth", weights_only=True)
    for given, window in (({}, 64), ({"window": 128}, 128)):
        pair = LlamaGlide.from_pretrained(tmp_path / "target", state_dict=state, **given)
        assert pair.draft_model.window == window


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("mlp.up_proj.weight"), "missing mlp.up_proj.weight"),
        (lambda s: s.update({"extra.weight": torch.ones(1)}), "unexpected 'extra.weight'"),
        (
            lambda s: s.update({"self_attn.k_proj.weight": torch.ones(32, 32)}),
            r"self_attn.k_proj.weight is \[32, 32\], the target needs \[16, 32\]",
        ),
        (lambda s: s["self_attn.q_proj.bias"].fill_(torch.nan), r"weight self_attn\.q_proj\.bias contains NaN or Inf"),
    ],
)
def test_weights_that_do_not_fit_are_named(pair: GlideMixin, tmp_path: Path, change, message: str) -> None:
    """On every route, also when configs ignore mismatched sizes."""
    state = published_state()
    change(state)
    file = write(state, "pth", tmp_path)
    with pytest.raises(UserError, match=message):
        check_draft(file, tiny_config("llama"), LlamaGlideDecoderLayer)
    for route in ({"state_dict": state}, {"glide_path": file}):
        with pytest.raises(UserError, match=message):
            LlamaGlide.from_pretrained(pair.name_or_path, ignore_mismatched_sizes=True, **route)


def test_draft_of_another_head_layout_with_the_same_shapes_is_named(tmp_path: Path) -> None:
    folder = write(published_state(), "safetensors", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8, "head_dim": 4}))
    with pytest.raises(UserError, match="num_attention_heads 8; this target has 4"):
        check_draft(folder, tiny_config("llama"), LlamaGlideDecoderLayer)


def test_the_folder_of_a_run_names_its_draft(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-last").mkdir(parents=True)
    with pytest.raises(UserError, match=r"/run: no draft in this folder .*; give .*/run/checkpoint-last$"):
        check_draft(tmp_path / "run", tiny_config("llama"), LlamaGlideDecoderLayer)


@pytest.mark.parametrize("name", sorted(EMBEDDED_DRAFTS.values()))
def test_an_embedded_draft_fits_the_target_of_its_config_and_is_small(name: str) -> None:
    folder = DRAFTS / name
    config = AutoConfig.from_pretrained(folder)
    check_draft(folder, config, family_class(config, name).draft_layer_class)
    assert (folder / "model.safetensors").stat().st_size <= 40e6 and (folder / "README.md").is_file()


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
    ("d2t is no int64 vector", changed("d2t", lambda d2t: d2t.int())),
    (ASCENDING, changed("d2t", lambda d2t: d2t + torch.tensor([0, 0, 0, 0, 1]))),
    (ASCENDING, changed("d2t", lambda d2t: d2t.fill_(2**63 - 1))),
    (ASCENDING, changed("d2t", lambda d2t: d2t - torch.tensor([0, 0, 1, 0, 0]))),
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
