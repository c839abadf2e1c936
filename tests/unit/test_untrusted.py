"""Untrusted files: no code runs, nothing is sent, nothing hangs, and each error is one line."""

import json
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pairs import make_pair, tiny_config
from safetensors.torch import save_file
from test_checkpoint import Made
from tiny_tokenizer import VOCAB_SIZE, byte_tokenizer

from longspec.errors import UserError
from longspec.models.draft_files import check_draft, draft_settings, load_draft, resolve_draft
from longspec.models.families import pair_class
from longspec.models.llama import LlamaGlide, LlamaGlideDecoderLayer
from longspec.models.target_files import load_tokenizer, read_config
from longspec.train.config import read_config_file
from longspec.train.inputs import _make_aligner
from longspec.untrusted import CONFIG_BYTES

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with tokenizer, and its draft in the folder `run` as a training run saves it."""
    place = tmp_path_factory.mktemp("pair")
    model = make_pair(place / "target", vocab_size=VOCAB_SIZE)
    byte_tokenizer().save_pretrained(place / "target")
    (place / "run").mkdir()
    torch.save(model.draft_model.state_dict(), place / "run" / "draft_model_weights.pth")
    return place


@pytest.fixture
def run(pair: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder, to be damaged."""
    return Path(shutil.copytree(pair / "run", tmp_path / "run"))


@pytest.fixture
def target(pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair / "target", tmp_path / "target"))


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    asked = Mock(return_value="no")
    monkeypatch.setattr("builtins.input", asked)
    yield
    asked.assert_not_called()


def use_draft(folder: Path) -> Any:
    config = tiny_config("llama", vocab_size=VOCAB_SIZE)
    return check_draft(folder, config, LlamaGlideDecoderLayer), draft_settings(folder)


def refusal(use: Callable[[], Any], file: Path | str) -> str:
    """The error line, which names `file` and comes within seconds of computing."""
    began = time.process_time()
    with pytest.raises(UserError) as error:
        use()
    message = str(error.value)
    assert str(file) in message and "\n" not in message and len(message) < 8000
    assert time.process_time() - began < 10
    return message


def special(kind: str, file: Path) -> None:
    """A file on which a reader would block or never finish, or that is larger than any configuration."""
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as handle:
            handle.truncate(2**40)  # takes no room on the disk


DRAFT_FILES = ("draft_model_weights.pth", "model.safetensors", "config.json")
SPECIAL = [*((kind, name) for kind in ("fifo", "device") for name in DRAFT_FILES), ("large", "config.json")]


@pytest.mark.parametrize(("kind", "name"), SPECIAL)
def test_only_regular_small_files_are_read_of_a_draft(run: Path, kind: str, name: str) -> None:
    special(kind, run / name)
    problem = f"more than the limit of {CONFIG_BYTES}" if kind == "large" else "not a regular file"
    assert problem in refusal(lambda: use_draft(run), run / name)


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_only_regular_files_are_read_of_a_target(target: Path, kind: str, name: str) -> None:
    special(kind, target / name)
    for use in (LlamaGlide.from_pretrained, lambda folder: load_tokenizer(str(folder), tiny_config("llama"))):
        assert "not a regular file" in refusal(lambda use=use: use(target), target / name)  # type: ignore[misc]


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "aliases"),
        ("model: [" * 5000, "not a readable configuration"),
        ("seed: [", "not a readable configuration"),
        ("seed: !!python/object/apply:os.system ['touch ran']", "not a readable configuration"),
        ("name: evil/${oc.env:SECRET}", "interpolation"),
        (r'name: "evil/\x24{oc.env:SECRET}"', "interpolation"),
    ],
)
def test_a_training_configuration_is_read_within_bounds(
    run: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    monkeypatch.chdir(run)
    file = run / "training_config.yaml"
    file.write_text(text)
    line = refusal(lambda: read_config_file(file), file)
    assert message in line and "hidden" not in line
    assert not (run / "ran").exists()


@pytest.mark.parametrize("name", ["os.system", "subprocess.run", "longspec.models.glide.GlideMixin.from_pretrained"])
def test_only_pair_classes_are_called(name: str) -> None:
    assert pair_class("longspec.train.models.llama_glide.LlamaGlide.from_pretrained") is LlamaGlide
    assert pair_class("longspec.models.llama.LlamaGlide.from_pretrained") is LlamaGlide
    refusal(lambda: pair_class(name), name)


def test_only_aligners_are_called(tmp_path: Path) -> None:
    touch = {"_target_": "pathlib.Path.touch", "_args_": [{"_target_": "pathlib.Path", "_args_": [f"{tmp_path}/ran"]}]}
    rename = {"_target_": "longspec.data.aligners.rename_fields_aligner", "names": touch}
    for entry in (touch, rename | {"names": ["body"]}):
        refusal(lambda entry=entry: _make_aligner(0, entry), "config key data.aligners[0]")  # type: ignore[misc]
    assert callable(_make_aligner(0, rename))
    assert not (tmp_path / "ran").exists()


def test_code_next_to_a_target_or_draft_never_runs(run: Path, target: Path, tmp_path: Path) -> None:
    """Custom config or tokenizer classes, which trust_remote_code would run, are ignored without a prompt."""
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass Evil: pass\n"
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    for folder in (run, target, stranger):
        (folder / "evil.py").write_text(code)
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(code)
        tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "evil.Evil"}}))
    (stranger / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}))
    assert "custom code" in refusal(lambda: read_config(stranger), stranger)
    assert read_config(target).model_type == "llama"  # a known type needs none of its code
    LlamaGlide.from_pretrained(target)
    assert "custom code" in refusal(lambda: load_tokenizer(str(target), tiny_config("llama")), target)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_with_code_is_refused_without_advice_to_run_it(run: Path, legacy: bool) -> None:
    file = run / "draft_model_weights.pth"
    torch.save({"weight": Made(Path.touch, run / "ran")}, file, _use_new_zipfile_serialization=not legacy)
    message = refusal(lambda: use_draft(run), file)
    assert "holds something other than tensors, such as a whole module" in message and "weights_only" not in message
    assert message.endswith("its author can convert it with torch.save(module.state_dict(), FILE))")
    assert not (run / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"PK\x03\x04cut off", "not a readable file of plain weights"),
        (b"\x80\x02cos\nsystem\n(S'true'\ntR.", "not a readable file of plain weights"),
    ],
)
@pytest.mark.parametrize("name", ["draft.pth", "model.safetensors"])
def test_a_file_that_holds_no_weights_says_what_it_is(run: Path, name: str, content: bytes, message: str) -> None:
    (run / name).write_bytes(content)
    line = refusal(lambda: load_draft(run / name), run / name)
    assert message in line and "weights_only" not in line


@pytest.mark.parametrize(
    "weights",
    [
        ({"mlp.up_proj.weight": torch.ones(1).expand(2**20, 2**20)}, {}),
        ({"mlp.up_proj.weight": torch.ones(48, 32, dtype=torch.int32)}, {}),
        ({f"\x1b[2J\n{number}" * 99: torch.ones(1) for number in range(999)}, {}),
        ({"mlp.up_proj.weight": torch.ones(48, 32, device="meta")}, {}),
        ({"mlp.up_proj.weight": torch.ones(48, 32).to_sparse()}, {}),
        ({}, {"draft_window": [1]}),
    ],
    ids=["huge", "whole numbers", "strange names", "without data", "sparse", "no window"],
)
def test_a_strange_state_dict_is_refused_before_it_is_used(run: Path, weights: tuple[Weights, Any]) -> None:
    file = run / "draft_model_weights.pth"
    added, metadata = weights
    state = OrderedDict(torch.load(file) | added)
    state._metadata = {"": metadata}  # type: ignore[attr-defined]
    torch.save(state, file)
    assert "\x1b" not in refusal(lambda: use_draft(run), run)


def test_a_target_with_code_is_refused(target: Path) -> None:
    (target / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Made(Path.touch, target / "ran")}, target / "pytorch_model.bin")
    assert "weights do not load" in refusal(lambda: LlamaGlide.from_pretrained(target), target)
    assert not (target / "ran").exists()


def test_safetensors_are_preferred_to_a_pickle(run: Path) -> None:
    state = torch.load(run / "draft_model_weights.pth")
    save_file({name: weight + 1 for name, weight in state.items()}, run / "model.safetensors")
    torch.save({"weight": Made(Path.touch, run / "ran")}, run / "draft_model_weights.pth")
    assert torch.equal(load_draft(run)["mlp.up_proj.weight"], state["mlp.up_proj.weight"] + 1)


@pytest.mark.parametrize("path", ["/missing/target", "missing/of/many/parts", "./missing", "~/missing", "x" * 3000])
def test_a_missing_folder_is_called_one(path: str) -> None:
    """The error does not call it a malformed repo id."""
    errors = [refusal(lambda: read_config(path), path), refusal(lambda: resolve_draft(path), path)]
    assert "no such folder" in errors[0] and "no such draft" in errors[1]
    assert "/" not in path or "Repo id" not in "".join(errors)


def changed(field: str, value: Any) -> Callable[[str], str]:
    """The text of a JSON file with another value of a field."""
    return lambda text: json.dumps(json.loads(text) | {field: value})


BROKEN = ("{", "null", "[" * 100000)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *(("run/config.json", text) for text in (*BROKEN, '{"draft_window": 1e9}')),
        *(("target/tokenizer.json", text) for text in (*BROKEN, '{"version": "1.0"}')),
        ("target/tokenizer.json", lambda text: text.replace("trim_offsets", "x")),
        ("target/config.json", changed("hidden_act", "no_such")),
        ("target/config.json", changed("rms_norm_eps", "small")),
        ("target/config.json", changed("rope_parameters", {"rope_type": "x"})),
        ("target/config.json", changed("num_hidden_layers", 10**9)),  # to build its modules would take hours
    ],
)
def test_a_broken_file_is_one_clear_line(target: Path, run: Path, file: str, text: Any) -> None:
    path = run.parent / file
    path.write_text(text(path.read_text()) if callable(text) else text)
    if file == "run/config.json":
        refusal(lambda: use_draft(run), run)
    elif file == "target/tokenizer.json":
        refusal(lambda: load_tokenizer(str(target), tiny_config("llama")), target)
    else:
        refusal(lambda: LlamaGlide.from_pretrained(target), target)
        refusal(lambda: LlamaGlide.from_pretrained(target, glide_path=run), target)
