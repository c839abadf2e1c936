"""The command `longspec draft`: from a target to a trained, measured draft. `longspec.pipeline.run` does the work."""

import shlex
import sys
from collections.abc import Sequence

from longspec.command_line import Parser
from longspec.errors import reports_user_errors
from longspec.extras import demo_extra

EXAMPLES = (
    "longspec draft Qwen/Qwen2.5-0.5B-Instruct",
    "longspec draft TARGET --hours 2 --text prompts.jsonl --output_dir outputs/mine --yes",
    "longspec draft TARGET --dry_run > settings.yaml",
    "longspec draft TARGET --evaluate DRAFT",
)


@reports_user_errors
def main(argv: Sequence[str] | None = None, prog: str = "longspec draft") -> None:
    """Train and measure a draft, or measure a published one. The same command continues after it was stopped."""
    options = _parser(prog).parse_intermixed_args(argv)
    with demo_extra():
        from longspec.pipeline.run import draft

    draft(options, shlex.join([*prog.split(), *(sys.argv[2:] if argv is None else argv)]))


def _parser(prog: str) -> Parser:
    parser = Parser(
        EXAMPLES,
        prog=prog,
        usage="%(prog)s TARGET [options] [key=value ...]",
        description="Train a draft for a target and measure it: the target writes its text, its induction heads\n"
        "choose the layer that the draft reads, three stages train it, and every method decodes held-out prompts.\n"
        "The same command continues after it was stopped, also on another number of GPUs.",
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="name of a pair, folder, hub id or .gguf file")
    add("overrides", nargs="*", default=[], metavar="key=value", help="values that replace those of the settings")
    add("--output_dir", help="default: outputs/NAME")
    add("--hours", type=float, help="time to fill, default: 0.5 (0.1 with --evaluate)")
    add("--contexts", type=int, help="longest context of training and evaluation, in tokens, from 1024, default: 32768")
    add("--text", nargs="+", default=(), metavar="FILE", help="JSONL with prompts like those that you will use")
    add("--config", metavar="FILE", help="settings, in place of those for --hours")
    add("--evaluate", metavar="DRAFT", help="measure this draft, file, folder, hub id or a pair's name; train nothing")
    add("--dry_run", action="store_true", help="print the plan and the settings, a file for --config, and stop")
    add("--yes", action="store_true", help="start without asking")
    return parser
