"""Answer your own prompts: one per line of a text file, in batches, with the speed of each method.

python examples/own_prompts.py prompts.txt --model smollm2-135m
"""

import argparse
from pathlib import Path

from longspec import generate, load_pair

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("prompts", type=Path, help="text file, a prompt per line")
parser.add_argument("--model", default="smollm2-135m", help="name, hub id, folder or .gguf file")
parser.add_argument("--draft", help="draft of the target, default: that of the pair")
parser.add_argument("--max_new_tokens", type=int, default=64)
args = parser.parse_args()

try:  # before the model loads
    prompts = [line for line in args.prompts.read_text().splitlines() if line.strip()]
except OSError as error:
    parser.error(str(error))
model, tokenizer = load_pair(args.model, draft=args.draft)
tokenizer.padding_side = "left"
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
if tokenizer.chat_template:
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    prompts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
inputs = tokenizer(prompts, add_special_tokens=not tokenizer.chat_template, padding=True, return_tensors="pt")

answers = {}
for method in ("vanilla", "auto"):
    output = generate(model, inputs, method=method, max_new_tokens=args.max_new_tokens)
    answers[method] = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in output.new_tokens]
    stats = output.stats
    print(f"{method}: {stats.tokens_per_second:.1f} tokens/s, {stats.mean_acceptance_length:.2f} tokens per round")
for prompt, answer in zip(prompts, answers["vanilla"], strict=True):
    print(f"\n{prompt}\n-> {answer}")
