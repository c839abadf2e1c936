"""Train a draft on your own prompts: the target answers them, a draft learns from the answers, and both decode.

    python examples/own_data.py --target smollm2-135m --prompts prompts.jsonl --output outputs/own

A line of the prompts file is a JSON object with `prompt` or `messages`. Further arguments are overrides of the
configuration, as in `max_steps=100`; docs/train.md lists other configurations.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from longspec import generate, load_pair

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--target", required=True, help="hub id, folder or smollm2-135m")
parser.add_argument("--prompts", type=Path, required=True, help="JSONL file")
parser.add_argument("--output", type=Path, required=True, help="folder of the answers and the draft")
parser.add_argument("--config", default="your-model", help="a file in conf/exp")
parser.add_argument("--num_gpus", default="1", help="ranks; without a GPU, 1 trains on the CPU")
parser.add_argument("--max_new_tokens", default="256", help="longest answer")
args, overrides = parser.parse_known_args()


def longspec(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "longspec", *words], check=True)


answers, run = args.output / "answers", args.output / "draft"
longspec(
    *("regenerate", "--target", args.target, "--files", str(args.prompts), "--output_dir", str(answers)),
    *("--max_new_tokens", args.max_new_tokens),
)
longspec(
    *("train", args.config, f"model_name_or_path={args.target}", f"data.files=[{answers / 'train.jsonl'}]"),
    *(f"output_dir={run}", "--num_gpus", args.num_gpus, *overrides),
)
model, tokenizer = load_pair(args.target, draft=str(run / "checkpoint-last"))
inputs = tokenizer("The target reads", return_tensors="pt")
output = generate(model, inputs, method="tree", max_new_tokens=32)
print(tokenizer.decode(output.new_tokens[0], skip_special_tokens=True))
print(f"{output.stats.mean_acceptance_length:.2f} tokens per round")
