"""Take the draft out of a DeepSpeed checkpoint of ours, without its target and without starting any ranks.

python scripts/extract_draft.py outputs/RUN/last_ds DRAFT.pth
python scripts/extract_draft.py outputs/RUN/last_ds FOLDER --hf     # safetensors + config.json, ready for the hub
"""

import argparse
from pathlib import Path

from longspec.errors import reports_user_errors
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME
from longspec.train.extraction import extract_draft


@reports_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a run's last_ds or last_2ds folder")
    parser.add_argument("output", type=Path, help=f"a .pth file, or a folder for {DRAFT_WEIGHTS_NAME}")
    parser.add_argument("--hf", action="store_true", help="write a folder in Hugging Face form instead")
    args = parser.parse_args()
    count = extract_draft(args.checkpoint, args.output, args.hf)
    print(f"{count} weights of {args.checkpoint} written to {args.output}")


if __name__ == "__main__":
    main()
