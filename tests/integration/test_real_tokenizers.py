"""`inference_long-bench.py` on targets with the tokenizers and files that real ones have."""

import json
from pathlib import Path

import pytest
import torch
from real_tokenizers import SHAPES, make_real_target

from longspec.inference.registry import choose_pair
from longspec.longbench.command import main
from longspec.models.families import family_class
from longspec.models.target_files import load_tokenizer, read_config

STOPS = {
    "vicuna": ["</s>"],
    "llama3": ["<|end_of_text|>", "<|eot_id|>"],
    "qwen": ["<|im_end|>", "<|endoftext|>"],
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_target_speaks_its_own_format(tmp_path: Path, shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without any option: its template (or plain text, which one line says), its ends, and vanilla's tokens."""
    target = make_real_target(tmp_path / "target", shape)
    config = read_config(target)
    pair = family_class(config, str(target)).from_pretrained(target, torch_dtype=torch.float32)
    torch.save(pair.draft_model.state_dict(), tmp_path / "draft.pth")
    (tmp_path / "aime24.jsonl").write_text('{"id": 1, "problem": "What is 1 + 1?"}\n')
    (tmp_path / "prompts.json").write_text('{"aime24": "Say {problem}"}')
    given = ["--target", str(target), "--draft", str(tmp_path / "draft.pth"), "--data_path_prefix", str(tmp_path)]
    given += ["--task", "aime24", "--max_gen_len", "12", "--prompt_file", str(tmp_path / "prompts.json")]
    samples, summary = {}, {}
    for method in ("vanilla", "tree"):
        out = tmp_path / method
        summary = main([*given, "--method", method, "--tree_shape", "3", "4", "--output_dir", str(out)])
        samples[method] = json.loads((out / "samples.jsonl").read_text())
    tokenizer = load_tokenizer(str(target), config)
    assert samples["tree"]["token_ids"] == samples["vanilla"]["token_ids"]
    assert tokenizer.convert_ids_to_tokens(summary["config"]["eos_token_id"]) == STOPS[shape]
    assert summary["config"]["chat_format"] == ("plain" if shape == "vicuna" else "tokenizer")
    notice = f"{target}: its tokenizer has no chat template, so prompts are plain text"
    assert capsys.readouterr().out.count(notice) == (2 if shape == "vicuna" else 0)


def test_a_published_target_by_its_hub_id_is_the_published_pair() -> None:
    by_name, by_id = choose_pair("qwq", None, None), choose_pair(None, "Qwen/QwQ-32B-Preview", "mine.pth")
    assert (by_id.eos_token_id, by_id.pad_token_id, by_id.max_positions) == (151645, 151643, by_name.max_positions)
    assert by_id.draft == "mine.pth" and by_id.name == "QwQ-32B-Preview"
    copy = choose_pair(None, "/models/Qwen/QwQ-32B-Preview/", None)
    assert (copy.eos_token_id, copy.pad_token_id, copy.max_positions, copy.draft) == (None, None, None, None)
