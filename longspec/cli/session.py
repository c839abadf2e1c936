"""A conversation in the terminal: reads lines, runs commands, prints answers while they are generated."""

import os
import re
import shlex
import signal
import sys
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from longspec.cli.pair import LoadedPair, SamplingOptions
from longspec.cli.prompts import decoded
from longspec.cli.stream import LEGEND, AnswerStream, describe
from longspec.data.aligners import Turn
from longspec.errors import UserError, os_errors
from longspec.inference.answering import Conversation
from longspec.inference.sampling import row_seeds
from longspec.inference.stats import GenerationStats
from longspec.models.parallel import model_parallel_rank_and_size
from longspec.signals import handled

HELP = """\
/file PATH  put the text of a file before the next message
/stats      speed and acceptance of all answers so far
/reset      forget the conversation
/help       this list
/quit       end the chat, as Ctrl-D does
Ctrl-C      stop the answer; its text so far stays in the conversation
A pasted text is one message, also if it has several lines."""
BYTES_PER_TOKEN = 32
"""A file with more bytes per token of room is not read; text has far fewer."""
ROOM = 8
"""One in this number of the target's positions is kept for a message and its answer when a file is added."""
COMMANDS = ", ".join(re.findall(r"^/\w+", HELP, re.MULTILINE))


@dataclass
class Session:
    """A chat with one pair. Each turn sends the whole conversation, of which only what is new is read."""

    pair: LoadedPair
    sampling: SamplingOptions
    console: Console
    system: str | None = None
    seed: int | None = None
    """Answer n of a conversation uses seed + n; None draws from torch's global generator."""

    answered: list[GenerationStats] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises UserError for a method that does not fit the pair."""
        self.conversation = Conversation(**self.pair.decoding())
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.turns: list[Turn] = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.files: list[str] = []
        """Texts of files for the next message."""

    def run(self) -> None:
        """Answer lines until /quit or the end of the input."""
        pair = self.pair
        self.console.print(
            f"{escape(pair.name)} on {pair.model.device}, method {pair.method}. /help lists the commands."
        )
        if pair.method != "vanilla" and self.console.color_system and not self.console.no_color:
            self.console.print(LEGEND)
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # `handle_line` refuses what is not UTF-8
        if sys.stdin.isatty():
            with suppress(ImportError):  # some builds of Python lack it
                import readline  # line editing and history in `input`

                # Pasted lines arrive as one; Python switches it off for its own prompt.
                readline.parse_and_bind("set enable-bracketed-paste on")
        # Python's own handler raises KeyboardInterrupt; the command has another one.
        with closing(self.conversation), handled(signal.SIGINT, signal.default_int_handler):
            while (line := self._read()) is not None and line != "/quit":
                self.handle_line(line)

    def handle_line(self, line: str) -> None:
        """Run a command or answer a message. A UserError or Ctrl-C during tokenization ends the turn, not the chat."""
        try:
            line = decoded(os.fsencode(line), "stdin")
            command, _, argument = line.partition(" ")
            if line == "/help":
                self.console.print(HELP, markup=False)
            elif line == "/stats":
                self.console.print(describe(self.answered) if self.answered else "no answer yet")
            elif line == "/reset":
                self.reset()
                self.console.print("The conversation is empty.")
            elif command == "/file":
                self.add_file(argument.strip())
            elif argument and command in COMMANDS.split(", "):
                raise UserError(f"{command} takes no argument")
            elif re.fullmatch(r"/\w+", line):  # with further words, it may be a path or a switch of the model
                raise UserError(f"no command {line}; use {COMMANDS}")
            else:
                files, self.files = self.files, []  # one that does not fit is not sent again
                try:
                    self.answer("\n\n".join([*files, line]))
                except KeyboardInterrupt:
                    self.files = files
                    raise
        except UserError as error:
            self.console.print(f"error: {error}", markup=False)
        except KeyboardInterrupt:
            self.console.print("[dim](stopped)[/]")

    def answer(self, text: str) -> None:
        """Generate an answer and add both turns to the conversation. The generated part of a stopped answer is kept."""
        # The whole conversation is encoded again, because a template can show old turns differently from the newest.
        turns: list[Turn] = [*self.turns, {"role": "user", "content": text}]
        (prompt,) = self.pair.encode([turns])
        if (free_positions := self.pair.positions - len(prompt)) < 1:
            problem = f"has {len(prompt)} tokens, but the target takes {self.pair.positions}; start over with /reset"
            raise UserError(f"the conversation {problem}")
        sampling = replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, free_positions))
        seed = None if self.seed is None else self.seed + len(self.turns) // 2
        seeds = row_seeds(seed, 1, greedy=sampling.temperature == 0)
        (request,) = self.pair.requests([prompt], sampling, seeds)
        # A CPU can take minutes for a prompt. A GPU may be capturing, and ranks wait for each other.
        ends_at_once = self.pair.model.device.type == "cpu" and model_parallel_rank_and_size()[1] == 1
        stream = AnswerStream(self.console, self.pair.tokenizer, ends_at_once)
        try:
            with handled(signal.SIGINT, stream.note_sigint):
                try:
                    stats = self.conversation.answer(request, stream.take)
                finally:
                    stream.end()
            if stream.stopped:
                self.console.print("[dim](stopped)[/]")
            elif len(stream.ids) == sampling.max_new_tokens and stream.ids[-1] not in request.stop_ids:
                self.console.print(f"[dim](cut at {len(stream.ids)} tokens)[/]")
            if stream.ids:
                self.answered.append(stats)
                self.console.print(f"[dim]{describe([stats])}[/]")
        except KeyboardInterrupt:
            if not stream.ids:
                raise
            self.console.print("[dim](stopped)[/]")
        # The part of a stopped answer stays in the conversation; an empty answer is dropped with its question.
        if stream.text:
            self.turns = [*turns, {"role": "assistant", "content": stream.text}]

    def add_file(self, name: str) -> None:
        """Keep the text of a file for the next message. Raises UserError if it is not a text file that fits."""
        if not name:
            raise UserError("/file needs the path of a text file")
        path = Path(os.path.expanduser(name))  # Path's own raises for an unknown user
        with suppress(ValueError):
            # Terminals quote the path of a file that is dropped into them.
            if not os.path.exists(path) and len(words := shlex.split(name)) == 1:
                path = Path(os.path.expanduser(words[0]))
        # Reading a pipe or a device may never end.
        if "\0" in name or (os.path.exists(path) and not os.path.isfile(path)):
            raise UserError(f"/file {name}: not a file")
        most = self.pair.positions - self.pair.positions // ROOM
        fits = f"at most {most} tokens leave room for a message and its answer"
        with os_errors(f"/file {name}: cannot be read"):
            if (size := path.stat().st_size) > BYTES_PER_TOKEN * most:
                raise UserError(f"/file {name}: {size} bytes are too many; {fits}")
            content = path.read_bytes()
        text = decoded(content, f"/file {name}").strip()
        turns: list[Turn] = [*self.turns, {"role": "user", "content": "\n\n".join([*self.files, text])}]
        tokens, prompt = self.pair.encode([text, turns])
        if len(prompt) > most:
            raise UserError(f"/file {name}: {len(tokens)} tokens; the conversation would have {len(prompt)}; {fits}")
        self.files.append(text)
        self.console.print(f"{path}: {len(tokens)} tokens go with the next message", markup=False)

    def _read(self) -> str | None:
        """The next line that is not blank; None at the end of the input."""
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                if line := input(prompt).strip():
                    return line
            except KeyboardInterrupt:
                self.console.print("\n(/quit or Ctrl-D ends the chat)")
            except EOFError:
                self.console.print()
                return None
