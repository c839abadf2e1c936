"""The bodies of answers in OpenAI's format, whole and in chunks."""

import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from longspec.inference.detokenizer import REPLACEMENT
from longspec.inference.server.answer_text import Piece
from longspec.inference.server.job import Delta, Job

Body = dict[str, Any]
BYTES = {mark: byte for byte, mark in bytes_to_unicode().items()}
"""Bytes by the characters that stand for them in the vocabularies of byte-level BPE."""
DONE = "data: [DONE]\n\n"
LINE_ENDS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}
"""Characters at which some clients split lines, and that JSON does not escape, with their escapes."""


def server_sent_event(body: Body) -> str:
    """The event, whose data is one line for every client."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(LINE_ENDS)}\n\n"


class Replies:
    """Writes the answers to one request."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: str, job: Job) -> None:
        self.job, self.tokenizer = job, job.tokenizer
        self.logprobs, self.extended = job.body.alternatives, job.body.longspec.tokens
        self.usage = job.body.stream_options.include_usage
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        first = self.tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._first = first, len(self.tokenizer.decode(first))
        """A token and its length as text. It precedes others: SentencePiece drops the space of a text's first token."""
        self._lengths: Counter[int] = Counter()
        """Number of characters that were sent, by choice."""

    def whole(self, deltas: Sequence[Delta]) -> Body:
        """The answer once all deltas are known."""
        choices = []
        for index in range(len(self.job.choices)):
            own = [delta for delta in deltas if delta.index == index]
            pieces = [piece for delta in own for piece in delta.pieces]
            fields = self._choice(_text(pieces)) | self._logprobs(index, pieces)
            choices.append({"index": index, **fields, "finish_reason": own[-1].finish_reason})
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.job.usage}

    def opening(self) -> list[Body]:
        """The chunks before the first token."""
        return []

    def chunk(self, delta: Delta) -> Body | None:
        """A chunk for a delta; None if there is nothing to tell."""
        if not (delta.pieces or delta.finish_reason or (self.extended and delta.tree)):
            return None
        fields = self._delta(_text(delta.pieces)) | self._logprobs(delta.index, delta.pieces)
        body = self._chunk([{"index": delta.index, **fields, "finish_reason": delta.finish_reason}])
        return body | ({"longspec": self._extension(delta)} if self.extended else {})

    def closing(self) -> list[Body]:
        """The chunks after the last token."""
        return [{**self._chunk([]), "usage": self.job.usage}] if self.usage else []

    def _chunk(self, choices: list[Body]) -> Body:
        body = {**self.head, "object": self.chunk_kind, "choices": choices}
        # With usage requested, every chunk but the last has the field as null.
        return body | ({"usage": None} if self.usage else {})

    def _choice(self, text: str) -> Body:
        return {"text": text}

    def _delta(self, text: str) -> Body:
        return self._choice(text)

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> Body:
        if self.logprobs is None:
            return {"logprobs": None}
        offsets = []
        for piece in pieces:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(piece.text)
        # Text that is left over after the last token has no id, and so no log-probability.
        known = [(piece, offset) for piece, offset in zip(pieces, offsets, strict=True) if piece.id is not None]
        return {"logprobs": self._logprob_fields(known)}

    def _logprob_fields(self, pieces: Sequence[tuple[Piece, int]]) -> Body:
        """pieces: each with its offset in the text."""
        return {
            "tokens": [self._name(piece.id) for piece, _ in pieces],
            "token_logprobs": [piece.logprob for piece, _ in pieces],
            "top_logprobs": [self._best(piece) for piece, _ in pieces] if self.logprobs else None,
            "text_offset": [offset for _, offset in pieces],
        }

    def _best(self, piece: Piece) -> dict[str, float | None] | None:
        """The most probable tokens and the token itself, by text; None for the first token of a prompt."""
        if piece.alternatives is None:
            return None
        best: dict[str, float | None] = {}
        for token, logprob in (*piece.alternatives, (piece.id, piece.logprob)):
            best.setdefault(self._name(token), logprob)  # of tokens with one text, the most probable one
        return best

    def _token(self, token: int | None) -> str:
        first, characters = self._first
        return self.tokenizer.decode([*first, token])[characters:]

    def _name(self, token: int | None) -> str:
        """The token's text, or the bytes of a part of a character in the form of OpenAI's completions."""
        text = self._token(token)
        return text if REPLACEMENT not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes(token))

    def _bytes(self, token: int | None) -> bytes:
        text = self._token(token)
        if REPLACEMENT in text:  # in place of a part of a character
            name = self.tokenizer.convert_ids_to_tokens(token)
            if match := re.fullmatch(r"<0x([0-9A-F]{2})>", name):  # a byte in SentencePiece's vocabularies
                return bytes.fromhex(match[1])
            if BYTES.keys() >= set(name):
                return bytes(BYTES[mark] for mark in name)
        return text.encode()

    def _extension(self, delta: Delta) -> Body:
        body: Body = {"tokens": [{"text": piece.text, "origin": piece.origin} for piece in delta.pieces]}
        if delta.tree is not None:
            tree = asdict(delta.tree)
            body["tree"] = {"texts": [self._token(token) for token in tree.pop("tokens")], **tree}
        if delta.timings is not None:
            body["timings"] = asdict(delta.timings)
        return body


class ChatReplies(Replies):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self) -> list[Body]:
        fields = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": index, **fields}]) for index in range(len(self.job.choices))]

    def _choice(self, text: str) -> Body:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> Body:
        return {"delta": {"content": text} if text else {}}

    def _logprob_fields(self, pieces: Sequence[tuple[Piece, int]]) -> Body:
        content = []
        for piece, _ in pieces:
            best = [self._entry(*alternative) for alternative in piece.alternatives or ()]
            content.append({**self._entry(piece.id, piece.logprob), "top_logprobs": best})
        return {"content": content, "refusal": None}

    def _entry(self, token: int | None, logprob: float | None) -> Body:
        return {"token": self._token(token), "logprob": logprob, "bytes": list(self._bytes(token))}


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)
