"""The log of a run of three steps in the folder that is the first argument. Run by a test. A second argument ends W&B's
own process after the first step, as DeepSpeed's launcher does when it is stopped."""

import sys

import psutil

from longspec.train import logging
from longspec.train.config import compose_config, typed

logging.WANDB_START_S = logging.WANDB_S = 5
logging.setup_logging(0)
given = ["model_name_or_path=target", f"output_dir={sys.argv[1]}", "data.files=[x.jsonl]"]
log = logging.RunLog(typed(compose_config("conf/exp", "tiny_glide_stage1_sinkpi-slicing", given)), 0, 0, 3)
for step in (1, 2, 3):
    log.step({"step": step, "loss": 1.0})
    for child in psutil.Process().children(recursive=True) if sys.argv[2:] else ():
        child.kill()
log.close()
