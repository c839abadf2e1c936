"""This project next to vLLM and SGLang: the same prompts and weights, one device, one engine at a time.

`python -m benchmarks.engines --target FOLDER --draft DRAFT --prompts FILE.jsonl` prints a table and, last, one JSON
line. Each row is a process of its own, whose errors are shown. `--engines` chooses engines, and `--python sglang=PATH`
names the interpreter of another environment. Lines of the prompt file hold `{"ids": [...], "context": "1k"}`, the
shortest context first. The prompts of that context also run concurrently, 4 n of them for n requests, again from the
first if there are fewer. Answers are greedy. Single ones have `--tokens` tokens, concurrent ones half as many to one
and a half times as many, in the same random order for all engines.

tokens/s of one prompt is decoding alone: the time of an answer less that of an answer of one token. tokens/s of n
concurrent requests is all tokens of 4 n answers over the whole time, n of them at a time. `same` counts the answers
equal to those of the engine's own vanilla decoding.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.engine_runs import ENGINES, RECOMMENDED, Run
from benchmarks.tables import RowFile, markdown, print_result
from longspec.errors import UserError, reports_user_errors

ROOT = Path(__file__).parents[1]
METHODS = {
    "ours": ("vanilla", "lookup", "auto"),
    "vllm": ("vanilla", "ngram"),
    "sglang": ("vanilla", "ngram", "glide"),
}
NEEDS_DRAFT = ("glide",)


@reports_user_errors
def main() -> None:
    options = parse_options()
    prompts = read_prompts(options.prompts)
    run = {name: getattr(options, name) for name in ("target", "draft", "tokens", "concurrent", "dtype")}
    kept = RowFile(options.rows, run | {"prompts": str(options.prompts)})
    rows = kept.rows
    measured = {(row["engine"], row["method"], row["setting"]) for row in rows}
    for engine, method, setting in [names for names in names_of_rows(options) if names not in measured]:
        # An engine would look for a draft that it does not use.
        draft = options.draft if engine == "ours" or method in NEEDS_DRAFT else None
        shared = (options.target, draft, prompts, options.concurrent, options.tokens, options.dtype)
        python = options.python.get(engine, sys.executable)
        result = run_alone(Run(engine, method, setting, *shared), python, options.limit)
        row = {"engine": engine, "method": method, "setting": setting} | result
        rows.append(row) if "error" in row else kept.add(row)
    count_same(rows)
    for row in rows:
        row.pop("answers", None)
    print(table(rows, list(prompts), options.concurrent))
    print_result("engines", options, rows=rows)


def names_of_rows(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Engine, method and setting of each row of the table."""
    names = []
    for engine in options.engines:
        settings = [one for one in options.settings if one == "defaults" or engine in RECOMMENDED]
        for method, setting in product(METHODS[engine], settings):
            if method in NEEDS_DRAFT and options.draft is None:
                print(f"{engine} {method}: skipped, needs --draft", flush=True)
            elif options.methods is None or method in options.methods:
                names.append((engine, method, setting))
    return names


def run_alone(run: Run, python: str, limit: float) -> dict[str, Any]:
    """The result of a run in its own process, or an `error`. limit: seconds."""
    print(f"{run.engine} {run.method}, {run.setting} ...", flush=True)
    command = [python, "-m", "benchmarks.engine_runs"]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    process = subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes)
    ended = True
    try:
        process.communicate(json.dumps(asdict(run)), timeout=limit)
    except subprocess.TimeoutExpired:
        ended = False
    finally:
        # An engine has processes of its own. One that outlives its run would disturb the next.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    try:
        return json.loads(output)
    except ValueError:
        return {"error": f"exit status {process.returncode}" if ended else f"no end within {limit:.0f} s"}


def read_prompts(file: Path) -> dict[str, list[list[int]]]:
    """Token ids by context, in the order of the file. Raises UserError."""
    prompts: dict[str, list[list[int]]] = {}
    try:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            prompts.setdefault(str(record["context"]), []).append([int(token) for token in record["ids"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f'--prompts {file}: give lines of {{"ids": [...], "context": "1k"}} ({error!r})') from error
    if not prompts:
        raise UserError(f"--prompts {file}: no prompts")
    return prompts


def count_same(rows: list[dict[str, Any]]) -> None:
    """Note how many answers equal those of the same engine's vanilla decoding at its defaults."""
    vanilla = {
        row["engine"]: row["answers"]
        for row in rows
        if row["method"] == "vanilla" and row["setting"] == "defaults" and "answers" in row
    }
    for row in rows:
        if "answers" in row and row["engine"] in vanilla:
            pairs = list(zip(row["answers"], vanilla[row["engine"]], strict=True))
            row["same"] = f"{sum(mine == plain for mine, plain in pairs)}/{len(pairs)}"


def table(rows: list[dict[str, Any]], contexts: list[str], concurrent: list[int]) -> str:
    """Markdown: tokens/s of one prompt per context, then of concurrent requests."""
    columns = [
        *(f"1 × {context}" for context in contexts),
        *(f"{requests} requests" for requests in concurrent),
        "same",
    ]
    lines = []
    for row in rows:
        if "error" in row:
            cells = [f"failed: {row['error']}", *[""] * (len(columns) - 1)]
        else:
            speeds = [*(row["single"][c] for c in contexts), *(row["concurrent"][str(n)] for n in concurrent)]
            cells = [*(f"{speed:,.0f}" for speed in speeds), row.get("same", "")]
        lines.append([row["engine"], row["method"], row["setting"], *cells])
    return markdown(["engine", "method", "setting", *columns], lines)


def named(text: str) -> tuple[str, str]:
    engine, separator, value = text.partition("=")
    if engine not in ENGINES or not separator:
        raise argparse.ArgumentTypeError(f"{text!r}: give ENGINE=VALUE, ENGINE one of {', '.join(ENGINES)}")
    return engine, value


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target's weights")
    parser.add_argument("--draft", help="draft of the target; default for this project: its own draft, if it has one")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=192, help="length of a single answer")
    parser.add_argument("--concurrent", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--methods", nargs="+", choices=sorted({m for methods in METHODS.values() for m in methods}))
    parser.add_argument("--settings", nargs="+", choices=["defaults", "latency"], default=["defaults", "latency"])
    parser.add_argument("--python", type=named, nargs="*", default=[], help="ENGINE=INTERPRETER")
    parser.add_argument("--limit", type=float, default=900, help="seconds per run")
    parser.add_argument("--rows", type=Path, help="JSONL file that keeps the rows; an interrupted run goes on")
    options = parser.parse_args()
    options.python = dict(options.python)
    if options.tokens < 2:
        parser.error("--tokens: at least 2")
    return options


if __name__ == "__main__":
    main()
