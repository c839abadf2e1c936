"""`longspec chat` on a tiny pair, in this process and on a pseudo terminal."""

import io
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from rich.console import Console
from test_console import invoke
from tiny_tokenizer import byte_tokenizer

from longspec.cli import pair as pairs
from longspec.cli.options import PairOptions
from longspec.cli.session import Session
from longspec.cli.stream import STYLES, AnswerStream
from longspec.inference.engine.requests import Tokens

LIMIT_S = 60


def opened(target: Path) -> pairs.LoadedPair:
    return pairs.open_pair(PairOptions(str(target)), None)


def said(session: Session, *messages: str) -> str:
    """What the terminal shows for some lines of input."""
    for message in messages:
        session.handle_line(message)
    return session.console.file.getvalue()  # type: ignore[attr-defined]


def terminal(**environment: str) -> Console:
    settings = {"color_system": "truecolor", "width": 500, "highlight": False}
    return Console(file=io.StringIO(), force_terminal=True, _environ=environment, **settings)


def test_accepted_tokens_have_a_color_and_the_conversation_is_kept(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert opened(target).method == "auto" and capsys.readouterr().err.count("no trained draft") == 1
    loaded, sampling = pairs.open_pair(PairOptions(str(target)), "lookup"), pairs.SamplingOptions(max_new_tokens=40)
    session = Session(loaded, sampling, terminal(), system="Be brief.")
    output = said(session, "abcabcabc", "again", "/stats", "/help")
    red, green, blue = (int(STYLES["lookup"][at : at + 2], 16) for at in (1, 3, 5))
    assert output.count(f"\x1b[38;2;{red};{green};{blue}m") >= 2
    assert [turn["role"] for turn in session.turns] == ["system", "user", "assistant", "user", "assistant"]
    assert "/file PATH" in output and output.count("(cut at 40 tokens)") == 2 and "80 tokens" in output
    assert session.conversation.engine is not None
    assert session.conversation.engine.worker.counts.cached_prompt_tokens > len("Be brief.abcabcabc")
    first = session.turns[2]
    said(session, "/reset")
    assert [turn["role"] for turn in session.turns] == ["system"]
    plain = Session(loaded, sampling, terminal(NO_COLOR="1"), system="Be brief.")
    assert "\x1b[38" not in said(plain, "abcabcabc") and plain.turns[2] == first
    loaded.stop_ids = list(range(loaded.model.config.vocab_size))
    assert "cut" not in said(Session(loaded, pairs.SamplingOptions(max_new_tokens=1), terminal()), "abc")


def test_a_file_goes_with_the_next_message_and_only_commands_start_with_a_slash(target: Path, tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("the text\nof a file\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    session = Session(opened(target), pairs.SamplingOptions(max_new_tokens=2), terminal())
    output = said(
        session, f"/file {tmp_path}/a b.txt", "a question\nin two lines", "/usr/bin is a folder", "/no_think 1 + 1?"
    )
    assert "a b.txt: 18 tokens go with the next message" in output
    asked = [turn["content"] for turn in session.turns if turn["role"] == "user"]
    assert asked == ["the text\nof a file\n\na question\nin two lines", "/usr/bin is a folder", "/no_think 1 + 1?"]
    assert "error: /file needs the path of a text file\n" in said(session, "/file")
    problems = {"none.txt": "cannot be read (No such file", "image.png": "not UTF-8 text", ".": "not a file"}
    for name, problem in problems.items():
        assert f"error: /file {tmp_path}/{name}: {problem}" in said(session, f"/file {tmp_path}/{name}")
    assert "error: /file ~nobody here: cannot be read" in said(session, "/file ~nobody here")
    for line in ("/clear", "/Quit"):  # one that does not exist is told and not sent
        assert f"error: no command {line}; use /file, /stats, /reset, /help, /quit\n" in said(session, line)
    assert "error: /stats takes no argument\n" in said(session, "/stats now")
    session.pair.encode = Mock(side_effect=KeyboardInterrupt)  # Ctrl-C while the tokenizer reads a long text
    assert "(stopped)" in said(session, f"/file '{tmp_path}/a b.txt'")  # as terminals quote a dropped file
    assert len(session.turns) == 6


def test_a_conversation_and_a_file_that_do_not_fit_are_told_so(target: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 3600)
    (tmp_path / "half.txt").write_text("x" * 2500)
    (tmp_path / "huge.txt").write_text("x" * 120_000)
    session = Session(opened(target), pairs.SamplingOptions(max_new_tokens=8), terminal())
    error = "error: the conversation has 4510 tokens, but the target takes 4096; start over with /reset"
    assert error in said(session, "x" * 4500)
    session.files.append("x" * 4500)
    assert error[:24] in said(session, "a file that is too long")
    assert session.turns == session.files == []
    output = said(session, f"/file {tmp_path}/long.txt", f"/file {tmp_path}/half.txt", f"/file {tmp_path}/half.txt")
    for name, tokens, together in (("long.txt", 3600, 3610), ("half.txt", 2500, 5012)):
        problem = f"{tokens} tokens; the conversation would have {together}; at most 3584 tokens leave room"
        assert f"error: /file {tmp_path}/{name}: {problem} for a message and its answer\n" in output
    assert "huge.txt: 120000 bytes are too many; at most 3584 tokens" in said(session, f"/file {tmp_path}/huge.txt")
    assert output.count("2500 tokens go with") == 1 and session.files == ["x" * 2500]
    assert "8 tokens, " in said(session, "hello")


def test_an_answer_cannot_control_the_terminal_and_ends_at_once_before_its_first_token() -> None:
    tokenizer, console = byte_tokenizer(), terminal()
    stream = AnswerStream(console, tokenizer, ends_at_once=True)
    with pytest.raises(KeyboardInterrupt):
        stream.note_sigint(signal.SIGINT, None)  # there is nothing to keep
    for token in tokenizer("a\x1b[2J\x07b\n", add_special_tokens=False)["input_ids"]:
        stream.take(0, Tokens([token], ["target"]))
    stream.note_sigint(signal.SIGINT, None)
    assert console.file.getvalue() == "a[2Jb\n" and stream.stopped  # type: ignore[attr-defined]


def test_lines_from_a_pipe_are_answered_up_to_quit(target: Path) -> None:
    shown = invoke("chat", target, "--max_new_tokens", 3, input=b"hello\n\n\xff\nmore\n/quit\nnever\n").output
    assert shown.count("\n3 tokens") == 2 and "> " not in shown and "error: stdin: not UTF-8 text" in shown
    assert invoke("chat", target, "--max_new_tokens", 3, input="hello\n").output.count("\n3 tokens") == 1


class Terminal:
    """`longspec chat` on a pseudo terminal."""

    def __init__(self, *arguments: object) -> None:
        self.text = ""
        self.pid, self.handle = pty.fork()
        if self.pid == 0:
            environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            os.execvpe(sys.executable, [sys.executable, "-m", "longspec", "chat", *map(str, arguments)], environment)

    def until(self, pattern: str) -> str:
        """What appears up to a match of `pattern`, which is taken off the text."""
        deadline = time.monotonic() + LIMIT_S
        while not (match := re.search(pattern, self.text, re.DOTALL)):
            assert time.monotonic() < deadline, self.text
            if select.select([self.handle], [], [], 1)[0]:
                self.text += os.read(self.handle, 2**16).decode(errors="replace")
        shown, self.text = self.text[: match.end()], self.text[match.end() :]
        return shown

    def wait_for_a_key(self) -> None:
        """Python looks at a signal when readline's wait for a key is interrupted, so the wait must have begun."""
        while psutil.Process(self.pid).status() != psutil.STATUS_SLEEPING:
            pass

    def type(self, text: str) -> None:
        os.write(self.handle, text.encode())


@pytest.fixture
def chat(target: Path) -> Iterator[Terminal]:
    chat = Terminal(target, "--max_new_tokens", 4000)
    yield chat
    with suppress(ProcessLookupError):
        os.kill(chat.pid, signal.SIGKILL)
    os.close(chat.handle)


def test_ctrl_c_stops_the_answer_and_sigterm_the_chat(chat: Terminal) -> None:
    """At the prompt Ctrl-C ends nothing. Text streams before the answer ends, and what there is of it is the next
    prompt's history. A pasted text of two lines is one message."""
    chat.until("loading")
    chat.until(r"Orange.*> ")
    for message in ("\x1b[200~hel\nlo\x1b[201~", "more"):
        chat.type(f"{message}\n")
        chat.until(r"(lo|more)\S*\r\n.{200}")  # longer than the notice of the first use
        chat.type("\x03")
        chat.until(r"\(stopped\).*tokens/s.*> ")
    chat.type("/stats\n")
    assert 100 < int(re.findall(r"(\d+) tokens, ", chat.until("tokens/s.*> "))[0]) < 4000
    # Of a conversation that is too long, the message tells the tokens: those of both questions and of both answers.
    chat.type(f"{'x' * 4000}\n")
    tokens = int(re.findall(r"has (\d+) tokens", chat.until(r"error: .*/reset.*> "))[0])
    assert tokens > len("<user>hel\nlo<a>more") + 4000 + 100
    chat.wait_for_a_key()
    os.kill(chat.pid, signal.SIGTERM)
    assert psutil.Process(chat.pid).wait(LIMIT_S) == 128 + signal.SIGTERM
