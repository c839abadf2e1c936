"""`longspec serve` as a process: what it refuses, where it listens, and how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

import openai
import psutil
import pytest
from http_server import TEMPLATE, printable_pair
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tiny_tokenizer import byte_tokenizer
from transformers import GenerationConfig
from typer.testing import CliRunner

from longspec.cli.app import app
from longspec.errors import UserError
from longspec.inference.engine import request_engine
from longspec.inference.server import serving
from longspec.inference.server.serving import allowed_hosts, is_loopback, listen, url_of

LIMIT_S = 60
ENDLESS = {"longspec": {"ignore_eos": True}}
KEY = "a key of the environment"


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """A server of a tiny pair, told its key by the environment, and its client. Parameter: further options."""
    printable_pair(tmp_path / "pair")
    command = [sys.executable, "-m", "longspec", "serve", str(tmp_path / "pair"), "--port", "0", "--max_rows", "2"]
    command += getattr(request, "param", [])
    environment = {**os.environ, "LONGSPEC_API_KEY": KEY, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(match[1] for line in process.stderr if (match := re.search(r"listening on (\S+)", line)))
        yield process, openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        process.kill()


def test_sigterm_lets_answers_finish_and_ends_with_143(server: tuple[subprocess.Popen[str], openai.OpenAI]) -> None:
    process, client = server
    assert not any(KEY in word for word in psutil.Process(process.pid).cmdline())
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="none").models.list()
    (model,) = client.models.list()
    stream = client.completions.create(model=model.id, prompt="ab", max_tokens=400, temperature=0, stream=True)
    text = next(stream).choices[0].text
    process.send_signal(signal.SIGTERM)
    *chunks, last = stream
    text += "".join(chunk.choices[0].text for chunk in (*chunks, last))
    assert len(text) == 400 and last.choices[0].finish_reason == "length"
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


@pytest.mark.parametrize(
    ("server", "signals", "cause"),
    [(["--drain_seconds", "0"], 1, "cancelled at the end of --drain_seconds"), ([], 2, "a second signal")],
    indirect=["server"],
)
def test_an_open_request_gets_an_error_at_the_end_and_the_log_one_line(
    server: tuple[subprocess.Popen[str], openai.OpenAI], signals: int, cause: str
) -> None:
    """A streamed one, a whole one, and one whose body has not arrived."""
    process, client = server
    (model,) = client.models.list()
    ask = partial(client.completions.create, model=model.id, prompt="ab", max_tokens=4000, extra_body=ENDLESS)
    stream = ask(stream=True)
    next(stream)
    with ThreadPoolExecutor(1) as pool, socket.create_connection(("127.0.0.1", client.base_url.port)) as unread:
        whole = pool.submit(ask)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        unread.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n".encode())
        metrics = Request(str(client.base_url.join("/metrics")), headers={"Authorization": f"Bearer {KEY}"})
        while b"longspec_running_rows 2.0" not in urlopen(metrics, timeout=LIMIT_S).read():
            pass
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            with suppress(ConnectionError):  # refused or reset, once it has acted on the signal
                while True:
                    socket.create_connection(unread.getpeername()).close()
        with pytest.raises(openai.APIError, match="the server stopped before the answer was complete"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="503 - the server stopped"):
            whole.result()
        assert unread.recv(2**16).startswith(b"HTTP/1.1 503 ")
    assert process.wait(LIMIT_S) == 128 + signal.SIGINT
    line, end = process.stderr.read().splitlines()
    assert "3 " in line and cause in line and end == "stopped by SIGINT"


def serve_to(probe: Callable[[TestClient], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """`longspec serve` hands its application to `probe` and ends."""

    class Server:
        def __init__(self, app: Starlette, drain_seconds: int) -> None:
            self.app = app

        def run(self, sockets: list[socket.socket]) -> None:
            with TestClient(self.app, base_url="http://127.0.0.1") as client:
                probe(client)

    monkeypatch.setattr(serving, "http_server", Server)
    monkeypatch.delenv("LONGSPEC_API_KEY", raising=False)


def test_an_answer_without_a_limit_fits_into_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short, a row holds fewer tokens than the target has positions."""
    seen = []

    def probe(client: TestClient) -> None:
        (model,) = client.get("/v1/models").json()["data"]
        positions = model["longspec"]["positions"]
        body = {"messages": [{"role": "user", "content": "a" * (positions - 30)}]}
        seen.append((positions, client.post("/v1/chat/completions", json=body).json()))

    monkeypatch.setattr(request_engine, "free_bytes", lambda device: 6 * 2**20)
    serve_to(probe, monkeypatch)
    model = printable_pair(tmp_path)
    GenerationConfig(do_sample=True, temperature=0.5, top_k=9, repetition_penalty=1.25).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", "0", "--max_rows", "2"])
    ((positions, answer),) = seen
    assert result.exit_code == 0 and positions < model.config.max_position_embeddings
    assert f"for 2 rows of up to {positions} tokens" in result.stderr
    monkeypatch.setattr(request_engine, "free_bytes", lambda device: 12 * 2**20)
    without = ["serve", str(tmp_path), "--port", "0", "--generation_config", "none"]
    assert "temperature 1.0 by default" in (plain := CliRunner().invoke(app, without).stderr)
    assert "GiB for 4 rows" in plain  # the default on a CPU
    assert "repetition" not in plain
    assert "temperature 0.5, top_k 9, repetition_penalty 1.25 by default" in result.stderr
    assert answer["usage"]["total_tokens"] <= positions and answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_request_sets_variables_of_the_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the template does not have change nothing; those of the command cannot be set."""
    printable_pair(tmp_path)
    template = "{% if shout is defined %}<{{ shout }}>{% endif %}{{ depth }}" + TEMPLATE
    byte_tokenizer(template).save_pretrained(tmp_path)
    replies = []

    def probe(client: TestClient) -> None:
        for variables in ({}, {"shout": "hey", "loud": 1, "x": None}, {"depth": 2}, {"chat_template": "other"}):
            body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": variables, "max_tokens": 1}
            replies.append(client.post("/v1/chat/completions", json=body))

    serve_to(probe, monkeypatch)
    command = ["serve", str(tmp_path), "--port", "0", "--chat_template_kwargs", '{"depth": 1}']
    assert CliRunner().invoke(app, command).exit_code == 0
    *answered, fixed, failed = replies
    plain, shouted = (reply.json()["usage"]["prompt_tokens"] for reply in answered)
    assert shouted - plain == len("<hey>")
    assert [reply.status_code for reply in (fixed, failed)] == [400, 400]
    assert "depth is fixed" in fixed.json()["error"]["message"]
    assert {reply.json()["error"]["param"] for reply in (fixed, failed)} == {"chat_template_kwargs"}


@pytest.mark.parametrize("command", ["serve", "bench", "chat", "generate"])
def test_variables_reach_the_chat_template(tmp_path: Path, command: str) -> None:
    printable_pair(tmp_path)
    given = [command, "--model", str(tmp_path), "--chat_template_kwargs", '{"enable_thinking": false}']
    given += ["--port", "0"] if command == "serve" else []
    with pytest.raises(UserError, match="chat template has no variable enable_thinking"):
        raise CliRunner().invoke(app, given, input="hello").exception  # type: ignore[misc]


def test_other_addresses_than_loopback_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGSPEC_API_KEY", raising=False)
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(UserError, match="needs --api_key"):
            raise CliRunner().invoke(app, ["serve", "no-such-pair", "--host", host]).exception
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "")))
    assert allowed_hosts("0.0.0.0", "key") == ["*"] and "*" not in allowed_hosts("127.0.0.1", None)


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_connections_send_small_writes_at_once_and_all_addresses_include_those_of_ipv4(host: str) -> None:
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")
    with listen(host, 0, "key") as listening:
        address = ("127.0.0.1", listening.getsockname()[1])
        with socket.create_connection(address, timeout=10), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_what_cannot_be_listened_on_is_refused_before_the_weights_are_loaded() -> None:
    with listen("127.0.0.1", 0, None) as taken:
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        for given, part in (
            (["--port", str(port)], "cannot be bound"),
            (["--host", "192.0.2.1", "--api_key", "k"], "cannot be bound"),
            (["--host", "no.such.host.invalid", "--api_key", "k"], "cannot be bound"),
            (["--api_key", "schlüssel"], "printable ASCII"),
        ):
            with pytest.raises(UserError, match=part):
                raise CliRunner().invoke(app, ["serve", "no-such-pair", *given]).exception
