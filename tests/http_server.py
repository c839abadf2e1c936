"""The real HTTP server over a tiny pair whose answers are printable ASCII, for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pairs import make_pair
from tiny_tokenizer import VOCAB_SIZE, byte_tokenizer

from longspec.data.aligners import Turn
from longspec.data.templates import conversation_text, encode_texts
from longspec.inference.engine.scheduler import Scheduler
from longspec.inference.server.app import build_app
from longspec.inference.server.limits import Limits
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
    """A random pair, saved in `folder`, whose greedy answers are printable ASCII. Its layers add little to the
    embedding, so the draft often agrees with the target."""
    model, tokenizer = make_pair(folder, vocab_size=VOCAB_SIZE, initializer_range=0.3), chat_tokenizer()
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in range(VOCAB_SIZE)]
    silent = [token for token, text in enumerate(texts) if not (text and text.isascii() and text.isprintable())]
    with torch.no_grad():
        model.lm_head.weight[silent] = 0
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= 0.01 if name.startswith("draft_model.") else 0.03
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def chat_tokenizer():
    return byte_tokenizer(TEMPLATE)


def encode(prompts: list[str | list[Turn]], variables: object = None, tokenizer: Any = None) -> list[list[int]]:
    tokenizer = tokenizer or chat_tokenizer()
    texts = [p if isinstance(p, str) else conversation_text(p, "llama", tokenizer, "tokenizer") for p in prompts]
    return encode_texts(texts, tokenizer)


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
    served = ServedModel(NAME, method, chat_tokenizer(), encode, frozenset({EOS}), POSITIONS, VOCAB_SIZE)
    scheduler = Scheduler(model, method=method, **{"tree_shape": (3, 3, 2), **options})
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
