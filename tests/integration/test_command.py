"""`inference_long-bench.py` on a tiny pair: the same tokens by every method, what it writes, what it refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calls import noted
from pairs import OPTIONS, make_pair, tiny_config
from tiny_tokenizer import VOCAB_SIZE, byte_tokenizer

from longspec.inference import memory
from longspec.inference.cache import TargetCache
from longspec.inference.methods import METHODS
from longspec.inference.request import row_seed
from longspec.longbench import measurement
from longspec.longbench.command import main, parse_options
from longspec.longbench.plan import make_plan
from longspec.models.draft_layer import DraftOptions
from longspec.models.draft_saving import save_draft_file, save_draft_folder

ROOT = Path(__file__).parents[2]
Refused, Setting = Callable[..., str], tuple[Path, Path]
SHORT = ["--min_prompt_len", "10", "--headroom", "3000"]  # the tiny target has 4096 positions


def make_target(folder: Path, family: str = "llama", **overrides: object) -> Path:
    """A target with its tokenizer in `folder`, its random draft next to it as `folder`-draft.pth."""
    model = make_pair(folder, family, vocab_size=VOCAB_SIZE, **overrides)
    byte_tokenizer().save_pretrained(folder)
    state = {f"draft_model.{name}": weight for name, weight in model.draft_model.state_dict().items()}
    save_draft_file(state, draft_of(folder), model.draft_model.options)
    return folder


def draft_of(target: Path) -> Path:
    return target.parent / f"{target.name}-draft.pth"


def write_records(folder: Path, task: str = "lcc", count: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    records = [{"_id": f"r{n}", "input": "", "context": f"x = {n}\n" * (n + 1)} for n in range(count)]
    if task == "aime24":
        records = [{"id": n, "problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(count)]
    (folder / f"{task}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def arguments(target: Path, data: Path, out: Path, *more: str, draft: Path | None = None) -> list[str]:
    return [
        *("--target", str(target), "--draft", str(draft or draft_of(target)), "--task", "lcc"),
        *("--data_path_prefix", str(data), "--output_dir", str(out), "--device", "cpu", *SHORT, *more),
    ]


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def test_all_methods_write_vanillas_tokens(tmp_path: Path) -> None:
    target, data = make_target(tmp_path / "target", options=OPTIONS["both"]), write_records(tmp_path / "data")
    size = {"vanilla": "1", "seq": "2", "tree": "3", "magicdec": "2", "lookup": "2"}
    tokens = {}
    for method in METHODS:
        out = tmp_path / method
        more = ("--method", method, "--max_gen_len", "11", "--batch_size", size[method])
        summary = main(arguments(target, data, out, *more))
        assert summary == json.loads((out / "summary.json").read_text())
        assert (summary["method"], summary["task"], summary["samples"]) == (method, "lcc", 3)
        tokens[method] = {line["id"]: line["token_ids"] for line in lines_of(out)}
        assert all(len(ids) == 11 for ids in tokens[method].values())
        if method == "vanilla":
            assert summary["mean_acceptance_length"] == 1
        if method == "magicdec":  # these prompts are shorter than its window, so it drafts what the target says
            assert summary["mean_acceptance_length"] == 5 and summary["accepted_by_depth"] == [6] * 4
    assert all(tokens[method] == tokens["vanilla"] for method in METHODS)


def test_the_command_as_a_process(tmp_path: Path) -> None:
    """The contract's line with the default method: exit code 0, table, JSON lines and the whole configuration."""
    target, data = make_target(tmp_path / "target"), write_records(tmp_path / "data")
    out = tmp_path / "out"
    options = ["--method", "tree", "--test_length", "2", "--max_gen_len", "6", "--temperature", "0.7"]
    line = [*arguments(target, data, out, *options), "--tree_shape", "4", "16", "--seed", "3", "--dtype", "bfloat16"]
    command, environment = [sys.executable, ROOT / "inference_long-bench.py", *line], {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert "lcc: 2 prompts kept, 0 left out" in done.stdout
    assert "acceptance length" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    config = summary["config"]
    assert (config["tree_shape"], config["temperature"], config["seed"]) == ([4, 16], 0.7, 3)
    assert (config["dtype"], config["window"], config["draft"]) == ("bfloat16", 4096, str(draft_of(target)))
    assert summary["left_out"] == {"too_short": 0, "too_long": 0}
    assert summary["peak_memory_bytes"] > 0 and summary["device"].startswith("cpu")
    assert [sample["id"] for sample in lines_of(out)] == ["r0", "r1"]


@pytest.mark.parametrize("method", ["vanilla", "tree"])
def test_methods_warm_up_before_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """One short call on the longest prompt, with the run's own settings, comes first and leaves no trace."""
    calls = noted(monkeypatch, measurement, "generate", lambda model, ids, **given: (max(map(len, ids)), given))
    target, data = make_target(tmp_path / "target"), write_records(tmp_path / "data", count=2)
    options = ["--method", method, "--max_gen_len", "20", "--tree_shape", "3,3", "--temperature", "0.7"]
    options += ["--seed", "5"]
    summary = main(arguments(target, data, tmp_path / "out", *options))
    (warm_length, warm_up), *measured = calls
    assert len(measured) == summary["samples"] == len(lines_of(tmp_path / "out")) == 2
    assert warm_length == max(length for length, _ in measured) and warm_up["max_new_tokens"] == 16
    assert warm_up | {"method": method, "tree_shape": [3, 3], "temperature": 0.7} == warm_up
    assert [settings["seed"] for _, settings in measured] == [[row_seed(5, number)] for number in (0, 1)]
    own = {"max_new_tokens", "eos_token_id", "seed"}
    for _, settings in measured:
        assert all(warm_up[name] == settings[name] for name in settings.keys() - own)


def test_the_options_alone_define_the_sampling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings of generation_config.json that would change answers have no effect, and one line names them."""
    target, data = make_target(tmp_path / "target"), write_records(tmp_path / "data", count=1)

    def sampled(name: str, *options: str) -> list[int]:
        more = ("--method", "vanilla", "--temperature", "1.5", "--max_gen_len", "8", *options)
        main(arguments(target, data, tmp_path / name, *more))
        return lines_of(tmp_path / name)[0]["token_ids"]

    plain, file = sampled("plain"), target / "generation_config.json"
    given = {"do_sample": True, "min_p": 0.9, "no_repeat_ngram_size": 2, "stop_strings": ["a"], "max_time": 0.01}
    file.write_text(json.dumps(json.loads(file.read_text()) | given))
    assert sampled("configured") == plain
    names = "max_time 0.01, stop_strings ['a'], min_p 0.9, no_repeat_ngram_size 2"
    assert f"{target}: its generation config sets {names}, which is ignored" in capsys.readouterr().out
    assert sampled("likeliest", "--min_p", "1") == sampled("two", "--epsilon_cutoff", "0.999", "--batch_size", "2")
    banned = {str(token): -100 for token in plain}
    assert set(plain).isdisjoint(sampled("banned", "--logit_bias", json.dumps(banned)))
    assert json.loads((tmp_path / "banned" / "run.json").read_text())["run"]["logit_bias"] == banned


def test_vanilla_and_magicdec_need_no_draft(tmp_path: Path) -> None:
    target, data = make_target(tmp_path / "target"), write_records(tmp_path / "data", "aime24", 1)
    for method in ("vanilla", "magicdec"):
        line = ["--target", str(target), "--task", "aime24", "--data_path_prefix", str(data), "--method", method]
        line += ["--max_gen_len", "4", "--output_dir", str(tmp_path / method), "--attention", "sdpa", "--no-compile"]
        summary = main(line)
        assert summary["samples"] == 1 and summary["config"]["draft"] is None
        assert summary["config"]["attention"] == "sdpa" and summary["config"]["compile"] is False


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A target whose weights cannot be read, and data: a refusal has to come before the weights are loaded."""
    folder = tmp_path_factory.mktemp("refused")
    target, data = make_target(folder / "target"), write_records(folder / "data")
    (target / "model.safetensors").write_bytes(b"unreadable")
    return target, data


@pytest.fixture
def refused(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refused) -> Refused:
    """The refusal of a run with some options, before its weights load and its output folder is made."""
    monkeypatch.setattr(measurement, "load_model", None)

    def refused(*options: str, target: Path = setting[0], draft: Path | None = None) -> str:
        out = tmp_path / "out"
        line = arguments(target, setting[1], out, *options, draft=draft or draft_of(setting[0]))
        message = refusal(main, line)
        assert not out.exists()
        return message

    return refused


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--tree_shape", "4", str(VOCAB_SIZE + 1)], f"1 to {VOCAB_SIZE}"),
        (["--tree_shape", "4,x"], "--tree_shape: '4,x'; give the nodes of each level, as in 4,16,16"),
        (["--max_gen_len", "4090"], "4096 positions"),
        (["--batch_size", "0"], "--batch_size: 0"),
        (["--min_prompt_len", "4000"], "0 prompts kept, 3 left out (3 of 4000 tokens or fewer"),
        (["--headroom", "4096"], "(0 of 10 tokens or fewer, 3 of more than 0 tokens)"),
        (["--method", "beam"], "--method: invalid choice: 'beam'"),
        (["--device", "cpu", "--attention", "triton"], "attention: 'triton' cannot run here"),
        (["--chat_format", "tokenizer"], "chat template"),
        (["--model_name", "qwq"], "--model_name or by --target"),
        (["--temprature", "1"], "unrecognized arguments: --temprature 1"),
    ],
)
def test_bad_options_are_refused(refused: Refused, options: list[str], complaint: str) -> None:
    assert complaint in refused(*options)


def test_an_unfit_draft_is_refused(refused: Refused, setting: Setting, tmp_path: Path, refusal: Refused) -> None:
    """It is not given, its window is too small, or it is fresh."""
    target, data = setting
    state, config = torch.load(draft_of(target)), tiny_config("llama", vocab_size=VOCAB_SIZE)
    narrow, fresh = tmp_path / "narrow", tmp_path / "fresh"
    save_draft_folder(state, config, narrow, DraftOptions(window=4))
    save_draft_folder(state, config, fresh, is_trained=False)
    without = ["--target", str(target), "--task", "lcc", "--data_path_prefix", str(data), "--method", "seq"]
    assert "method: seq needs a trained draft" in refusal(main, without)
    assert "gamma: 4 levels, but the draft's window is 4" in refused("--method", "seq", draft=narrow)
    assert f"{fresh} was saved with a fresh, untrained draft" in refused(draft=fresh)
    given = arguments(target, data, tmp_path / "out", "--method", "lookup", draft=fresh)
    assert make_plan(parse_options(given)).draft == str(fresh)


def test_a_row_that_does_not_fit_into_memory_is_refused(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refused
) -> None:
    """Of a batch, as many rows are decoded as fit."""
    target, data = setting
    config = tiny_config("llama", vocab_size=VOCAB_SIZE)
    line = arguments(target, data, tmp_path / "out", "--batch_size", "100000", "--chat_format", "published")
    longest = max(len(sample.token_ids) for sample in make_plan(parse_options(line)).selection.prompts)
    cache = TargetCache(config, 1, 512, torch.float32, torch.device("cpu"))
    row = memory.row_bytes(config, torch.float32, longest + 64, 69)
    assert row == cache.keys.nbytes + cache.values.nbytes + 69 * VOCAB_SIZE * 4
    weights = memory.weight_bytes(config, torch.float32)
    monkeypatch.setattr(memory, "free_bytes", lambda device: weights + int(0.9 * row))
    message = refusal(main, line)
    assert f"a row of {longest + 64} tokens and 69 tree nodes" in message and "use fewer tokens" in message
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    assert memory.weight_bytes(config, torch.float32) == 0, "its size depends on the method"
    monkeypatch.setattr(memory, "free_bytes", lambda device: weights + row)
    assert make_plan(parse_options(line)).options.batch_size == 100000


def test_a_folder_without_a_checkpoint_or_its_tokenizer_is_refused(
    refused: Refused, setting: Setting, tmp_path: Path
) -> None:
    small, mute, empty = tmp_path / "small", tmp_path / "mute", tmp_path / "empty"
    embeddings = make_pair(small, vocab_size=VOCAB_SIZE - 1).config.vocab_size
    byte_tokenizer().save_pretrained(small)
    assert f"token ids up to {VOCAB_SIZE - 1}, its model only {embeddings} embeddings" in refused(target=small)
    make_pair(mute, vocab_size=VOCAB_SIZE)
    assert "no tokenizer that loads" in refused(target=mute)
    empty.mkdir()
    config = json.loads((setting[0] / "config.json").read_text())
    (empty / "config.json").write_text(json.dumps(config))
    assert "no model checkpoint (no model.safetensors" in refused(target=empty)
    (empty / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": null}}')
    assert "model.safetensors.index.json: not a readable index" in refused(target=empty)
    (empty / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert "the supported families are llama, qwen2" in refused(target=empty)
