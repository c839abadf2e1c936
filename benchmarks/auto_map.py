"""Where `auto` wins: its speed next to that of each fixed method, by batch size, context and temperature.

`python -m benchmarks.auto_map --model PAIR --prompts FILE.jsonl` prints a table, writes a picture, and prints one JSON
line. Lines of the prompt file hold `{"ids": [...], "context": "1k"}`, as in `benchmarks.engines`. A batch decodes
prompts of one context at a time; all rows generate the same number of tokens. A cell has several batches, with fewer
answers where prompts are long. tokens/s is that of decoding. The error of `over_best` is a bootstrap over batches.
Several GPUs can each take some cells, as by --temperatures, into a file of --rows; the files are then joined for the
picture.
"""

import argparse
import gc
import json
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.engines import read_prompts
from benchmarks.picture import draw_map
from benchmarks.tables import RowFile, print_result, table
from longspec.cli.options import PairOptions
from longspec.cli.pair import LoadedPair, SamplingOptions, open_pair
from longspec.errors import reports_user_errors
from longspec.inference.device import device_name
from longspec.inference.methods import AUTO

FIXED: dict[str, dict[str, Any]] = {
    "vanilla": {"method": "vanilla"},
    "lookup": {"method": "lookup", "gamma": 15},
    "tree 16": {"method": "tree", "tree_nodes": 16},
    "tree 32": {"method": "tree", "tree_nodes": 32},
    "tree 69": {"method": "tree"},
}
METHODS = {**FIXED, AUTO: {"method": AUTO}}
COLUMNS = {
    **{"temperature": "g", "context": "", "batch": "", **dict.fromkeys(METHODS, ".0f")},
    **{"best": "", "over_vanilla": ".2f", "over_best": ".2f", "error": ".2f"},
}
"""Entries of a row in the table, with their formats: the cell, tokens/s by method, and `auto` next to the others."""
LEAST_BATCHES = 2
RESAMPLES, SEED = 1000, 0


@reports_user_errors
def main() -> None:
    options = parse_options()
    prompts = read_prompts(options.prompts)
    run = {name: getattr(options, name) for name in ("model", "draft", "dtype", "tokens", "answers", "most_tokens")}
    kept = RowFile(options.rows, run)
    rows = kept.rows
    measured = {(row["temperature"], row["context"], row["batch"]) for row in rows}
    cells = [
        (temperature, context, batch)
        for temperature in options.temperatures
        for context in prompts
        for batch in options.batches
        if batch * max(map(len, prompts[context])) <= options.most_tokens
    ]
    if missing := [cell for cell in cells if cell not in measured]:
        pair = open_pair(PairOptions(options.model, options.draft, dtype=options.dtype), AUTO)
        device = device_name(pair.model.device)
        for temperature, context, batch in tqdm(missing, unit="cell"):
            answers = min(options.answers, options.most_tokens // max(map(len, prompts[context])))
            chosen = islice(cycle(prompts[context]), batch * max(LEAST_BATCHES, answers // batch))
            speeds = cell_speeds(pair, list(chosen), batch, options.tokens, temperature)
            cell = {"device": device, "temperature": temperature, "context": context, "batch": batch}
            kept.add(cell | speeds)
            tqdm.write(json.dumps(rows[-1]))
    print(table([row | row["tokens_per_s"] for row in rows], COLUMNS))
    for key, least in {"over_vanilla": 1.0, "over_best": 0.98}.items():
        print(f"{key} at least {least:g}: {sum(row[key] >= least for row in rows)} of {len(rows)} cells")
    if options.picture:
        draw_map(rows, options.picture, f"{options.model}, {rows[0]['device']}")
    print_result("auto_map", options, rows=rows)


def cell_speeds(
    pair: LoadedPair, prompts: Sequence[list[int]], batch: int, tokens: int, temperature: float
) -> dict[str, Any]:
    """tokens/s of each method over batches of the prompts, and what `auto` is relative to vanilla and to the best.

    The methods take turns at each batch.
    """
    batches = [list(prompts[start : start + batch]) for start in range(0, len(prompts), batch)]
    sampling = SamplingOptions(temperature, max_new_tokens=tokens)
    measured: dict[str, list[tuple[int, float]]] = {name: [] for name in METHODS}
    plans: Counter[str] = Counter()
    for number, own in enumerate([batches[0], *batches]):  # the first one warms up
        for name, settings in METHODS.items():
            stats = pair.generate(own, sampling, eos_token_id=(), seed=SEED + number, **settings).stats
            if number:
                measured[name].append((stats.decoded_tokens, stats.decode_s))
                plans.update(stats.rounds_by_plan)
    gc.collect()
    torch.cuda.empty_cache()
    sums = {name: np.array(parts) for name, parts in measured.items()}
    speeds = {name: speed(parts) for name, parts in sums.items()}
    best = max(FIXED, key=lambda name: speeds[name])
    chance = np.random.default_rng(SEED)
    samples = [chance.integers(len(batches), size=len(batches)) for _ in range(RESAMPLES)]
    # A bootstrap of n batches has a variance that is too small by (n - 1) / n.
    error = np.std([speed(sums[AUTO][sample]) / speed(sums[best][sample]) for sample in samples])
    error *= (len(batches) / (len(batches) - 1)) ** 0.5
    ratios = {"over_vanilla": speeds[AUTO] / speeds["vanilla"], "over_best": speeds[AUTO] / speeds[best]}
    return {"tokens_per_s": speeds, "best": best, "rounds_by_plan": dict(plans)} | ratios | {"error": float(error)}


def speed(parts: np.ndarray) -> float:
    """tokens/s. parts: fp64 [batches, 2], tokens and seconds."""
    tokens, seconds = parts.sum(0)
    return float(tokens / seconds)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="name, folder or hub id of the pair's target")
    add("--draft", help="default: the pair's own")
    add("--prompts", type=Path, required=True)
    add("--dtype", default="bfloat16")
    add("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    add("--tokens", type=int, default=128, help="new tokens per answer")
    add("--answers", type=int, default=32, help=f"per cell, but at least {LEAST_BATCHES} batches")
    add("--most_tokens", type=int, default=300_000, help="most prompt tokens of a batch, and of a cell of more batches")
    add("--rows", type=Path, help="JSONL file that keeps the cells; those of an earlier run are not measured again")
    add("--picture", type=Path, help="PNG to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
