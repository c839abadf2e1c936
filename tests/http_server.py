"""The real HTTP server over a tiny pair whose answers are printable ASCII, for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pairs import make_pair
from tiny_tokenizer import VOCAB_SIZE, byte_tokenizer

from longspec.data.aligners import Turn
from longspec.data.prompts import conversation_text
from longspec.data.templates import encode_texts
from longspec.inference.server.app import build_app
from longspec.inference.server.limits import Limits
from longspec.inference.server.scheduler import Scheduler
from longspec.inference.server.served_model import ServedModel
from longspec.inference.server.serving import allowed_hosts, http_server, listen, url_of
from longspec.models.glide import GlideMixin

NAME, EOS = "tiny", 2
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
POSITIONS = 4096
LIMITS = Limits()


def printable_pair(folder: Path) -> GlideMixin:
    """A random pair whose greedy answers are letters, digits, signs and spaces; saved in `folder`."""
    model = make_pair(folder, vocab_size=VOCAB_SIZE, initializer_range=0.3)
    tokenizer = chat_tokenizer()
    printable = [token for token in range(VOCAB_SIZE) if tokenizer.decode([token]).isprintable()]
    with torch.no_grad():
        silent = torch.ones(VOCAB_SIZE, dtype=torch.bool)
        silent[[token for token in printable if tokenizer.decode([token]).isascii() and token > 5]] = False
        model.lm_head.weight[silent] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def chat_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass
class Running:
    """A server that listens."""

    url: str
    model: GlideMixin
    scheduler: Scheduler


@contextmanager
def serving(
    model: GlideMixin, method: str = "tree", api_key: str | None = None, limits: Limits = LIMITS, **options: object
) -> Iterator[Running]:
    """Runs the server in a thread. options: those of the scheduler."""
    tokenizer = chat_tokenizer()

    def encode(prompts: list[str | list[Turn]]) -> list[list[int]]:
        texts = [p if isinstance(p, str) else conversation_text(p, "llama", tokenizer, "tokenizer") for p in prompts]
        return encode_texts(texts, tokenizer)

    served = ServedModel(NAME, method, tokenizer, encode, frozenset({EOS}), POSITIONS, VOCAB_SIZE)
    scheduler = Scheduler(model, method=method, **options)
    scheduler.start()
    app = build_app(served, scheduler, limits, api_key, allowed_hosts("127.0.0.1", api_key))
    server = http_server(app, drain_seconds=0)
    with listen("127.0.0.1", 0, api_key) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Running(url_of(listening), model, scheduler)
        finally:
            server.should_exit = True
            thread.join()
            scheduler.close()
