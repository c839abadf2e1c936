"""A run script for the launcher that loads a run's newest checkpoint and saves the engine's weights in two ways.

It takes the trainer's arguments. It writes `gathered.pt` (our draft) and, under ZeRO-3, `consolidated.pt` (DeepSpeed's
own consolidation of the whole pair) into the output folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from longspec.ranks.agreement import from_rank_zero
from longspec.train.checkpoint import gather_draft, load_state, locate, read_draft
from longspec.train.config import load_config
from longspec.train.distributed import start_ranks
from longspec.train.engine import build_engine, build_pair
from longspec.train.generations import find_latest


def main() -> None:
    config = load_config(sys.argv[1:])
    assert config is not None
    start_ranks()
    config = locate(config)
    latest = from_rank_zero(lambda: find_latest(config.output_dir))
    assert latest is not None
    engine = build_engine(config, build_pair(config, read_draft(latest[0])))
    load_state(engine, *latest)
    output = Path(config.output_dir)
    gathered = gather_draft(engine.module)
    assert bool(gathered) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        torch.save(gathered, output / "gathered.pt")
    if engine.zero_optimization_partition_weights():
        consolidated = engine._zero3_consolidated_16bit_state_dict()
        if dist.get_rank() == 0:
            torch.save(dict(consolidated), output / "consolidated.pt")


main()
