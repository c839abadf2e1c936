"""The server as its clients see it: the `openai` package and lm_eval, over a tiny pair."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from http_server import NAME, Running, chat_tokenizer, printable_pair, serving
from pairs import target_greedy
from transformers import AutoModelForCausalLM

from benchmarks.http_load import Client
from benchmarks.serving import GOALS, make_load, measure_leaks, measure_server

TOKENIZER = chat_tokenizer()
PROMPTS = [f"{'ab' * length} {number}" for number, length in enumerate((1, 40, 5, 90, 2, 17))]
LIMIT_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "pair"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(printable_pair(folder), max_rows=4, max_queue=64) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def greedy(server: Running, prompt: str, count: int) -> str:
    """The target's own answer to a text."""
    ids = torch.tensor(TOKENIZER(prompt, add_special_tokens=False)["input_ids"])
    return TOKENIZER.decode(target_greedy(server.model, ids, count))


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(**{"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 24, **options})


def test_answers_are_those_of_the_target(client: openai.OpenAI, server: Running) -> None:
    """Of text, of token ids, of a conversation; whole and streamed; speculating and not."""
    prompt = PROMPTS[1]
    expected, ids = greedy(server, prompt, 24), TOKENIZER(prompt, add_special_tokens=False)["input_ids"]
    for given in (prompt, ids, [prompt], [ids]):
        assert complete(client, given).choices[0].text == expected
    assert complete(client, prompt, extra_body={"longspec": {"speculate": False}}).choices[0].text == expected
    assert "".join(chunk.choices[0].text for chunk in complete(client, prompt, stream=True)) == expected
    both = complete(client, [PROMPTS[0], prompt], n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == [greedy(server, PROMPTS[0], 24)] * 2 + [expected] * 2
    turns: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    asked = {"model": NAME, "messages": turns, "temperature": 0, "max_tokens": 24}
    said = client.chat.completions.create(**asked)
    assert said.choices[0].message.content == greedy(server, "<system>s</s><user>hi</s><a>", 24)
    assert said.choices[0].finish_reason == "length"
    *chunks, usage = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said.choices[0].message.content
    assert usage.usage.total_tokens == said.usage.total_tokens and usage.usage.completion_tokens == 24
    assert usage.usage.prompt_tokens_details.cached_tokens > 0  # the prefix of the same conversation


def test_a_soak_leaks_no_row_and_changes_no_answer(server: Running) -> None:
    """With abandoned streams, malformed bodies and stop strings, as the load test of GPUs runs it."""
    load = make_load("the target reads a prompt " * 9, TOKENIZER, 48, 96, rows=3, tokens=12)
    client = Client(server.url)
    figures = measure_server(client, load)
    assert figures["second_turn_ttft_s"] > 0 and figures["concurrent_tokens_per_s"] > 0
    leaks = measure_leaks(client, load, requests=40)
    assert leaks["seeded_answers_same"] and sum(leaks["kinds"].values()) == 40 and len(leaks["kinds"]) == 4
    assert {above for above, *_ in GOALS.values()} <= {*figures, *leaks}
    now = server.scheduler.snapshot()
    assert (now.running, now.queued) == (0, 0) and sum(now.finished.values()) == now.requests


@pytest.fixture
def evaluate(server: Running, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a task of lm_eval on records, over HTTP or on transformers' model."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # runs pip, and takes seconds
    tasks = importlib.import_module("lm_eval.tasks").TaskManager(include_defaults=False)
    make_table = importlib.import_module("lm_eval.utils").make_table
    simple_evaluate = importlib.import_module("lm_eval").simple_evaluate

    def run(records: list[Any], model: str = "local-completions", **task: Any) -> Any:
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
        files = {"data_files": {"test": str(tmp_path / "data.jsonl")}}
        task = {"task": "tiny", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **task}
        # As in docs/serve.md: the tokenizer is the server's.
        arguments = f"model={NAME},base_url={server.url}/v1/completions,num_concurrent=3,max_length=4096"
        if model == "hf":
            arguments = f"pretrained={folder},dtype=float32,max_length=4096,device=cpu"
        result = simple_evaluate(model, arguments, tasks=[task], task_manager=tasks, bootstrap_iters=0)
        assert "tiny" in make_table(result)  # what the command prints last
        return result

    return run


def test_lm_eval_scores_generation_as_transformers_does(evaluate: Callable[..., Any], folder: Path) -> None:
    """A generation task, with stop strings, against transformers' greedy decoding."""
    target, until_text, count = AutoModelForCausalLM.from_pretrained(folder), ["e", "Q:"], 24
    expected = []
    for prompt in PROMPTS:
        ids = TOKENIZER(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        tokens = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        text = TOKENIZER.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
        expected.append(min((text.split(stop)[0] for stop in until_text), key=len))
    golds = [text if number % 3 else "wrong" for number, text in enumerate(expected)]
    result = evaluate(
        [{"question": prompt, "answer": gold} for prompt, gold in zip(PROMPTS, golds, strict=True)],
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": until_text, "max_gen_toks": count, "do_sample": False},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    answers = [sample["resps"][0][0] for sample in result["samples"]["tiny"]]
    assert answers == expected and any(len(text) < count for text in expected)
    score = sum(text == gold for text, gold in zip(expected, golds, strict=True)) / len(golds)
    assert result["results"]["tiny"]["exact_match,none"] == score == 4 / 6


def test_lm_eval_scores_choices_as_transformers_does(evaluate: Callable[..., Any], server: Running) -> None:
    """A multiple-choice task: the same log-likelihoods, greedy marks and accuracies as lm_eval's own model."""
    choices = [greedy(server, f"{PROMPTS[1]} Answer:", 2), "be", "the end", "x" * 30]
    settings = {
        "target_delimiter": "",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{gold}}",
        "doc_to_choice": choices,
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
        ],
    }
    records = [{"question": f"{prompt} Answer:", "gold": number % 4} for number, prompt in enumerate(PROMPTS)]
    ours, theirs = (evaluate(records, model, **settings) for model in ("local-completions", "hf"))
    answers = ([sample["resps"] for sample in result["samples"]["tiny"]] for result in (ours, theirs))
    found, expected = ([response[0] for responses in one for response in responses] for one in answers)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["results"]["tiny"][metric] == theirs["results"]["tiny"][metric]
    assert len(found) == len(PROMPTS) * len(choices) and any(greedy for _, greedy in found)
