"""One SGLang engine in a process of its own: options, prompts and sampling parameters as JSON on stdin, answers out."""

import json
import os
import sys
from contextlib import nullcontext


def share_one_gpu() -> None:
    """All ranks run on the first GPU, with gloo, because NCCL refuses that. SGLang's processes import this module."""
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.entrypoints import engine
    from sglang.srt.model_executor import model_runner

    engine.maybe_reindex_device_id = lambda number: nullcontext(0)
    model_runner.get_default_distributed_backend = lambda device: "gloo"
    pynccl.NCCLLibrary = None  # SGLang goes on without a library that fails


if os.environ.get("SHARE_ONE_GPU"):
    share_one_gpu()


def main() -> None:
    import sglang

    task = json.load(sys.stdin)
    engine = sglang.Engine(**({"skip_tokenizer_init": True, "log_level": "error"} | task["options"]))
    answers = [engine.generate(input_ids=prompts, sampling_params=sampling) for prompts, sampling in task["calls"]]
    ids = [[answer["output_ids"] for answer in call] for call in answers]
    rounds = [answer["meta_info"].get("spec_verify_ct") for answer in answers[0]]
    print(json.dumps({"ids": ids, "rounds": rounds}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
