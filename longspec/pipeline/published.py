"""The trained draft as a folder to share: config, safetensors, and a model card with figures and recipe."""

from pathlib import Path

from longspec.inference.registry import choose_pair
from longspec.models.draft_files import draft_settings, load_draft
from longspec.models.draft_saving import save_draft_folder
from longspec.models.draft_vocabulary import MAPS
from longspec.models.target_files import read_config
from longspec.pipeline.report import main_table, measured
from longspec.pipeline.samples import Samples, markdown
from longspec.pipeline.settings import SOURCE, Settings, settings_yaml
from longspec.pipeline.training import final_draft, stage_table
from longspec.replacing import write_atomically

CARD = """---
base_model: {target}
library_name: longspec
tags: [speculative-decoding, {architecture}]
---
# {name} draft for {target}

A one-layer draft of {millions:.1f}M parameters. It proposes tokens to {target}, which verifies them, so the output
distribution stays the target's.

```python
from longspec import generate, load_pair

model, tokenizer = load_pair("{target}", draft="FOLDER_OR_HUB_ID")
```

## Figures

T = 0, batch 1, outputs without repetition loops, on prompts that the draft has not seen.

{figures}

## Recipe

{text} Each stage starts from the draft of the stage before.

{stages}

<details><summary>Settings of <code>longspec draft --config</code></summary>

```yaml
{settings}```

</details>
"""


def write_draft(settings: Settings, root: Path) -> None:
    """Write ROOT/draft from the last stage's checkpoint. Raises UserError for a damaged checkpoint."""
    checkpoint, folder = final_draft(settings, root), root / "draft"
    state, saved = load_draft(checkpoint), draft_settings(checkpoint)
    config = read_config(choose_pair(settings.target).target)
    save_draft_folder(state, config, folder, saved.options, target=saved.target, int8=settings.int8)
    stages, text = settings.training.stages, "The target wrote all training text."
    readers = [name for name, stage in stages.items() if SOURCE in (*stage.answers, *stage.replay)]
    if readers and settings.code.train_files:
        files = f"up to {settings.code.train_files:,} source files of installed Python packages"
        text = f"The target wrote the answers; {', '.join(readers)} also read {files}."
    card = CARD.format(
        target=Path(settings.target).name if Path(settings.target).exists() else settings.target,
        millions=sum(weight.numel() for name, weight in state.items() if name not in MAPS) / 1e6,
        figures=markdown(main_table(Samples.of_lines(measured(root)))),
        architecture=saved.options.architecture,
        name=saved.options.architecture.upper(),
        text=text,
        stages=markdown(stage_table(settings, root)),
        settings=settings_yaml(settings),
    )
    write_atomically(folder / "README.md", card)
