"""Training steps at published shapes: time, arithmetic rate, memory, and time by part.

One GPU: `python -m benchmarks.training`. Weak scaling: `deepspeed --num_gpus N --module benchmarks.training --one_gpu
FILE` (or torchrun), where FILE holds the output of a run on one GPU. The trainer's own step and engine run on random
weights and rows; no file is read. Prints a table and, last, one JSON line.
"""

import argparse
import gc
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist

from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.shapes import SHAPES, random_pair
from benchmarks.tables import table
from benchmarks.training_flops import Flops, training_flops
from benchmarks.training_parts import PARTS, profile, timed_parts
from benchmarks.training_rows import synthetic_inputs
from longspec.data.collators import IGNORED
from longspec.errors import UserError, reports_user_errors
from longspec.models.parallel import model_parallel_rank_and_size
from longspec.ranks.agreement import Termination
from longspec.train.config import compose_config, typed
from longspec.train.config_schema import TrainConfig
from longspec.train.distributed import share_targets, start_ranks
from longspec.train.engine import build_engine, built_in_shards
from longspec.train.losses import LOSSES
from longspec.train.micro_batches import Batch
from longspec.train.positions import Variant
from longspec.train.trainer import Trainer

CONFIGS = Path(__file__).parents[1] / "conf/exp"
WARM_UP = 1
"""Untimed first steps, in which kernels compile and ZeRO-3 records the order in which to gather parameters."""


class Stage(NamedTuple):
    rows: int
    tokens: int
    """Tokens per row; rows have no padding."""


STAGES = {1: Stage(16, 1024), 2: Stage(1, 32768)}


class Case(NamedTuple):
    shape: str
    stage: int
    variant: str
    loss: str


COLUMNS = {
    **{name: "" for name in (*Case._fields, "ranks", "zero")},
    **{"micro_batch_ms": ".1f", "tflops": ".1f", "share_of_ceiling": ".0%", "peak_gib": ".1f"},
    **{"data_wait": ".1%", "efficiency": ".0%"},
}
"""Entries of a row in the table, with their formats; then come PARTS."""


@reports_user_errors
def main() -> None:
    options = parse_options()
    start_ranks()
    share_targets(options.tp_size)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and options.shapes != ["tiny"]:
        raise UserError("benchmarks.training: needs a CUDA device; without one, only --shapes tiny runs")
    ceilings = measure_ceilings() if on_gpu else None
    one_gpu = read_one_gpu(options.one_gpu)
    say(str(ceilings) if ceilings else "no GPU: these figures are not measurements")

    rows = []
    for shape in options.shapes:
        for zero, stages in engines(options):
            for measured in measure_shape(shape, zero, stages, options, ceilings):
                alone = one_gpu.get(Case(*(measured[name] for name in Case._fields)))
                measured["efficiency"] = alone and alone / measured["micro_batch_ms"]
                rows.append(measured)
                say(json.dumps(measured))

    say(table([row | row["parts"] for row in rows], COLUMNS | dict.fromkeys(PARTS, ".1%")))
    facts = {"benchmark": "training", "cases": rows, "config": vars(options)}
    say(json.dumps(facts | (ceilings.describe() if ceilings else {}), default=str))
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--shapes", nargs="*", default=["llama3-8b", "qwen2-7b"], choices=list(SHAPES))
    add("--stages", type=int, nargs="*", default=list(STAGES), choices=list(STAGES))
    add("--variants", nargs="*", default=list(get_args(Variant)), choices=get_args(Variant))
    add(
        "--losses",
        nargs="*",
        default=list(LOSSES),
        choices=LOSSES,
        help="losses to time; the base variant runs only the first",
    )
    add(
        "--zero", choices=("1", "1_offload", "2", "3"), help="ZeRO stage; default: 1, or 3 for stage 2 on several ranks"
    )
    add("--tp_size", type=int, default=1, help="ranks that share a target")
    add("--accumulation", type=int, default=2, help="micro-batches per step")
    add("--steps", type=int, default=3, help="timed steps; the median is reported")
    add("--rows", type=int, help="rows per micro-batch (default: those of the stage)")
    add("--tokens", type=int, help="tokens per row (default: those of the stage)")
    add("--one_gpu", type=Path, help="file with this benchmark's output on one GPU, to compute the efficiency")
    add("--profile", action="store_true", help="also print the kernels that take the most device time")
    add("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    return parser.parse_args()


def engines(options: argparse.Namespace) -> Iterator[tuple[str, list[int]]]:
    """Each kind of ZeRO with the training stages that run under it; they share one engine."""
    several = dist.get_world_size() > options.tp_size
    zero = {stage: options.zero or ("3" if stage == 2 and several else "1") for stage in options.stages}
    for kind in sorted(set(zero.values())):
        yield kind, [stage for stage in options.stages if zero[stage] == kind]


def measure_shape(
    shape: str, zero: str, stages: list[int], options: argparse.Namespace, ceilings: Ceilings | None
) -> Iterator[dict[str, Any]]:
    """Measure all cases of `stages` on one engine, because a destroyed ZeRO-3 engine leaves some GiB on the device."""
    cases = [
        Case(shape, stage, variant, loss)
        for stage in stages
        for variant in options.variants
        for loss in (options.losses if variant != "base" else options.losses[:1])
    ]

    first = case_config(cases[0], zero, options)
    torch.manual_seed(first.seed)
    with built_in_shards(first):
        pair = random_pair(shape, "cuda" if torch.cuda.is_available() else "cpu")
    engine = build_engine(first, pair)
    for case in cases:
        yield measure(case, case_config(case, zero, options), engine, zero, options, ceilings)

    engine.destroy()
    del engine, pair
    gc.collect()  # engines contain reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def case_config(case: Case, zero: str, options: argparse.Namespace) -> TrainConfig:
    """The published configuration of the stage with the sizes of this case; its paths are not read."""
    rows = options.rows or STAGES[case.stage].rows
    values = {
        "stage": f"stage{case.stage}",
        "deepspeed": f"zero{zero}",
        "variant": case.variant,
        "loss": case.loss,
        "tp_size": options.tp_size,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": options.accumulation,
    }
    overrides = [f"{name}={value}" for name, value in values.items()]
    return typed(compose_config(CONFIGS, "llama8b_glide_8gpu_slim6b", overrides))


def measure(
    case: Case,
    config: TrainConfig,
    engine: Any,
    zero: str,
    options: argparse.Namespace,
    ceilings: Ceilings | None,
) -> dict[str, Any]:
    """Figures of one case on this rank. A step is one optimizer step of `accumulation` micro-batches.

    micro_batch_ms: median time of a step, data and optimizer included, divided by `accumulation`. tflops: TFLOP/s per
    GPU of the required arithmetic (see `training_flops`); share_of_ceiling divides them by the measured rate of a
    product. target_gib: memory of the target's parameters between steps. data_wait: share of the timed steps that the
    trainer waits for data. parts: shares in the device time of a step.
    """
    shape = SHAPES[case.shape]
    tokens = options.tokens or STAGES[case.stage].tokens
    total = WARM_UP + options.steps + 3  # one step that is prepared but not run, one for the parts, one for the profile
    inputs = synthetic_inputs(shape, tokens, rows=32 if case.stage == 1 else 4, packed=case.stage == 1)
    trainer = Trainer(config, engine, inputs, total_steps=total)
    engine.train()
    arrays = iter(trainer.loader)
    seconds: list[float] = []
    waits: list[float] = []
    steps = trainer.steps
    steps.start(1, arrays)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with Termination() as termination:
        for step in range(1, WARM_UP + options.steps + 1):
            metrics = steps.take(step, termination)
            assert metrics is not None
            seconds.append(metrics["seconds"])
            waits.append(metrics["data_seconds"])
        # Drop the loaded step: the target's pass over its first micro-batch may have started.
        steps.start(step + 1, islice(arrays, steps.accumulation))
        micro_batches = steps.micro_batches
        parts = timed_parts(trainer, step + 1, termination)
        if options.profile:
            steps.start(step + 2, islice(arrays, steps.accumulation))
            say(profile(trainer, step + 2, termination))
    micro_batch = median(seconds[WARM_UP:]) / steps.accumulation
    flops = sum(flops_of(shape, batch, steps.objective.reads_target) for batch in micro_batches) / len(micro_batches)
    rate = flops / micro_batch
    return {
        **case._asdict(),
        "ranks": dist.get_world_size(),
        "tp_size": options.tp_size,
        "zero": zero,
        "tokens": micro_batches[0]["input_ids"].numel(),
        "micro_batch_ms": micro_batch * 1e3,
        "tflops": rate / 1e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
        "target_gib": held_bytes(engine.module) / 2**30,
        "data_wait": sum(waits[WARM_UP:]) / sum(seconds[WARM_UP:]),
        "parts": parts,
        "share_of_ceiling": rate / ceilings.matmul_flops_per_s if ceilings else None,
    }


def flops_of(shape: Any, batch: Batch, reads_target: bool) -> float:
    """Operations on this rank. Ranks that share a target divide target and loss; each computes the whole draft."""
    segments = batch["cu_seqlens"].diff().tolist()
    scored = int((batch["labels"] != IGNORED).sum())
    flops: Flops = training_flops(shape, segments, scored, reads_target)
    _, sharing_ranks = model_parallel_rank_and_size()
    return (flops.target + flops.loss) / sharing_ranks + flops.draft_forward + flops.draft_backward


def held_bytes(model: Any) -> int:
    """Bytes of the target's parameters on this rank: all of them, a tensor-parallel part, or ZeRO-3 shards."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return sum(getattr(parameter, "ds_tensor", parameter).nbytes for parameter in frozen)


def read_one_gpu(path: Path | None) -> dict[Case, float]:
    """Milliseconds of a micro-batch by case, from the last line of `path`. Raises UserError if it is another one."""
    if path is None:
        return {}
    try:
        cases = json.loads(path.read_text().splitlines()[-1])["cases"]
        return {Case(*(case[name] for name in Case._fields)): case["micro_batch_ms"] for case in cases}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"--one_gpu: {path} does not end with this benchmark's JSON line ({error})") from error


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
