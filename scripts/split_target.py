"""Split a target for tensor-parallel training: a folder of weights for each of N ranks.

python scripts/split_target.py --target Qwen/QwQ-32B-Preview --tp_size 2 --output targets/qwq-tp2

Then launch with `tp_size=2 model_name_or_path=targets/qwq-tp2`.
"""

import argparse
from pathlib import Path

from longspec.errors import reports_user_errors
from longspec.inference.registry import choose_target
from longspec.models.target_files import local_target
from longspec.models.target_split import split_target


@reports_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the target: a name, a folder, a hub id or a .gguf file")
    parser.add_argument("--tp_size", type=int, required=True, help="ranks that will share it")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write, which must not exist")
    args = parser.parse_args()
    if args.tp_size < 2:
        parser.error(f"--tp_size: must be at least 2, not {args.tp_size}")
    split_target(local_target(choose_target(args.target)), args.output, args.tp_size)
    print(f"{args.target} for {args.tp_size} ranks in {args.output}")


if __name__ == "__main__":
    main()
