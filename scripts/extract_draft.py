"""Take the draft out of a DeepSpeed checkpoint of ours, without its target and without starting any ranks.

python scripts/extract_draft.py outputs/RUN/last_ds DRAFT.pth
python scripts/extract_draft.py outputs/RUN/last_ds FOLDER --hf     # safetensors + config.json, ready for the hub
"""

import argparse
from pathlib import Path

from longspec.errors import reports_user_errors
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME, save_draft_file, save_draft_folder
from longspec.models.target_files import read_config
from longspec.train.checkpoint import read_draft
from longspec.train.config import CONFIG_NAME, read_config_file


@reports_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a run's last_ds or last_2ds folder")
    parser.add_argument("output", type=Path, help=f"a .pth file, or a folder for {DRAFT_WEIGHTS_NAME}")
    parser.add_argument("--hf", action="store_true", help="write a folder in Hugging Face form instead")
    args = parser.parse_args()
    draft = read_draft(args.checkpoint)
    run = read_config_file(args.checkpoint / CONFIG_NAME)
    if args.hf:
        save_draft_folder(draft, read_config(run.model_name_or_path), args.output, run.model.draft_options)
    else:
        file = args.output if args.output.suffix == ".pth" else args.output / DRAFT_WEIGHTS_NAME
        save_draft_file(draft, file, run.model.draft_options)
    print(f"{len(draft)} weights of {args.checkpoint} written to {args.output}")


if __name__ == "__main__":
    main()
