"""One SGLang engine in a process of its own: options, prompts and sampling parameters as JSON on stdin, answers out."""

import json
import sys


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
