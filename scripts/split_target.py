"""`longspec split` as a script: a target's weights in a folder for each of N ranks that share it.

python scripts/split_target.py --target Qwen/QwQ-32B-Preview --tp_size 2 --output targets/qwq-tp2

Then launch with `tp_size=2 model_name_or_path=targets/qwq-tp2`.
"""

import sys

from longspec.cli import app

if __name__ == "__main__":
    sys.argv.insert(1, "split")
    app.main()
