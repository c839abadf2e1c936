"""The web application under limits, disconnects and failures, its keys, and what it serves next to answers."""

import asyncio
from typing import Any

import pytest
from http_server import NAME, POSITIONS
from server_script import HELLO, LIMITS, TOKENIZER, Script, application, chat, events, ids, said, talk
from starlette.testclient import TestClient
from tiny_tokenizer import VOCAB_SIZE

import longspec.inference.server.app
from longspec.inference.engine.requests import Finished, QueueFull, RequestTooLarge
from longspec.inference.server.limits import Limits


def test_a_body_above_the_limit_is_not_read(client: TestClient) -> None:
    response = client.post("/v1/completions", content=b" " * 200_000, headers={"content-type": "application/json"})
    assert response.status_code == 413 and response.headers["connection"] == "close"
    assert "100000 bytes" in response.json()["error"]["message"]


def test_a_body_must_arrive_in_time(script: Script) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(talk(application(script, Limits(body_seconds=0.01)), None, asyncio.Event().wait, send))
    assert sent[0]["status"] == 408 and not script.submitted


def test_a_full_queue_is_a_429_that_says_when_to_come_back(script: Script) -> None:
    script.refusal, script.room = QueueFull("the queue is full"), 1
    with TestClient(application(script)) as client:
        response = client.post("/v1/chat/completions", json={**HELLO, "n": 2})
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert script.cancelled == script.submitted != []  # the first choice gives its place back
        script.refusal, script.room = RequestTooLarge("5000 slots needed, 4096 there"), 0
        assert "5000" in chat(client, 400, **HELLO)["error"]["message"]
        assert chat(client, 400, **HELLO, temperature=1e-37)["error"]["param"] == "temperature"


def test_a_request_that_takes_too_long_gives_its_row_back(script: Script) -> None:
    script.events = [said("a")]
    with TestClient(application(script, Limits(max_seconds=0.05))) as client:
        assert chat(client, 504, **HELLO)["error"]["code"] == "timeout"
        assert events(client, **HELLO)[-1]["error"]["code"] == "timeout"
    assert script.cancelled == script.submitted and len(script.submitted) == 2


@pytest.mark.parametrize("server_ends", [False, True])
def test_a_client_that_does_not_read_gives_its_row_back(
    script: Script, monkeypatch: pytest.MonkeyPatch, server_ends: bool
) -> None:
    """At its deadline, and at the end of the server, which does not wait for it."""
    monkeypatch.setattr(longspec.inference.server.app, "LAST_EVENTS_S", 0.05)
    script.events, is_blocked = [said("a")], asyncio.Event()
    limits = LIMITS if server_ends else Limits(max_seconds=0.05)

    async def send(message: Any) -> None:
        is_blocked.set()
        await asyncio.Event().wait()

    async def ended() -> None:
        body = {**HELLO, "stream": True}
        task = asyncio.create_task(talk(application(script, limits), body, asyncio.Event().wait, send))
        await is_blocked.wait()
        if server_ends:
            task.cancel()
        assert (await asyncio.wait({task}, timeout=10))[0]

    asyncio.run(ended())
    assert script.cancelled == script.submitted != []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_gives_its_row_back(script: Script, stream: bool) -> None:
    """Nothing is sent to it once its request is known to be gone."""
    script.events, sent = [said("a")], []

    async def disconnect() -> Any:
        while not script.submitted:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(talk(application(script), {**HELLO, "stream": stream}, disconnect, send))
    assert script.cancelled == script.submitted != []
    assert not any(b"[DONE]" in message.get("body", b"") for message in sent)


def test_a_key_guards_everything_but_health_and_the_page(script: Script) -> None:
    with TestClient(application(script, api_key="secret")) as client:
        paths = ("/v1/models", f"/v1/models/{NAME}", "/metrics")
        for headers in ({}, *({"Authorization": value} for value in ("Bearer wrong", "Basic secret", "Bearer "))):
            assert [client.get(path, headers=headers).status_code for path in paths] == [401] * 3
            refused = client.post("/v1/chat/completions", json=HELLO, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        for body in (b"{", b" " * (LIMITS.max_body_bytes + 1)):  # refused for the key, before the body is read
            assert client.post("/v1/chat/completions", content=body).status_code == 401
        for scheme in ("bearer", "BEARER ", "  Bearer"):  # names of schemes have no case
            assert client.get("/v1/models", headers={"Authorization": f"{scheme} secret "}).status_code == 200
        good = {"Authorization": "Bearer secret"}
        assert [client.get(path, headers=good).status_code for path in paths] == [200] * 3
        assert client.post("/v1/chat/completions", json=HELLO, headers=good).status_code == 200
        assert client.get("/health").status_code == client.get("/").status_code == 200


def test_health_models_and_unknown_names(client: TestClient, script: Script) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    script.healthy = False
    assert client.get("/health").status_code == 503 and "out of memory" in client.get("/health").text
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == NAME and model["longspec"] == {"method": "tree", "positions": POSITIONS}
    assert client.get("/v1/models/other").status_code == 404 and chat(client, 404, **HELLO, model="other")
    for path in ("/v1/files", "/docs", "/openapi.json", "/page.html", "/..%2f..%2fetc/passwd"):
        assert client.get(path).status_code == 404
    refused = client.get("/v1/chat/completions")
    assert refused.status_code == 405 and refused.headers["allow"] == "POST"
    for path in ("/", "/health", "/metrics", "/v1/models", f"/v1/models/{NAME}"):
        whole, head = client.get(path), client.head(path)
        assert head.status_code == whole.status_code and not head.content
        assert head.headers["content-type"] == whole.headers["content-type"]
        refused = client.delete(path)
        assert refused.status_code == 405 and set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}
    for path in ("/v1/responses", "/chat/completions", "/v1/embeddings"):
        assert "use POST /v1/chat/completions" in client.post(path, json={}).json()["error"]["message"]


def test_only_its_own_names_reach_a_server_without_a_key(script: Script) -> None:
    with TestClient(application(script, hosts=["localhost", "[::1]"]), base_url="http://localhost:8000") as client:
        assert client.get("/health").status_code == 200
        for host in ("[::1]:8000", "[::1]", "LocalHost", "localhost:", "localhost.:8000"):
            assert client.get("/health", headers={"host": host}).status_code == 200
        for host in ("page.example:8000", "localhost.example", "[::1].example", "", "localhost:8000:9", "x:localhost"):
            error = client.get("/health", headers={"host": host}).json()["error"]
            assert error["type"] == "invalid_request_error" and "localhost" in error["message"]


def test_the_tokenizer_is_served_as_vllm_does(client: TestClient) -> None:
    found = client.post("/tokenize", json={"prompt": "h\xe9", "add_special_tokens": False}).json()
    assert found == {"tokens": ids("h\xe9"), "count": 3, "max_model_len": POSITIONS}
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "h\xe9"}
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "</s>" and info["chat_template"] == TOKENIZER.chat_template
    for tokens in ([-1], [VOCAB_SIZE], [2**40]):
        error = client.post("/detokenize", json={"tokens": tokens}).json()["error"]
        assert error["param"] == "tokens" and "the vocabulary has" in error["message"]


def test_metrics_tell_what_the_scheduler_and_the_requests_did(client: TestClient, script: Script) -> None:
    script.events = [said("a"), said("bcd"), Finished("length")]
    chat(client, **HELLO)
    lines = client.get("/metrics").text.splitlines()
    for line in (
        "longspec_queue_length 2.0",
        "longspec_running_rows 3.0",
        "longspec_acceptance_length 2.5",
        'longspec_finished_requests_total{reason="stop"} 5.0',
        "longspec_time_to_first_token_seconds_count 1.0",
        "longspec_inter_token_latency_seconds_count 3.0",
    ):
        assert line in lines, line


def test_a_failure_of_the_server_itself_is_a_500(script: Script) -> None:
    script.refusal, script.room = ZeroDivisionError("a defect"), 0
    with TestClient(application(script), raise_server_exceptions=False) as client:
        assert "its log has the cause" in chat(client, 500, **HELLO)["error"]["message"]


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    response = client.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert "http" not in response.text.replace("http-equiv", "").lower().partition("<body>")[0]
    assert " src=" not in response.text and "@import" not in response.text and "url(" not in response.text
    assert not [word for word in (" style=", " onclick=", "innerHTML", "eval(") if word in response.text]
