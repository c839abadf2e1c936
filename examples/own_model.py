"""Use your own target: load it, decode without a trained draft, and save target and draft as one pair.

    python examples/own_model.py Qwen/Qwen2.5-0.5B-Instruct --save my-pair

Any target of a supported family works (see docs/your-model.md): a hub id, a folder or a .gguf file. The saved folder
is an ordinary model for transformers, and `longspec chat my-pair` or `longspec serve my-pair` finds the draft in it.
"""

import argparse

from longspec import generate, load_pair

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("target", help="hub id, folder or .gguf file")
parser.add_argument("--draft", help="a draft for it: .pth file, folder or hub id")
parser.add_argument("--save", help="folder to write the pair to")
parser.add_argument("--prompt", default="def fibonacci(n):\n    if n < 2:\n        return n\n")
parser.add_argument("--max_new_tokens", type=int, default=64)
args = parser.parse_args()

model, tokenizer = load_pair(args.target, draft=args.draft)
inputs = tokenizer(args.prompt, return_tensors="pt")
methods = ["vanilla", "lookup", *(["tree"] if model.draft_is_trained else [])]
outputs = {method: generate(model, inputs, method=method, max_new_tokens=args.max_new_tokens) for method in methods}
for method, output in outputs.items():
    stats = output.stats
    print(f"{method}: {stats.tokens_per_second:.1f} tokens/s, {stats.mean_acceptance_length:.2f} tokens per round")
same = all(output.new_tokens[0].equal(outputs["vanilla"].new_tokens[0]) for output in outputs.values())
print(f"the methods agree: {same}")  # always in float32; half precision may flip near-ties
print(args.prompt + tokenizer.decode(outputs["vanilla"].new_tokens[0], skip_special_tokens=True))
if args.save:
    model.save_pretrained(args.save)
    tokenizer.save_pretrained(args.save)
    print(f"saved to {args.save}")
