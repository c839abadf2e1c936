"""Chat format, EOS and pad token of realistic tokenizers and of the published targets."""

import logging
from pathlib import Path
from typing import Any

import pytest
from real_tokenizers import SHAPES, make_real_target
from tiny_tokenizer import byte_tokenizer
from training_fixtures import ROOT

from longspec.data.target_format import PUBLISHED_TARGETS, answer_end, resolve_chat_format, stop_tokens
from longspec.data.templates import chat_prompt, encode_texts
from longspec.errors import UserError
from longspec.models.target_files import generation_eos, load_tokenizer, position_limit, read_config
from longspec.train.config import load_config
from longspec.train.inputs import Inputs, read_inputs

QWQ, LLAMA3 = "Qwen/QwQ-32B-Preview", "gradientai/Llama-3-8B-Instruct-262k"
OWN = {
    "vicuna": ("plain", "<s> Why?", ["</s>"], "</s>"),
    "llama3": (
        "tokenizer",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ["<|end_of_text|>", "<|eot_id|>"],
        "<|eot_id|>",
    ),
    "qwen3": (
        "tokenizer",
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        ["<|im_end|>", "<|endoftext|>"],
        "<|im_end|>",
    ),
}
"""Shape of target -> its chat format, a prompt as its tokens decode, its stop tokens, the end of a training answer."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    for shape in SHAPES:
        make_real_target(folder / shape, shape)
    return folder


def read(target: Path) -> tuple[Any, Any]:
    config = read_config(target)
    return config, load_tokenizer(str(target), config)


@pytest.mark.parametrize("shape", SHAPES)
def test_format_and_ends_are_the_targets_own(targets: Path, shape: str) -> None:
    config, tokenizer = read(targets / shape)
    own_format, prompt, stops, end = OWN[shape]
    chat_format = resolve_chat_format("auto", str(targets / shape), config.model_type, tokenizer)
    ends = generation_eos(targets / shape, config)
    assert chat_format == own_format
    assert tokenizer.convert_ids_to_tokens(stop_tokens(tokenizer, ends)) == stops
    assert tokenizer.convert_ids_to_tokens(answer_end(tokenizer, ends, chat_format)) == end
    (ids,) = encode_texts([chat_prompt("Why?", config.model_type, tokenizer, chat_format)], tokenizer)
    assert tokenizer.decode(ids) == prompt
    assert ids.count(tokenizer.bos_token_id) == (0 if tokenizer.bos_token_id is None else 1)


@pytest.mark.parametrize("given", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_a_templates_variables_can_be_set(targets: Path, given: dict[str, bool] | str) -> None:
    """Qwen3 without thinking: as transformers renders it when it is given the variable itself."""
    config, plain = read(targets / "qwen3")
    tokenizer = load_tokenizer(str(targets / "qwen3"), config, given)
    turns = [{"role": "user", "content": "Why?"}]
    expected = plain.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    prompt = chat_prompt("Why?", "qwen3", tokenizer, "tokenizer")
    assert prompt == expected and prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert chat_prompt("Why?", "qwen3", plain, "tokenizer").endswith("<|im_start|>assistant\n")
    ends = generation_eos(targets / "qwen3", config)
    assert tokenizer.convert_ids_to_tokens(answer_end(tokenizer, ends, "tokenizer")) == "<|im_end|>"


@pytest.mark.parametrize(
    ("shape", "given", "problem"),
    [
        ("qwen3", {"enable_thought": False}, "the target's chat template has no variable enable_thought"),
        ("qwen3", {"enable_thinking": [1]}, r"enable_thinking must be true, false, a number or text, not \[1\]"),
        ("qwen3", "[1]", "must be a JSON object"),
    ],
)
def test_bad_template_variables_are_one_line(targets: Path, shape: str, given: Any, problem: str) -> None:
    with pytest.raises(UserError, match=f"^chat_template_kwargs: {problem}"):
        load_tokenizer(str(targets / shape), read_config(targets / shape), given)


@pytest.mark.parametrize(("target", "eos", "pad"), [(QWQ, 151645, 151643), (LLAMA3, 128009, 128001)])
def test_published_ids_are_those_of_the_published_targets_alone(target: str, eos: int, pad: int) -> None:
    assert PUBLISHED_TARGETS[target] == (eos, pad)
    tokenizer = byte_tokenizer("{{ messages }}")
    assert resolve_chat_format("auto", target, "llama", tokenizer) == "published"
    assert resolve_chat_format("tokenizer", target, "llama", tokenizer) == "tokenizer"
    assert resolve_chat_format("auto", f"/models/{target}", "llama", tokenizer) == "tokenizer"
    assert resolve_chat_format("published", f"/models/{target}", "llama", tokenizer) == "published"
    for chat_format, family, problem in (
        ("chatml", "llama", "unknown chat_format 'chatml': use one of auto, published"),
        ("published", "gpt2", "no published chat format for model family 'gpt2', only for llama, qwen2"),
        ("tokenizer", "llama", "needs a tokenizer with a chat template"),
    ):
        with pytest.raises(UserError, match=problem):
            resolve_chat_format(chat_format, target, family, byte_tokenizer())


def test_without_a_generation_config_the_tokenizers_eos_ends_answers(targets: Path, tmp_path: Path) -> None:
    config, tokenizer = read(targets / "qwen3")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_tokens(tokenizer, []) == [end] and answer_end(tokenizer, [], "plain") == end
    tokenizer.eos_token = None
    assert answer_end(tokenizer, [5, 6], "plain") == 5 and answer_end(tokenizer, [], "tokenizer") is None
    assert generation_eos(tmp_path, config) == list(config.eos_token_id)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json does not load"):
        generation_eos(tmp_path, config)


def test_old_rope_scaling_stretches_the_window(targets: Path) -> None:
    assert position_limit(read_config(targets / "vicuna")) == 4096


def inputs_of(target: Path, folder: Path, experiment: str, *overrides: str) -> Inputs:
    """The inputs of a published experiment with another target."""
    data = folder / "data.jsonl"
    data.write_text('{"instruction": "Why?", "output": "Because."}\n{"text": "A text."}\n')
    paths = [f"model_name_or_path={target}", f"data.files={data}", f"data.cache_dir={folder}", f"output_dir={folder}"]
    short = ["data.max_length=200", "draft_model_name_or_path=null", "data.num_proc=1"]
    config = load_config(["-cp", str(ROOT / "conf/exp"), "-cn", experiment, *paths, *short, *overrides])
    assert config is not None
    return read_inputs(config)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_published_config_trains_another_target_with_its_own_tokens(
    targets: Path, tmp_path: Path, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = f"{'qwq' if shape == 'qwen3' else 'llama8b'}_glide_8gpu_slim6b_longv2-32k-zero3_5e-6-ligce-nomask"
    own_format, prompt, _, end = OWN[shape]
    overrides: list[str] = []
    if shape == "qwen3":
        overrides = ["model._target_=longspec.Qwen3Glide.from_pretrained"]
        overrides += ["+data.chat_template_kwargs.enable_thinking=false"]
        prompt += "<think>\n\n</think>\n\n"
    with caplog.at_level(logging.INFO, logger="longspec"):
        inputs = inputs_of(targets / shape, tmp_path, experiment, *overrides)
    answer = "\n\nBecause." if own_format == "plain" else "Because."
    (asked,), (text,) = inputs.rows[0], inputs.rows[1]
    assert inputs.tokenizer.decode(asked["input_ids"]) == f"{prompt}{answer}{end}"
    assert inputs.tokenizer.decode(text["input_ids"]).endswith(f"A text.{end}")
    line = f"chat format {own_format}; EOS {asked['input_ids'][-1]} ({end}), padding"
    assert sum(message.startswith(line) for message in caplog.messages) == 1
    notices = [message for message in caplog.messages if "has no chat template, so prompts are plain text" in message]
    assert len(notices) == (own_format == "plain")
    batch = inputs.collate([inputs.rows[0], inputs.rows[1]])
    assert int(batch["labels"].max()) == max(int(asked["input_ids"].max()), int(text["input_ids"].max()))


def test_what_the_user_names_wins(targets: Path, tmp_path: Path) -> None:
    given = ("eos_token_id=7", "model.pad_token_id=9", "data.chat_format=published")
    given += ("+data.templates.instruction='Tell me: {prompt}'",)
    inputs = inputs_of(targets / "llama3", tmp_path, "llama8b_glide_8gpu_slim6b", *given, "data.pack=false")
    (asked,) = inputs.rows[0]
    assert asked["input_ids"][-1] == 7 and inputs.collate.pad_token_id == 9  # type: ignore[attr-defined]
    assert "<s>user\nTell me: Why?</s>\n<s>assistant\nBecause." in inputs.tokenizer.decode(asked["input_ids"])
