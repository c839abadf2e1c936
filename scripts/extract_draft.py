"""`longspec extract` as a script: the draft of a training checkpoint, without its target and without starting ranks.

python scripts/extract_draft.py outputs/RUN/last_ds DRAFT.pth
python scripts/extract_draft.py outputs/RUN/last_ds FOLDER --hf     # safetensors + config.json, ready for the hub
"""

import sys

from longspec.cli import app

if __name__ == "__main__":
    sys.argv.insert(1, "extract")
    app.main()
