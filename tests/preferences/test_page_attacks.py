"""What strangers and accidents do to a page that runs, tried on a real server process."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import uvicorn

from rlhf_lightning.preferences.annotation.server import connections
from rlhf_lightning.preferences.annotation.server.serve import QuietServer
from tests.builders.labels import make_pairs
from tests.preferences.page_server import Client, Server, answer_form, csrf_token_of, serving


def test_a_label_is_refused_once_the_store_was_removed_and_the_end_says_so(tmp_path: Path):
    with serving(tmp_path, make_pairs(5)) as server:
        client = Client(server.url)
        page = client.answer(client.sign_in("Ann").text, "left").text
        server.store.unlink()
        for form in (answer_form(page, "left"), answer_form(page, "tie") | {"at_once": "1"}):
            reply = client.post("/label", form)
            assert (reply.status, "This was not saved" in reply.text) == (503, True)
        assert client.post("/undo", {"csrf_token": csrf_token_of(page)}).status == 503
        assert client.get().status == 503
        said = server.log.read_text()
        assert said.count("\n") == 1
        assert f"{server.store} was moved, removed or replaced" in said
        client.close()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 2
        assert f"error: {server.store} was moved" in server.log.read_text().splitlines()[-1]


HALF_A_HEADER = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "
HALF_A_BODY = b"POST /label HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\ncsrf"
WHOLE = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
NONSENSE = b"\x16\x03\x01\x02\x00\r\n\r\n"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that may open 256 files."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    with serving(tmp_path_factory.mktemp("small"), make_pairs(3), preexec_fn=limit) as running:
        yield running


@pytest.mark.thorough
@pytest.mark.parametrize(
    "begun",
    [b"", HALF_A_HEADER, HALF_A_BODY, WHOLE, WHOLE + HALF_A_HEADER, NONSENSE],
    ids=["nothing", "half a header", "half a body", "whole", "whole and half", "nonsense"],
)
def test_more_connections_than_files_keep_nobody_from_the_page(small: Server, begun: bytes):
    with ExitStack() as stack:
        for _ in range(400):
            each = stack.enter_context(socket.create_connection(("127.0.0.1", small.port), 5))
            each.sendall(begun)
        started = time.monotonic()
        client = Client(small.url)
        assert client.get().status == 200
        client.close()
        assert time.monotonic() - started < 5
    assert small.log.read_text().count("\n") <= 1, "nonsense is named once"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server in this process that waits for half a second; replies are endless."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(connections, "REPLY_SECONDS", 0.5)

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/long":
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"x"})

    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=connections.Connection, lifespan="off", log_level="error", ws="none"
    )
    server = QuietServer(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1]
    server.handle_exit(signal.SIGINT, None)
    server.force_exit = True
    thread.join(10)
    listening.close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("begun", "then"),
    [
        (b"", b""),
        (HALF_A_HEADER, b""),
        (HALF_A_HEADER, b"x"),
        (HALF_A_BODY, b"x"),
        (WHOLE, b"G"),
        (WHOLE.replace(b"/ ", b"/long "), b""),
    ],
    ids=["nothing", "half a header", "slow header", "slow body", "slow second", "unread reply"],
)
def test_a_request_or_reply_that_does_not_end_is_ended(hasty: int, begun: bytes, then: bytes):
    with socket.create_connection(("127.0.0.1", hasty), 5) as each:
        each.sendall(begun)
        started, is_open = time.monotonic(), True
        while is_open and time.monotonic() - started < 5:
            time.sleep(0.1)
            try:
                each.sendall(then)
                with open("/proc/net/tcp") as table:
                    own = f":{each.getsockname()[1]:04X}"
                    is_open = any(
                        line.split()[2].endswith(own) and line.split()[3] == "01"
                        for line in table.readlines()[1:]
                    )
            except OSError:
                is_open = False
        assert not is_open
        assert 0.3 < time.monotonic() - started < 3


@pytest.mark.thorough
def test_wrong_tokens_are_slowed_on_all_connections_together(tmp_path: Path):
    token = "a token of the tests, nobody's"
    with serving(tmp_path, make_pairs(1), token=token) as server:
        clients = [Client(server.url) for _ in range(12)]
        words = [csrf_token_of(client.get().text) for client in clients]

        def guess(number: int) -> int:
            given = token if number == 11 else f"a wrong token {number}"
            form = {"csrf_token": words[number], "name": "Eve", "token": given}
            client = clients[number]
            return client.post("/start", form, X_Forwarded_For=f"10.0.0.{number}").status

        with ThreadPoolExecutor(12) as pool:
            first = pool.submit(guess, 0)
            time.sleep(0.3)
            said = list(pool.map(guess, range(1, 12)))
            assert (first.result(), said) == (403, [429] * 11), "not even the right one is told"
        assert guess(11) == 303
