"""The experiment up to its trained pairs, with models of a few thousand weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairs import make_pair
from tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from transformers import AutoModelForCausalLM

from longspec.models.draft_files import load_draft
from scripts.pipeline.files import TEXTS, read_jsonl
from scripts.reproduce.corpus import DRAFT_ANSWERS, DRAFT_TEXTS, HELD_OUT_LONG
from scripts.reproduce.generated import GenerationSettings, write_generated
from scripts.reproduce.run import VARIANTS, Run
from scripts.reproduce.settings import PRESETS
from scripts.reproduce.training import train_pairs


def test_a_preset_for_a_gpu_is_refused_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the command would set it for this whole process
    from scripts.reproduce import __main__ as command

    monkeypatch.setattr(command, "gpus", lambda: 0)
    monkeypatch.setattr("sys.argv", ["reproduce", "--preset", "h200", "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        command.main()
    assert stop.value.code == 2 and not (tmp_path / "out").exists()
    assert capsys.readouterr().err == (
        "error: --preset h200: needs a CUDA device, and there is none; use --preset cpu\n"
    )


@pytest.mark.slow
def test_from_nothing_to_a_draft_of_each_variant_and_a_second_call_does_nothing(tmp_path: Path, capsys) -> None:
    """One stage, which is what launches cost; that the stages follow one another is the demo's test."""
    texts = tmp_path / "texts"
    texts.mkdir()
    solutions = [{"source": f"How much is {n} plus {n}?", "target": f"It is {n + n}."} for n in range(60)]
    for name, part in (("train", solutions[:40]), ("test", solutions[40:])):
        (texts / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
    settings = PRESETS["tiny"]("llama", str(texts))
    settings = replace(settings, stages=settings.stages[:1])
    run = Run(tmp_path / "run", "llama", "tiny")
    train_pairs(run, settings)

    assert {path.name for path in (run.root / "tasks").glob("*.jsonl")} == {
        f"{task}-{context}.jsonl" for task in ("lcc", "repobench-p", "gsm8k") for context in settings.corpus.contexts
    }
    corpus = run.root / "corpus"
    read = "".join(record["text"] for record in read_jsonl(corpus / TEXTS))
    code = [record["target"] for record in read_jsonl(corpus / DRAFT_ANSWERS) if "Question:" not in record["source"]]
    assert code and not any(answer in read for answer in code if len(answer) > 40), "the target has read them"
    assert read_jsonl(corpus / HELD_OUT_LONG)
    trained = json.loads((run.target / "training.json").read_text())
    assert trained[-1]["step"] == settings.target.steps
    assert trained[-1]["held_out_loss"] < trained[0]["held_out_loss"]
    target = AutoModelForCausalLM.from_pretrained(run.target)
    assert target.config.num_hidden_layers == settings.target.layers
    drafts = [load_draft(run.draft(variant, 1)) for variant in VARIANTS]
    assert not torch.equal(drafts[0]["cross_attn.q_proj.weight"], drafts[1]["cross_attn.q_proj.weight"])
    for variant, stages in zip(VARIANTS, (settings.stages, settings.compared_stages), strict=True):
        folder = run.root / run.stage(variant, 1)
        assert len(read_jsonl(folder / "metrics.jsonl")) == stages[0].steps
        assert "Tokenising" not in (folder / "log.txt").read_text(), "the rows were not found in the cache"

    capsys.readouterr()
    train_pairs(run, settings)
    assert capsys.readouterr().out.count("done before") == 9


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_target_goes_on_with_the_corpus_in_words_of_its_own(tmp_path: Path, family: str) -> None:
    """Each text has a beginning that is the corpus's and as much behind it as was asked for."""
    target, corpus = tmp_path / "target", tmp_path / "corpus"
    make_pair(target, family, vocab_size=VOCAB_SIZE)
    save_tokenizer(target)
    corpus.mkdir()
    texts = [f"text number {n} of a few, and each of them is long enough" for n in range(3)]
    (corpus / DRAFT_TEXTS).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = []
    for folder in (tmp_path / "once", tmp_path / "again"):
        folder.mkdir()
        write_generated(folder, corpus, target, GenerationSettings(texts=5, prompt=20, new_tokens=30, batch=2))
        found.append([record["text"] for record in read_jsonl(folder / "texts.jsonl")])
    assert found[0] == found[1] and len(found[0]) == 5
    assert all(any(text.startswith(known[:20]) for known in texts) for text in found[0])
    assert all(len(text) > 25 for text in found[0]) and len(set(found[0])) == 5
